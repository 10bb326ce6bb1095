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
from torch import nn

from onebox.cost import load, store
from onebox.cost.model_profile import (
    AS_CAPTURED,
    ModelProfile,
    SegmentTimes,
    SegmentVariant,
)
from onebox.engine.config import check_precision, resolved_numerics
from onebox.engine.planning.partial_profile import TimeLimit, completed, is_whole, profile_line
from onebox.engine.planning.piecewise_step import STEP, PiecewiseStep, run_pieces
from onebox.engine.planning.size_runs import MICRO_BATCHES, SizeRuns
from onebox.engine.planning.slowdowns import FEWEST_SLICES, SliceSlowdown, at_median, slice_slowdown
from onebox.engine.planning.trace_times import gap_between_steps_s, last_step_s, median_of
from onebox.engine.problem.estimate import estimate_profile, estimate_times
from onebox.engine.problem.planner_problem import CachedTimes, device_type
from onebox.engine.session import TrainingSession
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import DeviceMemoryError, UsageError
from onebox.graph import Loss, Precision
from onebox.pool import DeviceInfo, Pool, open_pool
from onebox.pool.discovery import LOCAL_HOST
from onebox.trainer_options import Numerics

_LOG = logging.getLogger("onebox")

_LONG_S, _MOST = 0.6, 60
"""Seconds of measured steps in a format that are enough, and the most steps of a format. One step may be enough."""

_PATIENCE_S = 3.0
"""Seconds of a format for which short steps are measured until there are enough slices for quantiles."""

_FIRST = 2
"""Warm-up steps; one where the second step is long enough."""

_TOGETHER = 0.25
"""Part of a device's memory up to which copies of the model for all sizes are there at once; else one size follows the
other."""

_UPLOAD_BPS = 3e8
"""Bytes per second of weights that go to workers before their first step, with all that is compiled for it: 0.3 s for
each of two workers of one machine and 100 MB. Within a time limit, a longer upload than there is time is not begun."""


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
    runs: list[SizeRuns] = []
    for size in sorted(set(sizes)):
        samples = torch.arange(size * MICRO_BATCHES) % batch.size
        small = batch.structure.nest([leaf[samples] for leaf in batch.leaves])
        captures = runs[-1].captures if runs else None
        runs.append(SizeRuns(model, loss, optimizer, small, size, batch.size, precision, fuse, numerics, captures))
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

    def measure(self, runs: Sequence[SizeRuns]) -> list[_Measured]:
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


def _measure(runs: Sequence[SizeRuns], pool: Pool, devices: Sequence[int], limit: TimeLimit) -> list[_Measured]:
    """Train on each device at once, in each size and promising format in turn; return the times by type of device."""
    formats = [_Format(own, way, pool, used) for own in runs for way, used in own.sides(pool, devices).items()]
    if limit.bounded:
        formats.sort(key=lambda one: one.way != AS_CAPTURED)  # what needs to be known first
    copies_bytes = sum(one.runs.trained_bytes * len(one.devices) for one in formats)
    together = copies_bytes <= _TOGETHER * min(pool.devices[device].memory_bytes for device in devices)
    turns = [formats] if together else [[one for one in formats if one.runs is own] for own in runs]
    try:
        for number, taking_turns in enumerate(turns):
            _train(taking_turns, limit.share(len(turns) - number), limit, max(one.set_up_s for one in formats))
    except DeviceMemoryError:
        if len(formats) == 1:
            raise
        short = [one for one in formats if one.cut or not one.measured]
        for number, one in enumerate(short):  # the copies of the model do not fit beside each other
            _train([one], limit.share(len(short) - number), limit, max(each.set_up_s for each in formats))
    slices: dict[str, list[SliceSlowdown]] = {}
    for one in formats:
        for kind, own_slices in one.slices.items():
            slices.setdefault(kind, []).extend(own_slices)
    kinds = {device_type(pool.devices[device]): None for device in devices}
    found = []
    for own in runs:
        mine = [one for one in formats if one.runs is own]
        by_way = {one.way: one.times(slices) for one in mine}
        times = {kind: own.compared({way: t[kind] for way, t in by_way.items() if kind in t}) for kind in kinds}
        found.append(_Measured(times=times, whole=not any(one.cut for one in mine)))
    return found


