"""Profiling: timing of a model's segments on the devices of a pool, by training with each segment as a stage.

Profiling runs the model like training does: its plan has one stage for each segment, all on one device, and a table
that runs them in sequence. All devices of a host train at once, so that cores, caches and memory are shared as in real
training; of hosts that are alike, one does. Of segments with equal programs, such as those of the blocks of a
transformer, the first and the last are trained, and stand for the others.

Within a time limit, the first step of each size is executed action by action, so that it can be ended after any of
them; estimates stand for what is not measured by then (see :mod:`onebox.engine.planning.partial_profile`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from onebox.cost import load, store
from onebox.cost.model_profile import (
    AS_CAPTURED,
    ModelBytes,
    ModelProfile,
    SegmentBytes,
    SegmentTimes,
    SegmentVariant,
    TiedParameter,
)
from onebox.engine.config import check_precision, numeric_instructions, resolved_numerics, steps_in_flight
from onebox.engine.data.prefetch import BatchPrefetcher
from onebox.engine.planning.partial_profile import (
    NOT_MEASURED,
    TimeLimit,
    all_actions,
    completed,
    is_whole,
    not_measured,
    profile_line,
)
from onebox.engine.planning.piecewise_step import STEP, PiecewiseStep, run_pieces
from onebox.engine.planning.trace_times import (
    FEWEST_SLICES,
    LEAST_S,
    at_median,
    durations_of,
    event_s,
    gap_between_actions_s,
    gap_between_steps_s,
    last_step_s,
    low_quantile,
    median_of,
    trimmed_mean,
)
from onebox.engine.problem.estimate import estimate_profile, estimate_times
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
from onebox.wire.protocol.requests import SetNumerics

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

_UPLOAD_BPS = 3e8
"""Bytes per second of weights that go to workers before their first step, with all that is compiled for it: 0.3 s for
each of two workers of one machine and 100 MB. Within a time limit, a longer upload than there is time is not begun."""

_MICRO_BATCHES = 2
"""Micro-batches per step, so that gradients are accumulated as in a pipeline."""


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
    within_s: float = math.inf,
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
        cache: Whether to use the user's cache, keyed by graph, devices and torch version. Sizes that were cut short are
            not stored, and measured again next time.
        within_s: Seconds after which nothing more is measured, not counting captures. What was begun is ended: an
            action of a segment, or the upload of the weights.

    Returns:
        The profile, and the captured model. What was not measured in time is estimated, and the profile says how much
        of it was measured. If the model does not fit one device, its times are estimated from its
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
    limit, begin_s = TimeLimit(within_s), time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            found = _Place(pool, stack, limit).measure([runs[number] for number in missing])
        except DeviceMemoryError:
            return _estimated(runs[-1].captures, batch, sizes, optimizer, pool, fresh=fresh)
    took_s = time.monotonic() - begin_s
    for number, one in zip(missing, found, strict=True):
        known[number] = CachedTimes(times=one.times)
        store(keys[number], known[number]) if cache and one.whole else None
    measured: dict[str, tuple[SegmentTimes, ...]] = {}
    for each in known:
        for kind, own in each.times.items() if each is not None else ():
            measured[kind] = (*measured.get(kind, ()), own)
    if not all(is_whole(own) for times in measured.values() for own in times):
        guesses = estimate_times([one.divided() for one in runs], pool.devices)
        measured = {
            kind: completed(times, {guess.times.size: guess for guess in guesses[kind]})
            for kind, times in measured.items()
        }
    last = runs[-1]
    assert last.captures is not None
    profile = ModelProfile(bytes=last.bytes(), times=measured)
    if not all(one.whole for one in found):
        _LOG.info("%s", profile_line(profile.measured, took_s))
    return profile, last.captures


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The measurement of one size.

    Args:
        times: The times, by type of device.
        whole: Whether no time limit has cut it short.
    """

    times: dict[str, SegmentTimes]
    whole: bool


