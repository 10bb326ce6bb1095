"""Measurement of a pool's devices and links, with stored programs and traced routines like any other work."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import platform
import statistics
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from onebox.cost import PoolProfile, Speeds, key_of, near_groups
from onebox.cost.benchmark_kernels import LEAST_BYTES, BenchmarkKernel, kernels, randoms
from onebox.cost.links import has_changed
from onebox.cost.pool_profile import FORMAT, DeviceProfile, age_text
from onebox.errors import OneboxError, UsageError
from onebox.pool.devices import DeviceInfo
from onebox.pool.errors import raise_first
from onebox.pool.network.emulated import LinkMap
from onebox.pool.network.link_benchmark import LinkSpeeds, measure_links, probe_links, tables
from onebox.pool.network.measured_pool import MeasuredPool
from onebox.pool.network.transport_paths import shares_memory
from onebox.portable import usable_cores
from onebox.sizes import bit_rate_text, size_text
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Ask, Call, Evict, Free, Offload, Prefetch, Step
from onebox.wire.protocol.requests import Define, Routine, Run, StoredProgram
from onebox.wire.protocol.responses import WorkerMemory

_TOGETHER_S = 0.06
"""How long each kernel runs on each device, so that slow and fast devices of a host are busy at the same time."""

_BLOCK_S = 0.001
"""Minimum length of a timed block of kernel runs: an accelerator has finished only when the host has synchronised,
which takes some 10 µs. Longer blocks would be interrupted by other processes more often."""

_LOG = logging.getLogger("onebox")

_LEAST_BLOCKS, _MOST_BLOCKS, _MOST_CALLS = 5, 60, 100
_ONE = TensorSpec("float32", (1,))


def profile_key(devices: Sequence[DeviceInfo], links: LinkMap, *, plain_links: bool = False) -> str:
    """Return the cache key of the profile of such a pool: a hash of everything that it depends on.

    Args:
        devices: Its devices.
        links: Its emulated links.
        plain_links: Whether connections between hosts are not encrypted.
    """
    emulated = sorted((source, target, link) for (source, target), link in links.items())
    here = platform.node(), usable_cores()
    alike = [replace(device, host_free_bytes=0) for device in devices]  # differs at every start
    return key_of("pool", FORMAT, str(torch.__version__), here, alike, emulated, shares_memory(), plain_links)


def measure_pool(pool: MeasuredPool) -> PoolProfile:
    """Measure all devices, at the same time, and all links; see :func:`measure_links`.

    Raises:
        UsageError: A device has not enough memory left.
        OneboxError: A worker failed or ended.
    """
    rooms = _rooms(pool, range(len(pool)))
    speeds = measure_devices(pool, rooms)
    links = _all_links(pool, rooms)
    devices = tuple(
        DeviceProfile(
            number=device.number,
            device=device.device,
            name=device.name,
            host=device.host,
            threads=device.threads,
            memory_bytes=device.memory_bytes,
            speed=device.speed,
            emulated=device.emulated,
            speeds=found,
        )
        for device, found in zip(pool.devices, speeds, strict=True)
    )
    latency_s, bandwidth_bps = tables(links, range(len(pool)))
    now = datetime.datetime.now(datetime.UTC)
    return PoolProfile(
        devices=devices,
        latency_s=latency_s,
        bandwidth_bps=bandwidth_bps,
        emulated_links=tuple(sorted(pool.links)),
        groups=near_groups(latency_s, bandwidth_bps),
        torch=str(torch.__version__),
        measured_at=now.isoformat(timespec="seconds"),
        links_at_s={source: dict.fromkeys(row, now.timestamp()) for source, row in latency_s.items()},
    )


def renew_links(pool: MeasuredPool, known: PoolProfile, among: Collection[int], since_s: float) -> PoolProfile:
    """Return a profile with the links between hosts probed anew: one pair of devices for each two hosts.

    Links of one host keep their speeds, and so do those between two hosts whose probe agrees with the earlier
    measurement. Otherwise all links between the two hosts take the speed of the probe, which is logged. Devices that
    have no memory for a probe keep the earlier measurement, which is logged, too.

    Args:
        pool: The pool.
        known: Its earlier profile.
        among: The devices whose links matter: other hosts are left alone.
        since_s: Time from which on a measurement is recent enough, in seconds since 1970.

    Raises:
        OneboxError: A worker failed or ended.
    """
    kinds = [device.kind for device in known.devices]
    across = [pair for pair in known.links_between_hosts() if "sim" not in (kinds[pair[0]], kinds[pair[1]])]
    hosts = [device.host for device in known.devices]
    chosen = frozenset(among)
    pairs: dict[tuple[str, str], tuple[int, int]] = {}
    for source, target in across:
        if source < target and {source, target} <= chosen and known.links_at_s[source][target] < since_s:
            pairs.setdefault((hosts[source], hosts[target]), (source, target))
    distinct = {frozenset(names): pair for names, pair in reversed(pairs.items())}
    if not distinct:
        return known
    earlier = {(a, b): known.link(a, b) for a, b in across}
    ends = sorted({device for pair in distinct.values() for device in pair})
    try:
        rooms = dict(zip(ends, _rooms(pool, ends), strict=True))
    except UsageError as error:
        _LOG.warning("the links between hosts count as they were measured before: %s", error)
        return known
    probed = probe_links(pool, distinct.values(), earlier, rooms)
    now_s = time.time()
    fresh: dict[tuple[str, str], tuple[float, float]] = {}
    for a, b in distinct.values():
        if any(has_changed(earlier[way], probed[way]) for way in ((a, b), (b, a))):
            fresh |= {(hosts[a], hosts[b]): probed[a, b], (hosts[b], hosts[a]): probed[b, a]}
            _log_change(known, (a, b), earlier, probed, now_s)
    latency_s = {source: dict(row) for source, row in known.latency_s.items()}
    bandwidth_bps = {source: dict(row) for source, row in known.bandwidth_bps.items()}
    at_s = {source: dict(row) for source, row in known.links_at_s.items()}
    for a, b in across:
        if frozenset((hosts[a], hosts[b])) in distinct:
            latency_s[a][b], bandwidth_bps[a][b] = fresh.get((hosts[a], hosts[b]), earlier[a, b])
            at_s[a][b] = now_s
    groups = near_groups(latency_s, bandwidth_bps) if fresh else known.groups
    return msgspec.structs.replace(
        known, latency_s=latency_s, bandwidth_bps=bandwidth_bps, links_at_s=at_s, groups=groups
    )


def _log_change(known: PoolProfile, pair: tuple[int, int], before: LinkSpeeds, now: LinkSpeeds, now_s: float) -> None:
    one, other = (known.devices[number].host for number in pair)
    rates = [bit_rate_text(min(speeds[pair][1], speeds[pair[::-1]][1])) for speeds in (now, before)]
    waits = [f"{1e3 * max(speeds[pair][0], speeds[pair[::-1]][0]):.2g} ms" for speeds in (now, before)]
    age = age_text(max(0.0, now_s - known.links_at_s[pair[0]][pair[1]]))
    _LOG.warning(
        "the link between %s and %s has changed: %s and a latency of %s; %s and %s when it was measured %s",
        *(one, other, rates[0], waits[0], rates[1], waits[1], age),
    )


def _rooms(pool: MeasuredPool, numbers: Sequence[int]) -> list[int]:
    """Return how many bytes may be used on each of some devices.

    Raises:
        UsageError: A device has hardly any memory left.
    """
    answers = raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in numbers])
    hosts = [device.host for device in pool.devices]
    rooms = []
    for number, answer in zip(numbers, answers, strict=True):
        device = pool.devices[number]
        (memory,) = answer.results
        assert isinstance(memory, WorkerMemory)
        limited = memory.quota_bytes - memory.used_bytes
        room = limited if memory.quota_bytes else device.memory_bytes // (2 * hosts.count(device.host))
        if room < LEAST_BYTES:
            raise UsageError(
                f"device {device.number} ({device.device} on {device.host}) has {size_text(max(0, room))} of memory "
                f"left; measuring needs {size_text(LEAST_BYTES)}: give it more, or close what uses it"
            )
        rooms.append(room)
    return rooms


# ---- devices


def measure_devices(pool: MeasuredPool, rooms: Sequence[int]) -> list[Speeds]:
    """Measure each device's speed on the fixed kernels, with all devices busy at once.

    Args:
        pool: The pool.
        rooms: Bytes that may be used on each device.
    """
    own_bytes = _ONE.size_bytes  # bytes of a run besides its kernel
    sets = [
        kernels(device.kind, room - own_bytes, bf16=device.has_bf16)
        for device, room in zip(pool.devices, rooms, strict=True)
    ]
    figures: list[dict[str, float]] = [{} for _ in sets]
    for place in range(max(map(len, sets))):
        chosen = {worker: found[place] for worker, found in enumerate(sets) if place < len(found)}
        for worker, seconds in _time(pool, chosen).items():
            figures[worker][chosen[worker].name] = chosen[worker].figure(seconds)
    return [Speeds(**found) for found in figures]


def _time(pool: MeasuredPool, chosen: Mapping[int, BenchmarkKernel]) -> dict[int, float]:
    """Return the median seconds of a run of a kernel on each of some workers."""
    runs = {worker: _KernelRun(pool, worker, kernel) for worker, kernel in chosen.items()}
    try:
        for run in runs.values():
            run.prepare()
        first = _all(pool, runs.values(), dict.fromkeys(runs, (2, 1)))
        plans = {worker: blocks(found[-1]) for worker, found in first.items()}
        return {worker: statistics.median(found) for worker, found in _all(pool, runs.values(), plans).items()}
    finally:
        for run in runs.values():
            run.clear()


def _all(
    pool: MeasuredPool, runs: Iterable[_KernelRun], plans: Mapping[int, tuple[int, int]]
) -> dict[int, list[float]]:
    """Run blocks of calls on all workers at once; return each worker's seconds per call, for each block."""
    by_worker = {run.worker: run for run in runs}
    posted = [pool.post(worker, run.instructions(*plans[worker]), answer=True) for worker, run in by_worker.items()]
    answers = zip(by_worker.items(), raise_first(posted), strict=True)
    return {worker: block_seconds(answer.times_ns, *plans[worker]) for (worker, _), answer in answers}


