"""Profiling: timing of a model's segments on the devices of a pool, by training with each segment as a stage.

Profiling runs the model like training does: its plan has one stage for each segment, all on one device, and a table
that runs them in sequence. All devices of a host train at once, so that cores, caches and memory are shared as in real
training; of hosts that are alike, one does.
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
from onebox.cost.model_profile import AS_CAPTURED, ModelBytes, ModelProfile, SegmentTimes, SegmentVariant
from onebox.engine.config import check_precision, numeric_instructions, resolved_numerics, steps_in_flight
from onebox.engine.data.prefetch import BatchPrefetcher
from onebox.engine.problem.estimate import estimate_profile
from onebox.engine.problem.planner_problem import CachedTimes, device_type, divided_bytes, times_key
from onebox.engine.problem.stage_formats import compared, ways_of
from onebox.engine.session import TrainingSession
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.results import TraceEvent
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec, target_type
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import DeviceMemoryError, UsageError
from onebox.graph import Loss, ModelPrograms, Precision
from onebox.plan import Action, Plan, Schedule, Stage
from onebox.pool import DeviceInfo, Pool, open_pool
from onebox.pool.discovery import LOCAL_HOST
from onebox.trainer_options import Numerics, Staging

_LOG = logging.getLogger("onebox")

_WARM = 2
_STEPS = 6
_LONG_S = 0.6
_MOST = 60
"""Most measured steps. At least six steps are measured after two warm-up steps, and more until the least time is
reached."""

_VISIT = 4
"""Steps in one format before the next one takes its turn."""

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
    measured: dict[str, list[SegmentTimes]] = {}
    numerics = resolved_numerics(numerics)
    runs: _Runs | None = None
    with contextlib.ExitStack() as stack:
        place = _Place(pool, stack)
        for size in sorted(set(sizes)):
            samples = torch.arange(size * _MICRO_BATCHES) % batch.size
            small = batch.structure.nest([leaf[samples] for leaf in batch.leaves])
            runs = _Runs(
                model, loss, optimizer, small, size, precision, fuse, numerics, runs.captures if runs else None
            )
            runs.prepare(pool)
            key = runs.key(pool)
            known = load(key, CachedTimes) if cache and not fresh else None
            if known is None:
                try:
                    known = CachedTimes(times=place.measure(runs))
                except DeviceMemoryError:
                    return _estimated(runs.captures, batch, sizes, optimizer, pool, fresh=fresh)
                store(key, known) if cache else None
            for kind, found in known.times.items():
                measured.setdefault(kind, []).append(found)
    assert runs is not None
    assert runs.captures is not None
    return ModelProfile(bytes=runs.bytes(), times={k: tuple(found) for k, found in measured.items()}), runs.captures


class _Place:
    """The pool of profiling runs: the given one, or, if it is emulated or lacks memory, similar workers."""

    def __init__(self, pool: Pool, stack: contextlib.ExitStack) -> None:
        self._pool = pool
        self._stack = stack
        self._devices = measured_devices(pool.devices)

    def measure(self, runs: _Runs) -> dict[str, SegmentTimes]:
        """Return the times of each type of device."""
        if not self._devices:
            self._pool, self._devices = self._stack.enter_context(open_pool("cpu", threads=1)), [0]
        try:
            return runs.measure(self._pool, self._devices)
        except DeviceMemoryError:
            kinds = {(self._pool.devices[device].kind, self._pool.devices[device].host) for device in self._devices}
            if kinds != {("cpu", LOCAL_HOST)}:
                raise
            self._pool = self._stack.enter_context(_roomier(self._pool, self._devices))
            self._devices = list(range(len(self._pool)))
            return runs.measure(self._pool, self._devices)


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
        precision: Precision,
        fuse: bool,
        numerics: Numerics,
        captures: Captures | None,
    ) -> None:
        self._arguments = (model, loss, optimizer)
        self._small = small
        self._size = size
        self._precision = precision
        self._fuse = fuse
        self._numerics = numerics
        self.captures = captures
        self._names: tuple[str, ...] = ()
        self._bytes: ModelBytes | None = None
        self._programs: ModelPrograms | None = None

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
        self._names = self.captures.segments(as_batch(*self._small), self._size)

    def key(self, pool: Pool) -> str:
        """Return the cache key of the times, with everything that they depend on."""
        optimizer = self._arguments[2]
        return times_key(self.bytes().graph, pool.devices, optimizer, self._size, self._precision, self._numerics)

    def measure(self, pool: Pool, devices: Sequence[int]) -> dict[str, SegmentTimes]:
        """Train on each device at once, in each promising format; return the times of each type of device."""
        self.bytes()
        assert self._programs is not None
        sides: dict[SegmentVariant, list[int]] = {}
        for kind in sorted({pool.devices[device].kind for device in devices}):
            alike = [device for device in devices if pool.devices[device].kind == kind]
            for way in ways_of(kind, [pool.devices[device] for device in alike], self._programs, self._precision):
                sides.setdefault(way, []).extend(alike)
        try:
            found = self._measure(pool, sides)
        except DeviceMemoryError:
            if len(sides) == 1:
                raise
            found = {way: self._measure(pool, {way: own})[way] for way, own in sides.items()}
        kinds = {
            kind: {way: times[kind] for way, times in found.items() if kind in times} for kind in found[AS_CAPTURED]
        }
        return {kind: compared(by_way) for kind, by_way in kinds.items()}

    def _measure(
        self, pool: Pool, sides: Mapping[SegmentVariant, Sequence[int]]
    ) -> dict[SegmentVariant, dict[str, SegmentTimes]]:
        """Train on devices, alternating between formats; return the times of each type of device by format."""
        sessions: dict[SegmentVariant, list[TrainingSession]] = {way: [] for way in sides}
        try:
            for way, devices in sides.items():
                for device in devices:
                    sessions[way].append(self._session(pool, device, way))
            start_s, steps = time.monotonic(), 0
            while steps < _WARM + _STEPS or (time.monotonic() - start_s < _LONG_S * len(sides) and steps < _MOST):
                for own in sessions.values():
                    self._visit(own)
                steps += _VISIT
            return {way: self._found(pool, devices, sessions[way]) for way, devices in sides.items()}
        finally:
            for session in itertools.chain.from_iterable(sessions.values()):
                with contextlib.suppress(Exception):  # the pool may be broken
                    session.close()

    def _visit(self, sessions: Sequence[TrainingSession]) -> None:
        """Train some steps on all devices at once."""
        for _ in range(_VISIT):
            for session in sessions:
                session.step(as_batch(*self._small))
        for session in sessions:
            session.drain()
            session.wait(0)

    def _found(
        self, pool: Pool, devices: Sequence[int], sessions: Sequence[TrainingSession]
    ) -> dict[str, SegmentTimes]:
        """Return the measurements of one format."""
        found: dict[str, list[SegmentTimes]] = {}
        events = [[event for event in session.traces.events() if event.step >= _WARM] for session in sessions]
        between_s = min(map(_between_s, events))  # of the slowest device: the others wait for it here
        for own, device in zip(events, devices, strict=True):
            info = pool.devices[device]
            found.setdefault(device_type(info), []).append(self._times(own, info.speed, between_s))
        return {kind: _median_of(times) for kind, times in found.items()}

    def _session(self, pool: Pool, device: int, way: SegmentVariant) -> TrainingSession:
        assert self.captures is not None
        plan = _one_by_one(self._names, device, self._size, way)
        return TrainingSession(
            pool,
            lambda captures, batch: plan,
            self.captures,
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

    def _times(self, events: Sequence[TraceEvent], speed: float, between_s: float) -> SegmentTimes:
        by_action: dict[tuple[str, int], list[float]] = {}
        for event in events:
            if event.action is not None:
                key = (event.action.kind, event.action.stage)
                by_action.setdefault(key, []).append((event.end_ns - event.start_ns) / 1e9 * speed)

        def taken(kind: str, index: int) -> float:
            return _typical(by_action.get((kind, index), [_LEAST_S]))

        sums = _named(events, "accumulate", speed)
        parameters = [segment.parameter_bytes for segment in self.bytes().segments]
        parts = [found / max(1, sum(parameters)) for found in parameters]  # fractions of the accumulation cost
        return SegmentTimes(
            size=self._size,
            seconds=tuple(
                (taken("F", index), taken("I", index), taken("W", index) + part * _typical(sums) * len(self._names))
                for index, part in enumerate(parts)
            ),
            update_s=_typical(_named(events, "optimizer", speed)) + between_s * speed,
            call_s=_call_s(events),
        )

    def bytes(self) -> ModelBytes:
        """Return the sizes that follow from the graph alone."""
        if self._bytes is None:
            self._bytes = self._count()
        return self._bytes

    def _count(self) -> ModelBytes:
        assert self.captures is not None
        programs, found = divided_bytes(self.captures, as_batch(*self._small), self._size, self._arguments[2])
        self._programs = programs
        return found


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
    return [(event.end_ns - event.start_ns) / 1e9 * speed for event in events if event.name == name] or [0.0]


def _typical(seconds: Sequence[float]) -> float:
    """Return the mean without the longest fifth, which other processes delayed."""
    kept = sorted(seconds)[: max(1, round(len(seconds) * 0.8))]
    return statistics.fmean(kept)


def _between_s(events: Iterable[TraceEvent]) -> float:
    """Return the median time between the end of a step and the start of the next, mainly the upload of a batch."""
    spans: dict[int, tuple[int, int]] = {}
    for event in events:
        start, end = spans.get(event.step, (event.start_ns, event.end_ns))
        spans[event.step] = (min(start, event.start_ns), max(end, event.end_ns))
    ordered = [spans[step] for step in sorted(spans)]
    gaps = [(later[0] - earlier[1]) / 1e9 for earlier, later in itertools.pairwise(ordered)]
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