class _Place:
    """The pool of profiling runs: the given one, or, if it is emulated or lacks memory, similar workers."""

    def __init__(self, pool: Pool, stack: contextlib.ExitStack, limit: TimeLimit) -> None:
        self._pool = pool
        self._stack = stack
        self._limit = limit
        self._devices = measured_devices(pool.devices)

    def measure(self, runs: Sequence[_Runs]) -> list[_Measured]:
        """Return the times of each type of device, for each of some runs."""
        if not runs:
            return []
        if not self._devices:
            self._pool, self._devices = self._stack.enter_context(open_pool("cpu", threads=1)), [0]
        try:
            return _measure(runs, self._pool, self._devices, self._limit)
        except DeviceMemoryError:
            kinds = {(self._pool.devices[device].kind, self._pool.devices[device].host) for device in self._devices}
            if kinds != {("cpu", LOCAL_HOST)}:
                raise
            self._pool = self._stack.enter_context(_roomier(self._pool, self._devices))
            self._devices = list(range(len(self._pool)))
            return _measure(runs, self._pool, self._devices, self._limit)


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


def _measure(runs: Sequence[_Runs], pool: Pool, devices: Sequence[int], limit: TimeLimit) -> list[_Measured]:
    """Train on each device at once, in each size and promising format in turn; return the times by type of device."""
    formats = [_Format(own, way, pool, used) for own in runs for way, used in own.sides(pool, devices).items()]
    if limit.bounded:
        formats.sort(key=lambda one: one.way != AS_CAPTURED)  # what needs to be known first
    copies_bytes = sum(one.runs.trained_bytes * len(one.devices) for one in formats)
    together = copies_bytes <= _TOGETHER * min(pool.devices[device].memory_bytes for device in devices)
    turns = [formats] if together else [[one for one in formats if one.runs is own] for own in runs]
    try:
        for number, taking_turns in enumerate(turns):
            _train(taking_turns, limit.share(len(turns) - number))
    except DeviceMemoryError:
        if len(formats) == 1:
            raise
        for number, one in enumerate(formats):  # the copies of the model do not fit beside each other
            _train([one], limit.share(len(formats) - number))
    slowdowns: dict[str, list[float]] = {}
    for one in formats:
        for kind, factors in one.slowdowns.items():
            slowdowns.setdefault(kind, []).extend(factors)
    kinds = {device_type(pool.devices[device]): None for device in devices}
    found = []
    for own in runs:
        mine = [one for one in formats if one.runs is own]
        by_way = {one.way: one.times(slowdowns) for one in mine}
        times = {kind: own.compared({way: t[kind] for way, t in by_way.items() if kind in t}) for kind in kinds}
        found.append(_Measured(times=times, whole=not any(one.cut for one in mine)))
    return found