def blocks(call_s: float) -> tuple[int, int]:
    """Return the number of blocks, and of calls per block, for calls of a given length.

    Args:
        call_s: Approximate seconds of a call.
    """
    calls = max(1, min(_MOST_CALLS, math.ceil(_BLOCK_S / call_s)))
    return max(_LEAST_BLOCKS, min(_MOST_BLOCKS, round(_TOGETHER_S / (calls * call_s)))), calls


def block_seconds(times_ns: Sequence[int], count: int, calls: int) -> list[float]:
    """Return the mean seconds per call of each block in a trace whose blocks have equal numbers of instructions.

    Args:
        times_ns: Start and end of each instruction, in nanoseconds.
        count: Number of blocks.
        calls: Calls per block.
    """
    length, rest = divmod(len(times_ns), count)
    assert not rest and length > 2 * calls, f"{len(times_ns)} times for {count} blocks of {calls} calls"
    ends = [times_ns[(block + 1) * length - 1] for block in range(count)]
    return [max(1, end - times_ns[block * length]) / calls / 1e9 for block, end in enumerate(ends)]


class _KernelRun:
    """A kernel on a worker: its program, its inputs, and routines that call it.

    Args:
        pool: The pool.
        worker: The worker.
        kernel: The kernel.
    """

    def __init__(self, pool: MeasuredPool, worker: int, kernel: BenchmarkKernel) -> None:
        self.worker = worker
        self._pool = pool
        self._kernel = kernel
        self._program, self._maker, self._routine = (pool.new_number() for _ in range(3))
        self._inputs = tuple(pool.new_number() for _ in kernel.program.inputs)
        self._output, self._scalar = pool.new_number(), pool.new_number()

    def prepare(self) -> None:
        """Store the program and create its inputs."""
        maker = randoms((*self._kernel.program.inputs, _ONE))
        self._pool.post(
            self.worker,
            [
                Define(self._program, StoredProgram(self._kernel.program)),
                Define(self._maker, StoredProgram(maker)),
                Call(self._maker, (), (*self._inputs, self._scalar)),
            ],
        )

    def instructions(self, count: int, calls: int) -> list[Define | Run]:
        """Return instructions that run blocks of calls; each block ends with a synchronisation."""
        call, answer = Call(self._program, self._inputs, (self._output,)), Ask("scalars", (self._scalar,))
        block: tuple[Step, ...] = (*(call,) * calls, answer)
        if self._kernel.away:
            trip = Offload(self._inputs), Evict(self._inputs), Prefetch(self._inputs)
            block = (*trip * calls, call, Free((self._output,)), answer)
        return [Define(self._routine, Routine(block * count, 0)), Run(self._routine, trace=True)]

    def clear(self) -> None:
        """Free everything on the worker."""
        buffers = (*self._inputs, self._output, self._scalar)
        with contextlib.suppress(OneboxError):  # the pool may be broken
            self._pool.post(self.worker, [Free(buffers, (self._program, self._maker, self._routine))])


# ---- links


def _all_links(pool: MeasuredPool, rooms: Sequence[int]) -> LinkSpeeds:
    """Measure the links between all devices that can send to each other: real devices and ``sim`` devices
    separately."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    sleeping = [device.number for device in pool.devices if device.kind == "sim"]
    for members in (sleeping, [device.number for device in pool.devices if device.kind != "sim"]):
        if len(members) > 1:
            found.update(measure_links(pool, members, rooms))
    return found
