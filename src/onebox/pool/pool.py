"""A pool: devices that somebody may use, each owned by a worker."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch

from onebox.cost import PoolProfile, load, store
from onebox.errors import OneboxError, PoolError, UsageError
from onebox.pool.discover import requested_devices
from onebox.pool.failures import Place, raise_first
from onebox.pool.links import EMULATED_KINDS, LinkMap, directed, outgoing
from onebox.pool.measure import measure_pool, profile_key
from onebox.pool.process import START_S, SocketFolder, WorkerProcess
from onebox.pool.switchboard import Answer, Switchboard
from onebox.wire import new_keys
from onebox.wire.messages import PROTOCOL, Bye, FormGroup, Instruction, LeaveGroup
from onebox.wire.sayings import Hello
from onebox.worker import Fault, WorkerConfig

GROUP_S = 1800.0
"""Bound of every wait inside a group of workers: a slow peer may take long, a dead or hung one is noticed elsewhere."""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device of a pool.

    Args:
        number: Its number in the pool.
        host: The host that it is in.
        device: Its name there: ``cpu``, ``cuda:k`` or ``sim``.
        name: Product name.
        threads: Threads that its CPU operators may use.
        memory_bytes: Its memory, or the worker's quota where that is less.
        speed: Fraction of its full speed that a throttled CPU works at; of ``sim``, what costs are divided by.
        emulated: Whether times on it are made: it is throttled, or computes nothing (``sim``).
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) for all else.
        processors: Streaming multiprocessors of a GPU; 0 for all else.
    """

    number: int
    host: str
    device: str
    name: str
    threads: int
    memory_bytes: int
    speed: float = 1.0
    emulated: bool = False
    capability: tuple[int, int] = (0, 0)
    processors: int = 0

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda`` or ``sim``."""
        return self.device.split(":")[0]


class Pool:
    """Devices, each owned by a worker process; made by :func:`open`.

    A context manager: leaving it ends all workers and closes all sockets.
    """

    def __init__(
        self,
        processes: list[WorkerProcess],
        switchboard: Switchboard,
        devices: list[DeviceInfo],
        links: LinkMap | None = None,
        channel_latency_s: float = 0.0,
    ) -> None:
        self.devices: tuple[DeviceInfo, ...] = tuple(devices)
        self.links: LinkMap = directed(links or {}, devices)
        self.channel_latency_s = channel_latency_s
        self._processes = processes
        self._switchboard = switchboard
        self._numbers = itertools.count(1)
        self._owner = os.getpid()
        self._closed = False
        self.closing: list[Callable[[], object]] = []
        """Called when the pool is closed, before its workers end."""
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.devices)

    def __repr__(self) -> str:
        return f"<onebox.Pool of {', '.join(device.device for device in self.devices)}>"

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process id of each worker."""
        return tuple(process.pid for process in self._processes)

    def new_number(self) -> int:
        """Return a number for a buffer, definition or group that nothing else in this pool has."""
        return next(self._numbers)

    def post(
        self,
        worker: int,
        instructions: Sequence[Instruction],
        frames: Sequence[Any] = (),
        *,
        answer: bool = False,
    ) -> Future[Answer]:
        """Send instructions to a worker; see :meth:`Switchboard.post`."""
        if os.getpid() != self._owner:
            raise PoolError("a forked process cannot use its parent's pool; open one there with onebox.open()")
        return self._switchboard.post(worker, instructions, frames, answer=answer)

    def form_group(self, workers: Sequence[int], via: Literal["workers", "client"]) -> int:
        """Form a group of workers and return its number.

        Args:
            workers: Members; their order gives the ranks.
            via: ``workers`` for transfers from worker to worker (shared memory among the CPU and ``sim`` devices of one
                host, NCCL among CUDA devices, else Gloo), ``client`` for sums that are made at the client.

        Raises:
            UsageError: Some of the devices have values and others, ``sim``, have none; or what is asked for cannot
                go over the links that are emulated between them.
            OneboxError: The group could not be formed.
        """
        group = self.new_number()
        links = [outgoing(self.links, workers, rank) for rank in range(len(workers))]
        if via == "client" and any(links):
            raise UsageError("sums at the client do not go over the emulated links; let them go via workers")
        kinds = {self.devices[worker].kind for worker in workers}
        if "sim" in kinds and len(kinds) > 1:
            raise UsageError(
                f"a group of {', '.join(sorted(kinds))} devices: sim devices have no values to give to others; "
                "let a group be of sim devices only, or of none"
            )
        if "sim" in kinds and via == "client":
            raise UsageError("sim devices have no values that a client could add up; let their sums go via workers")
        same_host = len({self.devices[worker].host for worker in workers}) == 1 and kinds <= EMULATED_KINDS
        backend: Literal["gloo", "nccl", "client"] = "gloo"
        if via == "client":
            backend = "client"
        elif kinds == {"cuda"} and torch.distributed.is_nccl_available():
            backend = "nccl"
        self._switchboard.form(group, workers)
        try:
            joined = [
                self.post(
                    worker,
                    [FormGroup(group, rank, len(workers), backend, "127.0.0.1", GROUP_S, same_host, links[rank])],
                    answer=True,
                )
                for rank, worker in enumerate(workers)
            ]
            raise_first(joined)
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.leave_group(group, workers)
            raise
        return group

    def profile(self, *, fresh: bool = False, cache: bool = True) -> PoolProfile:
        """Return how fast the devices and the links between them are, and which devices are near to each other.

        Measured once: what is known of such a pool is kept on disk, in the user's folder for caches. Measuring takes a
        second or two for a few devices; nothing else should run on them meanwhile.

        Args:
            fresh: Measure even if it is known.
            cache: Whether to look in the cache and to keep the profile there.

        Raises:
            UsageError: A device has not enough memory left to be measured.
            OneboxError: A worker failed or ended.

        Example:
            >>> import onebox
            >>> with onebox.open("cpu*2") as pool:
            ...     profile = pool.profile()  # doctest: +SKIP
            >>> profile.latency_s[0][1]  # doctest: +SKIP
            7.1e-05
        """
        key = profile_key(self)
        known = load(key, PoolProfile) if cache and not fresh else None
        if known is not None:
            return known
        measured = measure_pool(self)
        if cache:
            store(key, measured)
        return measured

    def is_whole(self, group: int) -> bool:
        """Tell whether a group is formed and, as far as is known, no member has left it."""
        return self._switchboard.serves(group)

    def leave_group(self, group: int, workers: Sequence[int]) -> None:
        """Dissolve a group."""
        for worker in workers:
            self.post(worker, [LeaveGroup(group)])

    def close(self) -> None:
        """End all workers and close all sockets. Idempotent."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        for call in self.closing:
            call()
        broken = self._switchboard.broken is not None
        self._switchboard.stop(Bye())
        _close(self._processes, grace_s=0.0 if broken else 2.0)


def _close(processes: Sequence[WorkerProcess], *, grace_s: float) -> None:
    """End processes; the grace is for all of them together."""
    end_s = time.monotonic() + grace_s
    for process in processes:
        process.close(grace_s=max(0.0, end_s - time.monotonic()))


def open_pool(
    spec: str = "auto",
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    links: LinkMap | None = None,
    channel_latency_s: float = 0.0,
    faults: dict[int, Sequence[Fault]] | None = None,
) -> Pool:
    """Open a pool of this machine's devices.

    Args:
        spec: ``auto`` for all accelerators or, with none, one CPU worker a core up to four; or a list such as
            ``cuda:0,cuda:1`` or ``cpu*2``; ``cpu@0.5`` is a CPU worker slowed down to half of its speed, ``sim*4`` are
            four devices that compute nothing and sleep as long as what they are sent says that it costs.
        threads: Threads of each worker; an equal share of the cores when ``None``.
        memory_bytes: The most bytes that each worker's buffers may take; no limit when ``None``.
        links: Links to emulate between devices, by the numbers of the two: for both directions, or for each its own
            where both are given. For experiments on one host; times over them are made, not measured.
        channel_latency_s: Seconds that every message between this process and a worker takes in addition, each way;
            signs of life are not held up. Emulated likewise.
        faults: For tests: what goes wrong on which worker.

    Returns:
        The pool; close it, or use it as a context manager.

    Raises:
        UsageError: The specification is wrong, or names a device that is not there; or a link or latency cannot be
            emulated.
        PoolError: A worker could not be started, or is of another version.
        WorkerDied: A worker ended while it started.

    Example:
        >>> import onebox
        >>> with onebox.open("cpu*2") as pool:
        ...     len(pool)
        2
    """
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(f"memory_bytes={memory_bytes}: a worker needs some memory; leave it out for no limit")
    if not 0 <= channel_latency_s < math.inf:
        raise UsageError(f"channel_latency_s={channel_latency_s}: a latency is 0 s or more and finite")
    requests = requested_devices(spec, threads)
    mine = new_keys()
    processes: list[WorkerProcess] = []
    folder = SocketFolder()
    switchboard = Switchboard(mine, channel_latency_s, len(requests))
    try:
        keys = [new_keys() for _ in requests]
        for number, (request, pair) in enumerate(zip(requests, keys, strict=True)):
            config = WorkerConfig(
                request.device,
                request.threads,
                pair.public,
                pair.secret,
                mine.public,
                folder.path,
                quota_bytes=memory_bytes or 0,
                faults=tuple((faults or {}).get(number, ())),
                speed=request.speed,
                owner=os.getpid(),
            )
            place = Place(worker=number, host="localhost", device=request.device)
            processes.append(WorkerProcess(place, config))
        hellos = [switchboard.connect(process, pair.public) for process, pair in zip(processes, keys, strict=True)]
        switchboard.start()
        devices = [_welcome(number, hello) for number, hello in enumerate(hellos)]
        return Pool(processes, switchboard, devices, links, channel_latency_s)
    except BaseException:
        switchboard.stop()
        _close(processes, grace_s=0.0)
        raise
    finally:
        folder.close()  # all are connected: nobody else is to come, and nothing is left if this process is killed


def _welcome(number: int, future: Future[Hello]) -> DeviceInfo:
    try:
        hello = future.result(START_S)
    except FutureTimeout:
        raise PoolError(f"worker {number} did not say hello within {START_S:.0f} s") from None
    if hello.protocol != PROTOCOL or hello.torch.split("+")[0] != torch.__version__.split("+")[0]:
        raise PoolError(
            f"worker {number} speaks protocol {hello.protocol} with torch {hello.torch}, this client protocol "
            f"{PROTOCOL} with torch {torch.__version__}: install the same versions on both sides"
        )
    return DeviceInfo(
        number=number,
        host="localhost",
        device=hello.device,
        name=hello.name,
        threads=hello.threads,
        memory_bytes=hello.memory_bytes,
        speed=hello.speed,
        emulated=hello.emulated,
        capability=hello.capability,
        processors=hello.processors,
    )