def _train(formats: Sequence[_Format], limit: TimeLimit) -> None:
    """Train in slices, each format in turn, until they were measured for long enough or the time is over."""
    with contextlib.ExitStack() as stack:
        for one in formats:
            stack.enter_context(one)
        for number, one in enumerate(formats):
            one.warm_up(limit.share(len(formats) - number))
        start_s, short, slices = time.monotonic(), [one for one in formats if not one.enough], 0
        while short and time.monotonic() - start_s < (
            (_PATIENCE_S if slices < FEWEST_SLICES else _LONG_S) * len(formats)
        ):
            slices += len(short)
            for one in short:
                one.slice(limit)
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
        self.slowdowns: dict[str, list[float]] = {}
        """Slowdowns of each slice, by type of device; those of the slowest device of a type, as steps end with it."""
        self.enough = False
        self.cut = False
        """True if the time was over before it was measured for long enough."""
        self._pool = pool
        self.devices = devices
        self._sessions: list[TrainingSession] = []
        self._pieces: list[PiecewiseStep] = []
        self._visits: list[range] = []
        """Steps that followed one another without a pause: the warm-up, then a slice each."""
        self._step_s = 0.0
        self._times: dict[str, SegmentTimes] = {}

    def __enter__(self) -> _Format:
        self._visits, self._sessions, self._pieces = [], [], []
        self.enough = self.cut = False
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

    def warm_up(self, limit: TimeLimit) -> None:
        """Train the first steps; if they are long, the last one of them is enough."""
        steps = _FIRST + any(self._pool.devices[device].kind == "cuda" for device in self.devices)
        if limit.bounded:
            if not self._first_step(limit):
                self.enough = self.cut = True
                return
            steps -= 1
        self._step(steps, limit)
        # the second one of a GPU captures its graphs; the quickest, as something may have disturbed one of them
        long = self._visits and min(last_step_s(session.traces.events()) for session in self._sessions) >= _LONG_S
        self.enough = self.cut or bool(long)

    def slice(self, limit: TimeLimit) -> None:
        """Train one slice."""
        self._step(min(self.runs.slice_steps, _MOST - self._visits[-1].stop), limit)
        self.enough = self.cut or self._visits[-1].stop >= _MOST

    def _first_step(self, limit: TimeLimit) -> bool:
        """Train a step in pieces, and return whether it was executed to its end."""
        if limit.left_s < self.runs.weight_bytes * len(self.devices) / _UPLOAD_BPS:
            return False
        batch, numerics = as_batch(*self.runs.small), self.runs.numeric_instructions
        for session in self._sessions:
            if limit.over:
                return False
            self._pieces.append(PiecewiseStep(self._pool, session, batch, numerics))
        begin_s = time.monotonic()
        done = run_pieces(self._pieces, limit)
        self._step_s = time.monotonic() - begin_s
        return done

    def _step(self, steps: int, limit: TimeLimit) -> None:
        """Train as many steps as there is time for."""
        if limit.bounded and limit.left_s < steps * self._step_s:
            steps, self.cut = int(limit.left_s / self._step_s), True
        begin_s, done = time.monotonic(), 0
        for _ in range(steps):
            if limit.over:
                self.cut = True
                break
            for session in self._sessions:
                session.step(as_batch(*self.runs.small))
            done += 1
        for session in self._sessions:
            session.drain()
            session.wait(0)
        if done > 0:
            self._step_s = (time.monotonic() - begin_s) / done
            first = self._visits[-1].stop if self._visits else 0
            self._visits.append(range(first, first + done))

    def evaluate(self) -> None:
        """Compute undisturbed times and slowdowns from the traces."""
        self._times, self.slowdowns = {}, {}
        last = [self._visits[0][-1:]] if self._visits else [range(STEP, STEP + 1)]
        slices = self._visits[1:] or last
        every = [session.traces.events() for session in self._sessions]
        if not self._visits:
            every = [piece.events() for piece in self._pieces]
        if not all(every) or not every:
            return
        # The least gap is that of the slowest device, for which the others wait.
        between_s = min(gap_between_steps_s(own, self._visits, slices[0].start) for own in every)
        found: dict[str, list[SegmentTimes]] = {}
        factors: dict[str, list[list[float]]] = {}
        for events, device in zip(every, self.devices, strict=True):
            info, own = self._pool.devices[device], [event for event in events if event.step >= slices[0].start]
            undisturbed = self.runs.undisturbed(own)
            kind = device_type(info)
            times = self.runs.times(own, undisturbed, info.speed, between_s, whole=bool(self._visits))
            found.setdefault(kind, []).append(times)
            factors.setdefault(kind, []).append(
                [self.runs.slowdown([event for event in own if event.step in steps], undisturbed) for steps in slices]
            )
        self._times = {kind: median_of(times) for kind, times in found.items()}
        self.slowdowns = {kind: list(map(max, zip(*each, strict=True))) for kind, each in factors.items()}

    def times(self, slowdowns: Mapping[str, Sequence[float]]) -> dict[str, SegmentTimes]:
        """Return the times of each type of device at the median of its slowdowns."""
        return {kind: at_median(times, slowdowns[kind]) for kind, times in self._times.items()}


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

    def divided(self) -> tuple[ModelPrograms, ModelBytes]:
        """Return the programs of the segments, and the sizes that follow from the graph alone."""
        found = self.bytes()
        assert self._programs is not None
        return self._programs, found

    @property
    def numeric_instructions(self) -> tuple[SetNumerics, ...]:
        """The settings of operators."""
        return numeric_instructions(self._numerics)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the state of the segments that are trained."""
        return sum(part.state_bytes for part in self._trained_parts())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of the segments that are trained, without gradients."""
        return sum(part.state_bytes - part.optimizer_bytes - part.parameter_bytes for part in self._trained_parts())

    def _trained_parts(self) -> list[SegmentBytes | TiedParameter]:
        known, trained = self.bytes(), set(remaining(self._alike))
        segments = [known.segments[number] for number in sorted(trained)]
        return [*segments, *(tie for tie in known.ties if trained.intersection(tie.segments))]

    def compared(self, found: Mapping[SegmentVariant, SegmentTimes]) -> SegmentTimes:
        """Return the times of segments in their fastest measured formats, as far as they were measured as captured."""
        plain = found.get(AS_CAPTURED)
        if plain is None:
            return not_measured(self._size, len(self._names))
        return compared({w: t for w, t in found.items() if all_actions(t)}) if all_actions(plain) else plain

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
                numerics=self.numeric_instructions,
            ),
            BatchPrefetcher(pool, Staging().ahead_bytes),
            recovery=None,
        )

    def undisturbed(self, events: Sequence[TraceEvent]) -> dict[tuple[str, int], float]:
        """Return the undisturbed seconds of each kind of action, for each group of equal segments."""
        by_action: dict[tuple[str, int], list[float]] = {}
        for event in events:
            if event.action is not None:
                by_action.setdefault(self._key(event.action), []).append(event_s(event))
        return {key: low_quantile(seconds) for key, seconds in by_action.items()}

    def slowdown(self, events: Sequence[TraceEvent], undisturbed: Mapping[tuple[str, int], float]) -> float:
        """Return the time of some actions relative to the undisturbed ones."""
        pairs = [(event_s(event), undisturbed[self._key(event.action)]) for event in events if event.action is not None]
        taken_s, least_s = (sum(seconds) for seconds in zip(*pairs, strict=True))
        return taken_s / max(least_s, LEAST_S)

    def _key(self, action: Action) -> tuple[str, int]:
        """Return the kind of an action, and the group of equal segments that its stage stands for."""
        return action.kind, self._groups[action.stage]

    def times(
        self,
        events: Sequence[TraceEvent],
        undisturbed: Mapping[tuple[str, int], float],
        speed: float,
        between_s: float,
        *,
        whole: bool,
    ) -> SegmentTimes:
        """Return the undisturbed times of all segments; of a step that was cut short, of those that were measured."""
        other = LEAST_S if whole else NOT_MEASURED  # of what does not exist, or is not known
        typical = {key: seconds * speed for key, seconds in undisturbed.items()}
        trained = remaining(self._alike)
        group_of = {stage: group for group, stages in enumerate(self._alike) for stage in stages}
        parameters = [segment.parameter_bytes for segment in self.bytes().segments]
        sums_s = trimmed_mean(durations_of(events, "accumulate", speed)) * len(trained)
        part_s = sums_s / max(1, sum(parameters[stage] for stage in trained))  # of the accumulation, per byte
        groups = [group_of[stage] for stage in range(len(parameters))]
        updated = whole or any(event.name == "optimizer" for event in events)
        update_s = trimmed_mean(durations_of(events, "optimizer", speed)) * self._all_updates() + between_s * speed
        return SegmentTimes(
            size=self._size,
            seconds=tuple(
                (
                    typical.get(("F", group), other),
                    typical.get(("I", group), other),
                    typical.get(("W", group), other) + part_s * own_bytes,
                )
                for group, own_bytes in zip(groups, parameters, strict=True)
            ),
            update_s=update_s if updated else NOT_MEASURED,
            call_s=gap_between_actions_s(events) if whole else NOT_MEASURED,  # between pieces there are messages
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