def _train(formats: Sequence[_Format], limit: TimeLimit, most: TimeLimit, set_up_s: float) -> None:
    """Train in slices, each format in turn, until they were measured for long enough or the time is over.

    Args:
        formats: The formats.
        limit: Time limit of these.
        most: Time limit of the first steps, without which nothing is known: they may use the time of others.
        set_up_s: Seconds that others took until something was executed.
    """
    with contextlib.ExitStack() as stack:
        for one in formats:
            stack.enter_context(one)
        if limit.bounded:
            for one in formats:
                one.first_step(most, set_up_s)
                set_up_s = max(set_up_s, one.set_up_s)
        for one in formats:
            one.warm_up(limit)
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

    def __init__(self, runs: SizeRuns, way: SegmentVariant, pool: Pool, devices: Sequence[int]) -> None:
        self.runs = runs
        self.way = way
        self.slices: dict[str, list[SliceSlowdown]] = {}
        """Slowdown of each slice, by type of device."""
        self.enough = False
        self.cut = False
        """True if the time was over before it was measured for long enough."""
        self.set_up_s = 0.0
        """Seconds until its first step in pieces could begin."""
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

    @property
    def measured(self) -> bool:
        """True if it has times."""
        return bool(self._times)

    def first_step(self, limit: TimeLimit, set_up_s: float) -> None:
        """Train a step in pieces, as far as there is time.

        Args:
            limit: The time limit.
            set_up_s: Seconds that others took until something was executed.
        """
        upload_s = self.runs.weight_bytes * len(self.devices) / _UPLOAD_BPS
        self.cut = limit.left_s < max(upload_s, set_up_s)
        batch, numerics, begin_s = as_batch(*self.runs.small), self.runs.numeric_instructions, time.monotonic()
        for session in self._sessions:
            self.cut = self.cut or limit.over
            if self.cut:
                return
            self._pieces.append(PiecewiseStep(self._pool, session, batch, numerics))
        ready_s = time.monotonic()
        self.cut = not run_pieces(self._pieces, limit)
        self.set_up_s = ready_s - begin_s
        self._step_s = max(self.runs.warm_step_s(piece.events()) for piece in self._pieces)

    def warm_up(self, limit: TimeLimit) -> None:
        """Train the first steps; if they are long, the last one of them is enough."""
        if not self.cut:
            graphs = any(self._pool.devices[device].kind == "cuda" for device in self.devices)
            steps = _FIRST + graphs - bool(self._pieces)  # the second one of a GPU captures its graphs
            self._step(steps, limit)
            if graphs and self._visits and len(self._visits[0]) < steps:
                self._visits.clear()  # the time of a step that captures graphs says nothing
        # the quickest, as something may have disturbed one of them
        long = self._visits and min(last_step_s(session.traces.events()) for session in self._sessions) >= _LONG_S
        self.enough = self.cut or bool(long)

    def slice(self, limit: TimeLimit) -> None:
        """Train one slice."""
        self._step(min(self.runs.slice_steps, _MOST - self._visits[-1].stop), limit)
        self.enough = self.cut or self._visits[-1].stop >= _MOST

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
        self._times, self.slices = {}, {}
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
        by_kind: dict[str, list[list[list[tuple[float, float]]]]] = {}
        for events, device in zip(every, self.devices, strict=True):
            info, own = self._pool.devices[device], [event for event in events if event.step >= slices[0].start]
            undisturbed = self.runs.undisturbed(own, cold=not self._visits)
            kind = device_type(info)
            times = self.runs.times(own, undisturbed, info.speed, between_s, whole=bool(self._visits))
            found.setdefault(kind, []).append(times)
            pairs = [self.runs.pairs([event for event in own if event.step in steps], undisturbed) for steps in slices]
            by_kind.setdefault(kind, []).append(pairs if self._visits else [[(s, s) for s in undisturbed.values()]])
        self._times = {kind: median_of(times) for kind, times in found.items()}
        self.slices = {kind: list(map(slice_slowdown, zip(*each, strict=True))) for kind, each in by_kind.items()}

    def times(self, slices: Mapping[str, Sequence[SliceSlowdown]]) -> dict[str, SegmentTimes]:
        """Return the times of each type of device at the median of its slowdowns."""
        return {kind: at_median(times, slices[kind]) for kind, times in self._times.items()}
