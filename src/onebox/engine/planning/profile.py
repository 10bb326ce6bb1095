"""Profiling: timing of a model's segments on the devices of a pool, by training with each segment as a stage.

Profiling runs the model like training does: its plan has one stage for each segment, all on one device, and a table
that runs them in sequence. All devices of a host train at once, so that cores, caches and memory are shared as in real
training; of hosts that are alike, one does. Of segments with equal programs, such as those of the blocks of a
transformer, the first and the last are trained, and stand for the others.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from onebox.cost import load, store
from onebox.cost.model_profile import (
    AS_CAPTURED,
    ModelBytes,
    ModelProfile,
    SegmentTimes,
    SegmentVariant,
)
from onebox.engine.config import check_precision, numeric_instructions, resolved_numerics, steps_in_flight
from onebox.engine.data.prefetch import BatchPrefetcher
from onebox.engine.planning.slowdowns import FEWEST_SLICES, SliceSlowdown, at_median, slice_slowdown
from onebox.engine.problem.estimate import estimate_profile
from onebox.engine.problem.planner_problem import CachedTimes, ResolvedPlan, device_type, divided_bytes, times_key
from onebox.engine.problem.stage_formats import compared, ways_of
from onebox.engine.session import TrainingSession
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.results import TraceEvent
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec, target_type
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import DeviceMemoryError, UsageError
from onebox.graph import Loss, ModelPrograms, Precision, TracedModel
from onebox.graph.repeats import ShortenedModel, alike_stages, remaining
from onebox.plan import Action, Plan, Schedule, Stage
from onebox.pool import DeviceInfo, Pool, open_pool
from onebox.pool.discovery import LOCAL_HOST
from onebox.trainer_options import Numerics, Staging

_LOG = logging.getLogger("onebox")

_LONG_S, _MOST = 0.6, 60
"""Seconds of measured steps in a format that are enough, and the most steps of a format. One step may be enough."""

_PATIENCE_S = 3.0
"""Seconds of a format for which short steps are measured until there are enough slices for quantiles."""

_FIRST = 2
"""Warm-up steps; one where the second step is long enough."""

_LEAST_SLICE, _MOST_SLICE = 2, 8
"""Bounds of the steps of a slice, which has the samples of a batch: slices spread as steps of training do."""

_TOGETHER = 0.25
"""Part of a device's memory up to which copies of the model for all sizes are there at once; else one size follows the
other."""

_UNDISTURBED = 0.25
"""Quantile of an action's times that counts as undisturbed: beside a load of one process a quarter of short actions
runs without an interruption."""

_MICRO_BATCHES = 2
"""Micro-batches per step, so that gradients are accumulated as in a pipeline."""

_LEAST_S = 1e-7
"""Lower bound of a time, which must be positive."""


def profile_model(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizers,
    inputs: Any,
    targets: Any,
    *,
    pool: Pool,
    sizes: Sequence[int],
    precision: Precision = "fp32",
    fuse: bool = False,
    numerics: Numerics = Numerics(),
    fresh: bool = False,
    cache: bool = True,
) -> tuple[ModelProfile, Captures]:
    """Measure a model's segments.

    Args:
        model: The model.
        loss: The loss.
        optimizer: Its optimizer; its state is not changed.
        inputs: A batch, from which micro-batches are cut.
        targets: Targets of the batch.
        pool: The pool; devices that are alike are measured on one of their hosts. A ``sim`` device is treated as a core
            of this machine.
        sizes: Micro-batch sizes in samples, one or more.
        precision: As for :class:`~onebox.engine.Trainer`.
        fuse: Likewise.
        numerics: As for :class:`~onebox.trainer_options.Engine`.
        fresh: Whether to measure even if the times are cached.
        cache: Whether to use the user's cache, keyed by graph, devices and torch version.

    Returns:
        The profile, and the captured model. If the model does not fit one device, its times are estimated from its
        operations and bytes, and from the measured speeds of the devices.

    Raises:
        UsageError: A size exceeds the batch.
        OneboxError: The model cannot be captured.
    """
    batch = as_batch(inputs, targets)
    if not sizes or min(sizes) < 1 or max(sizes) > batch.size:
        raise UsageError(f"micro-batches of {list(sizes)} samples: allowed are 1 to {batch.size}, the batch")
    check_precision(precision)
    numerics = resolved_numerics(numerics)
    runs: list[_Runs] = []
    for size in sorted(set(sizes)):
        samples = torch.arange(size * _MICRO_BATCHES) % batch.size
        small = batch.structure.nest([leaf[samples] for leaf in batch.leaves])
        captures = runs[-1].captures if runs else None
        runs.append(_Runs(model, loss, optimizer, small, size, batch.size, precision, fuse, numerics, captures))
        runs[-1].prepare(pool)
    keys = [one.key(pool) for one in runs]
    known = [load(key, CachedTimes) if cache and not fresh else None for key in keys]
    missing = [number for number, times in enumerate(known) if times is None]
    with contextlib.ExitStack() as stack:
        try:
            found = _Place(pool, stack).measure([runs[number] for number in missing])
        except DeviceMemoryError:
            return _estimated(runs[-1].captures, batch, sizes, optimizer, pool, fresh=fresh)
    for number, times in zip(missing, found, strict=True):
        known[number] = CachedTimes(times=times)
        store(keys[number], known[number]) if cache else None
    measured: dict[str, list[SegmentTimes]] = {}
    for each in known:
        for kind, own in each.times.items() if each is not None else ():
            measured.setdefault(kind, []).append(own)
    last = runs[-1]
    assert last.captures is not None
    return ModelProfile(bytes=last.bytes(), times={k: tuple(v) for k, v in measured.items()}), last.captures


class _Place:
    """The pool of profiling runs: the given one, or, if it is emulated or lacks memory, similar workers."""

    def __init__(self, pool: Pool, stack: contextlib.ExitStack) -> None:
        self._pool = pool
        self._stack = stack
        self._devices = measured_devices(pool.devices)

    def measure(self, runs: Sequence[_Runs]) -> list[dict[str, SegmentTimes]]:
        """Return the times of each type of device, for each of some runs."""
        if not runs:
            return []
        if not self._devices:
            self._pool, self._devices = self._stack.enter_context(open_pool("cpu", threads=1)), [0]
        try:
            return _measure(runs, self._pool, self._devices)
        except DeviceMemoryError:
            kinds = {(self._pool.devices[device].kind, self._pool.devices[device].host) for device in self._devices}
            if kinds != {("cpu", LOCAL_HOST)}:
                raise
            self._pool = self._stack.enter_context(_roomier(self._pool, self._devices))
            self._devices = list(range(len(self._pool)))
            return _measure(runs, self._pool, self._devices)


def measured_devices(devices: Sequence[DeviceInfo]) -> list[int]:
    """Return the devices to measure: of those that are alike, all of one host, this one if it has some.

    Other hosts would take the same time, and each device gets the whole model several times.
    """
    real = [device for device in devices if device.kind != "sim"]
    hosts: dict[tuple[Any, ...], str] = {}
    for device in sorted(real, key=lambda device: device.host != LOCAL_HOST):
        hosts.setdefault(_alike(device), device.host)
    return [device.number for device in real if hosts[_alike(device)] == device.host]


def _alike(device: DeviceInfo) -> tuple[Any, ...]:
    return *device.arithmetic, device.speed


def _roomier(pool: Pool, devices: Sequence[int]) -> Pool:
    """Return CPU workers of this machine like those of a pool, without the memory limit that excludes a model."""
    names = ",".join(f"cpu@{pool.devices[d].speed}" if pool.devices[d].speed < 1 else "cpu" for d in devices)
    return open_pool(names, threads=pool.devices[devices[0]].threads)


def _estimated(
    captures: Captures | None, batch: Batch, sizes: Sequence[int], optimizer: Optimizers, pool: Pool, *, fresh: bool
) -> tuple[ModelProfile, Captures]:
    """Return a profile with estimated times, and the captured model."""
    assert captures is not None
    with contextlib.suppress(UsageError):  # devices with too little memory to be measured
        pool.profile(fresh=fresh)
    profile, basis = estimate_profile(captures, batch, sizes, optimizer, pool.devices)
    _LOG.warning("the model fits no single device, where it would be measured: its times are %s", basis)
    return profile, captures


def _measure(runs: Sequence[_Runs], pool: Pool, devices: Sequence[int]) -> list[dict[str, SegmentTimes]]:
    """Train on each device at once, in each size and promising format in turn; return the times by type of device."""
    formats = [_Format(own, way, pool, used) for own in runs for way, used in own.sides(pool, devices).items()]
    sizes = runs[0].bytes()
    state_bytes = sum(segment.state_bytes for segment in sizes.segments) + sum(tie.state_bytes for tie in sizes.ties)
    copies_bytes = state_bytes * sum(len(one.devices) for one in formats)
    together = copies_bytes <= _TOGETHER * min(pool.devices[device].memory_bytes for device in devices)
    turns = [formats] if together else [[one for one in formats if one.runs is own] for own in runs]
    try:
        for taking_turns in turns:
            _train(taking_turns)
    except DeviceMemoryError:
        if len(formats) == 1:
            raise
        for one in formats:  # the copies of the model do not fit beside each other
            _train([one])
    slices: dict[str, list[SliceSlowdown]] = {}
    for one in formats:
        for kind, own_slices in one.slices.items():
            slices.setdefault(kind, []).extend(own_slices)
    found = []
    for own in runs:
        by_way = {one.way: one.times(slices) for one in formats if one.runs is own}
        kinds = {kind: {way: t[kind] for way, t in by_way.items() if kind in t} for kind in by_way[AS_CAPTURED]}
        found.append({kind: compared(ways) for kind, ways in kinds.items()})
    return found


def _train(formats: Sequence[_Format]) -> None:
    """Train in slices, each format in turn, until they were measured for long enough."""
    with contextlib.ExitStack() as stack:
        for one in formats:
            stack.enter_context(one)
        for one in formats:
            one.warm_up()
        start_s, short, slices = time.monotonic(), [one for one in formats if not one.enough], 0
        while short and time.monotonic() - start_s < (
            (_PATIENCE_S if slices < FEWEST_SLICES else _LONG_S) * len(formats)
        ):
            slices += len(short)
            for one in short:
                one.slice()
            short = [one for one in short if not one.enough]
        for one in formats:
            one.evaluate()


class _Format:
    """The measurement of one size of micro-batches in one format, on all of its devices at once.

    As a context manager it closes its sessions.

    Args:
        runs: The size.
        way: The format.
        pool: The pool.
        devices: The devices.
    """

    def __init__(self, runs: _Runs, way: SegmentVariant, pool: Pool, devices: Sequence[int]) -> None:
        self.runs = runs
        self.way = way
        self.slices: dict[str, list[SliceSlowdown]] = {}
        """Slowdown of each slice, by type of device."""
        self.enough = False
        self._pool = pool
        self.devices = devices
        self._sessions: list[TrainingSession] = []
        self._visits: list[range] = []
        """Steps that followed one another without a pause: the warm-up, then a slice each."""
        self._times: dict[str, SegmentTimes] = {}

    def __enter__(self) -> _Format:
        self._visits, self._sessions = [], []
        try:
            for device in self.devices:
                self._sessions.append(self.runs.session(self._pool, device, self.way))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._sessions:
            with contextlib.suppress(Exception):  # the pool may be broken
                session.close()

    def warm_up(self) -> None:
        """Train the first steps; if they are long, the last one of them is enough."""
        self._step(_FIRST + any(self._pool.devices[device].kind == "cuda" for device in self.devices))
        # the second one of a GPU captures its graphs; the quickest, as something may have disturbed one of them
        self.enough = min(_step_s(session.traces.events()) for session in self._sessions) >= _LONG_S

    def slice(self) -> None:
        """Train one slice."""
        self._step(min(self.runs.slice_steps, _MOST - self._visits[-1].stop))
        self.enough = self._visits[-1].stop >= _MOST

    def _step(self, steps: int) -> None:
        for _ in range(steps):
            for session in self._sessions:
                session.step(as_batch(*self.runs.small))
        for session in self._sessions:
            session.drain()
            session.wait(0)
        first = self._visits[-1].stop if self._visits else 0
        self._visits.append(range(first, first + steps))

    def evaluate(self) -> None:
        """Compute undisturbed times and slowdowns from the traces."""
        slices = self._visits[1:] or [self._visits[0][-1:]]
        every = [session.traces.events() for session in self._sessions]
        # The least gap is that of the slowest device, for which the others wait.
        between_s = min(_between_s(own, self._visits, slices[0].start) for own in every)
        found: dict[str, list[SegmentTimes]] = {}
        by_kind: dict[str, list[list[list[tuple[float, float]]]]] = {}
        for events, device in zip(every, self.devices, strict=True):
            info, own = self._pool.devices[device], [event for event in events if event.step >= slices[0].start]
            undisturbed = self.runs.undisturbed(own)
            kind = device_type(info)
            found.setdefault(kind, []).append(self.runs.times(own, undisturbed, info.speed, between_s))
            by_kind.setdefault(kind, []).append(
                [self.runs.pairs([event for event in own if event.step in steps], undisturbed) for steps in slices]
            )
        self._times = {kind: _median_of(times) for kind, times in found.items()}
        self.slices = {kind: list(map(slice_slowdown, zip(*each, strict=True))) for kind, each in by_kind.items()}

    def times(self, slices: Mapping[str, Sequence[SliceSlowdown]]) -> dict[str, SegmentTimes]:
        """Return the times of each type of device at the median of its slowdowns."""
        return {kind: at_median(times, slices[kind]) for kind, times in self._times.items()}


class _Runs:
    """Profiling runs for one size of a micro-batch.

    They train a copy of the model on the workers, in sessions without a trainer: the model and the optimizers in this
    process, which a user may be training at the same time, have no part in it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizers,
        small: tuple[Any, Any],
        size: int,
        batch: int,
        precision: Precision,
        fuse: bool,
        numerics: Numerics,
        captures: Captures | None,
    ) -> None:
        self._arguments = (model, loss, optimizer)
        self.small = small
        self.slice_steps = min(max(-(-batch // (size * _MICRO_BATCHES)), _LEAST_SLICE), _MOST_SLICE)
        self._size = size
        self._precision = precision
        self._fuse = fuse
        self._numerics = numerics
        self.captures = captures
        self._names: tuple[str, ...] = ()
        self._bytes: ModelBytes | None = None
        self._programs: ModelPrograms | None = None
        self._alike: Sequence[Sequence[int]] = ()
        self._groups: Sequence[int] = ()
        """Group of equal segments of each stage."""

    def prepare(self, pool: Pool) -> None:
        """Capture the model."""
        if self.captures is None:
            model, loss, _ = self._arguments
            remote = RemoteState(*self._arguments, pool)
            recipe = CaptureSpec(
                model=model,
                loss=loss,
                metrics={},
                precision=self._precision,
                device_type=target_type(pool.devices),
                trained=frozenset(remote.wanted),
                fuse=self._fuse,
                reduction="mean",  # weights make no difference to time
            )
            self.captures = Captures(recipe)
        self._names = self.captures.segments(as_batch(*self.small), self._size)

    def key(self, pool: Pool) -> str:
        """Return the cache key of the times, with everything that they depend on."""
        optimizer = self._arguments[2]
        return times_key(self.bytes().graph, pool.devices, optimizer, self._size, self._precision, self._numerics)

    def sides(self, pool: Pool, devices: Sequence[int]) -> dict[SegmentVariant, list[int]]:
        """Return the devices to measure each promising format on."""
        self.bytes()
        assert self._programs is not None
        sides: dict[SegmentVariant, list[int]] = {}
        for kind in sorted({pool.devices[device].kind for device in devices}):
            alike = [device for device in devices if pool.devices[device].kind == kind]
            for way in ways_of(kind, [pool.devices[device] for device in alike], self._programs, self._precision):
                sides.setdefault(way, []).extend(alike)
        self._shorten(narrow=any(way.bf16 for way in sides))
        return sides

    def _shorten(self, *, narrow: bool) -> None:
        """Find the segments with equal programs, in bfloat16 as well if that is measured."""
        assert self.captures is not None
        assert self._programs is not None
        variants = [self._programs]
        if narrow:
            traced = self.captures.traced(as_batch(*self.small), self._size, train=True, halves=True)
            stages = [[name] for name in self._names]
            variants.append(traced.divide(stages, narrow=range(len(stages))))
        self._alike = alike_stages(*variants)
        group_of = {segment: group for group, segments in enumerate(self._alike) for segment in segments}
        self._groups = [group_of[segment] for segment in remaining(self._alike)]

    def session(self, pool: Pool, device: int, way: SegmentVariant) -> TrainingSession:
        """Return a session that trains on a device in a format."""
        assert self.captures is not None
        names = [self._names[number] for number in remaining(self._alike)]
        plan = _one_by_one(names, device, self._size, way)
        whole = len(names) == len(self._names)
        return TrainingSession(
            pool,
            lambda captures, batch: ResolvedPlan(plan=plan),
            self.captures if whole else _ShortenedCaptures(self.captures, self._alike),
            RemoteState(*self._arguments, pool),
            StepSettings(
                seed=0,
                trace=True,
                check_every=0,
                in_flight=steps_in_flight(pool.round_trip_s),
                max_norm=0.0,
                numerics=numeric_instructions(self._numerics),
            ),
            BatchPrefetcher(pool, Staging().ahead_bytes),
            recovery=None,
        )

    def undisturbed(self, events: Sequence[TraceEvent]) -> dict[tuple[str, int], float]:
        """Return the undisturbed seconds of each kind of action, for each group of equal segments."""
        by_action: dict[tuple[str, int], list[float]] = {}
        for event in events:
            if event.action is not None:
                by_action.setdefault(self._key(event.action), []).append(_seconds(event))
        return {key: _low_quantile(seconds) for key, seconds in by_action.items()}

    def pairs(
        self, events: Sequence[TraceEvent], undisturbed: Mapping[tuple[str, int], float]
    ) -> list[tuple[float, float]]:
        """Return the seconds of some actions and their undisturbed ones, in the order of time."""
        return [
            (_seconds(event), undisturbed[self._key(event.action)])
            for event in sorted(events, key=lambda event: event.start_ns)
            if event.action is not None
        ]

    def _key(self, action: Action) -> tuple[str, int]:
        """Return the kind of an action, and the group of equal segments that its stage stands for."""
        return action.kind, self._groups[action.stage]

    def times(
        self,
        events: Sequence[TraceEvent],
        undisturbed: Mapping[tuple[str, int], float],
        speed: float,
        between_s: float,
    ) -> SegmentTimes:
        """Return the undisturbed times of all segments."""
        typical = {key: seconds * speed for key, seconds in undisturbed.items()}
        trained = remaining(self._alike)
        group_of = {stage: group for group, stages in enumerate(self._alike) for stage in stages}
        parameters = [segment.parameter_bytes for segment in self.bytes().segments]
        sums_s = _typical(_named(events, "accumulate", speed)) * len(trained)
        part_s = sums_s / max(1, sum(parameters[stage] for stage in trained))  # of the accumulation, per byte
        groups = [group_of[stage] for stage in range(len(parameters))]
        return SegmentTimes(
            size=self._size,
            seconds=tuple(
                (
                    typical.get(("F", group), _LEAST_S),
                    typical.get(("I", group), _LEAST_S),
                    typical.get(("W", group), _LEAST_S) + part_s * own_bytes,
                )
                for group, own_bytes in zip(groups, parameters, strict=True)
            ),
            update_s=_typical(_named(events, "optimizer", speed)) * self._all_updates() + between_s * speed,
            call_s=_call_s(events),
        )

    def _all_updates(self) -> float:
        """Return the bytes of all trained parameters relative to those of the segments that are trained here."""
        known, trained = self.bytes(), set(remaining(self._alike))
        every = [(segment.parameter_bytes, {number}) for number, segment in enumerate(known.segments)]
        every += [(tie.parameter_bytes, set(tie.segments)) for tie in known.ties]
        return sum(size for size, _ in every) / max(1, sum(size for size, stages in every if stages & trained))

    def bytes(self) -> ModelBytes:
        """Return the sizes that follow from the graph alone."""
        if self._bytes is None:
            self._bytes = self._count()
        return self._bytes

    def _count(self) -> ModelBytes:
        assert self.captures is not None
        programs, found = divided_bytes(self.captures, as_batch(*self.small), self._size, self._arguments[2])
        self._programs = programs
        return found


class _ShortenedCaptures(Captures):
    """Captures of a model without repeats.

    Args:
        whole: Captures of the model.
        alike: Groups of its segments with equal programs.
    """

    def __init__(self, whole: Captures, alike: Sequence[Sequence[int]]) -> None:
        super().__init__(whole.recipe)
        self._whole = whole
        self._alike = alike

    def traced(self, batch: Batch, size: int, *, train: bool, halves: bool = False, probe: bool = False) -> TracedModel:
        """Return the capture for micro-batches of a size."""
        return ShortenedModel(self._whole.traced(batch, size, train=train, halves=halves, probe=probe), self._alike)


def _one_by_one(names: Sequence[str], device: int, size: int, way: SegmentVariant) -> Plan:
    """Return the plan in which one device runs every segment as a stage."""
    whole = Stage(
        replicas=((device,),),
        shares=(1.0,),
        channels_last=way.channels_last,
        precision="bf16" if way.bf16 else None,
    )
    stages = tuple(replace(whole, segments=(name,)) for name in names)
    row: list[Action] = []
    for micro_batch in range(_MICRO_BATCHES):
        row += [Action("F", stage, micro_batch) for stage in range(len(names))]
        for stage in reversed(range(len(names))):
            row += [Action("I", stage, micro_batch), Action("W", stage, micro_batch)]
    table = Schedule(rows={device: tuple(row)}).lines()
    return Plan(stages=stages, micro_batch=size, schedule="table", table=table)


def _named(events: Iterable[TraceEvent], name: str, speed: float) -> list[float]:
    """Return the durations of the events of a name, at full speed."""
    return [_seconds(event) * speed for event in events if event.name == name] or [0.0]


def _seconds(event: TraceEvent) -> float:
    return (event.end_ns - event.start_ns) / 1e9


def _low_quantile(seconds: Sequence[float]) -> float:
    """Return the quantile of times that counts as undisturbed."""
    ordered, place = sorted(seconds), _UNDISTURBED * (len(seconds) - 1)
    below = ordered[int(place)]
    return max(below + (place % 1) * (ordered[min(int(place) + 1, len(ordered) - 1)] - below), _LEAST_S)


def _typical(seconds: Sequence[float]) -> float:
    """Return the mean without the longest fifth, which other processes delayed."""
    kept = sorted(seconds)[: max(1, round(len(seconds) * 0.8))]
    return statistics.fmean(kept)


def _spans_ns(events: Iterable[TraceEvent]) -> dict[int, tuple[int, int]]:
    """Return start and end of each step."""
    spans: dict[int, tuple[int, int]] = {}
    for event in events:
        start, end = spans.get(event.step, (event.start_ns, event.end_ns))
        spans[event.step] = (min(start, event.start_ns), max(end, event.end_ns))
    return spans


def _step_s(events: Iterable[TraceEvent]) -> float:
    """Return the seconds of the last step."""
    start_ns, end_ns = max(_spans_ns(events).items())[1]
    return (end_ns - start_ns) / 1e9


def _between_s(events: Iterable[TraceEvent], visits: Sequence[range], first: int) -> float:
    """Return the median time between the end of a step and the start of the next, mainly the upload of a batch.

    Args:
        events: What a worker did.
        visits: Steps that followed one another without a pause.
        first: The first step before which it counts.
    """
    spans = _spans_ns(events)
    gaps = [
        (spans[step][0] - spans[step - 1][1]) / 1e9
        for steps in visits
        for step in steps[1:]
        if step >= first and {step, step - 1} <= spans.keys()
    ]
    return max(0.0, statistics.median(gaps)) if gaps else 0.0


def _call_s(events: Iterable[TraceEvent]) -> float:
    """Return the median time between the end of an action and the start of the next."""
    actions = sorted((e for e in events if e.action is not None), key=lambda e: e.start_ns)
    gaps = [
        (later.start_ns - earlier.end_ns) / 1e9
        for earlier, later in itertools.pairwise(actions)
        if earlier.step == later.step
    ]
    return statistics.median(gaps) if gaps else 0.0


def _median_of(times: Sequence[SegmentTimes]) -> SegmentTimes:
    """Return the medians over devices of one type."""
    return SegmentTimes(
        size=times[0].size,
        seconds=tuple(
            tuple(statistics.median(values) for values in zip(*segment, strict=True))
            for segment in zip(*(found.seconds for found in times), strict=True)
        ),
        update_s=statistics.median(found.update_s for found in times),
        call_s=statistics.median(found.call_s for found in times),
    )
