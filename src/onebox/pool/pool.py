"""A pool: devices that somebody may use, each owned by a worker."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from onebox.cost import PoolProfile, load, store
from onebox.errors import OneboxError, PoolError, UsageError
from onebox.pool.backends.base import RestartableSource, WorkerHandle, WorkerSource, end_all
from onebox.pool.backends.local import LOCAL_HOST
from onebox.pool.client.connection import WorkerReply
from onebox.pool.client.loop import ClientLoop
from onebox.pool.core_usage import HostCores, host_cores
from onebox.pool.devices import DeviceInfo
from onebox.pool.discovery import cores
from onebox.pool.errors import raise_first
from onebox.pool.network.client_bandwidth import ClientBandwidth
from onebox.pool.network.emulated import LinkMap, changed, directed, outgoing
from onebox.pool.network.profile import measure_pool, profile_key
from onebox.pool.network.transport_paths import explain_unshared, shares_memory
from onebox.pool.recovery import PATIENCE_S, RecoveryReport, recover_workers
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Retime
from onebox.wire.protocol.requests import Instruction, Shutdown

_LOG = logging.getLogger("onebox")

GROUP_S = 1800.0
"""Bound of every wait inside a group of workers: a slow peer may take long, a dead or hung one is noticed elsewhere."""


class Pool:
    """Devices, each owned by a worker process; made by :func:`open`.

    A context manager: leaving it ends all workers and closes all sockets.
    """

    def __init__(
        self,
        members: Sequence[WorkerHandle],
        sources: Sequence[WorkerSource],
        client_loop: ClientLoop,
        devices: Sequence[DeviceInfo],
        links: LinkMap | None = None,
        channel_latency_s: float = 0.0,
        channel_bandwidth_bps: float = math.inf,
    ) -> None:
        self.devices: tuple[DeviceInfo, ...] = tuple(devices)
        self.links: LinkMap = directed(links or {}, devices)
        self.channel_latency_s = channel_latency_s
        self.channel_bandwidth_bps = channel_bandwidth_bps
        self._members = list(members)
        self._sources = sources
        self._client_loop = client_loop
        self._forming: dict[int, list[Future[WorkerReply]]] = {}  # of groups that nobody has left
        self._numbers = itertools.count(1)
        self._owner = os.getpid()
        self._closed = False
        self.shared = shares_memory()
        """Whether groups that are formed from now on use memory that workers of one host share, where they can."""
        self.client_bandwidth = ClientBandwidth(self)
        """How fast tensors go to the workers."""
        self.round_trip_s = 0.0
        """How long a question to the furthest worker took when the pool was opened; 0 where all are of this machine."""
        self.gone: frozenset[int] = frozenset()
        """Devices whose workers were lost and could not be replaced; see :meth:`recover_workers`."""
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
        return tuple(member.pid for member in self._members)

    @property
    def present(self) -> tuple[int, ...]:
        """The numbers of the devices that have not gone."""
        return tuple(number for number in range(len(self.devices)) if number not in self.gone)

    @property
    def cores(self) -> tuple[HostCores, ...]:
        """The cores of each host, with the threads that its workers keep busy and what is left; this host first.

        Example:
            >>> import onebox
            >>> with onebox.open("cpu*2", threads=1) as pool:
            ...     dict(pool.cores[0].busy)
            {0: 1, 1: 1}
        """
        present = [self.devices[number] for number in self.present]
        return host_cores(present, LOCAL_HOST, cores())

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes of tensors that have been sent to each worker so far, as they travel."""
        sent = self._client_loop.sent_bytes
        return tuple(sent.get(worker, 0) for worker in range(len(self.devices)))

    @property
    def broken(self) -> bool:
        """Whether nothing can be posted any more, or until it is healed."""
        return self._client_loop.broken is not None

    def near(self, worker: int) -> bool:
        """Tell whether a worker is a process of this machine, and nothing slower than that is emulated."""
        return self.devices[worker].host == LOCAL_HOST and self.channel_bandwidth_bps == math.inf

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
    ) -> Future[WorkerReply]:
        """Send instructions to a worker; see :meth:`ClientLoop.post`."""
        if os.getpid() != self._owner:
            raise PoolError("a forked process cannot use its parent's pool; open one there with onebox.open()")
        return self._client_loop.post(worker, instructions, frames, answer=answer)

    def form_group(
        self, workers: Sequence[int], via: Literal["workers", "client"], *, aside: bool = False, number: int = 0
    ) -> int:
        """Form a group of workers and return its number.

        Args:
            workers: Members; their order gives the ranks.
            via: ``workers`` for transfers from worker to worker: through memory where they find that they can share it,
                by NCCL among CUDA devices, else by Gloo. ``client`` for sums that are made at the client.
            aside: Whether it is for what travels in the background, between the memories of the hosts.
            number: What it is to be called, of :meth:`new_number`; 0 for a new one.

        Raises:
            UsageError: Some of the devices have values and others, ``sim``, have none; or what is asked for cannot
                go over the links that are emulated between them.
            OneboxError: The group could not be formed.
        """
        group = number or self.new_number()
        try:
            answers = raise_first(self.begin_group(workers, via, aside=aside, number=group))
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.leave_group(group, workers)
            raise
        self.note_group(workers, answers)
        return group

    def begin_group(
        self, workers: Sequence[int], via: Literal["workers", "client"], *, number: int, aside: bool = False
    ) -> list[Future[WorkerReply]]:
        """Let a group be formed, and do not wait for it: for the arguments see :meth:`form_group`.

        Returns:
            The answers of its members, for :meth:`note_group`; where one fails, the group has to be left.

        Raises:
            UsageError: As :meth:`form_group`.
            OneboxError: The pool is broken; some may have been told.
        """
        group = number
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
        backend: Literal["gloo", "nccl", "client"] = "gloo"
        if via == "client":
            backend = "client"
        elif not aside and all(self.devices[worker].nccl for worker in workers):  # whatever this client's PyTorch has
            backend = "nccl"
        shared = backend == "gloo" and (self.shared or "sim" in kinds or any(links))
        addresses = [self.devices[worker].address for worker in workers]
        self._client_loop.form(group, workers)
        self._forming[group] = asked = [
            self.post(
                worker,
                [FormGroup(group, rank, len(workers), backend, address, GROUP_S, shared, links[rank], aside)],
                answer=True,
            )
            for rank, (worker, address) in enumerate(zip(workers, addresses, strict=True))
        ]
        return asked

    def is_formed(self, group: int) -> bool:
        """Tell whether all members of a group have answered that it is formed, or why not; until then none may leave.

        One that leaves as soon as it has met the others would be lost to those that are still about to meet it.
        """
        return all(future.done() for future in self._forming.get(group, ()))

    def note_group(self, workers: Sequence[int], answers: Sequence[WorkerReply]) -> None:
        """Take in what the members of a group answered that has been formed: why some do not share memory is logged."""
        for line in explain_unshared([self.devices[worker] for worker in workers], answers):
            _LOG.warning("%s", line)

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
        return self._client_loop.serves(group)

    def leave_group(self, group: int, workers: Sequence[int]) -> None:
        """Dissolve a group."""
        self._forming.pop(group, None)
        for worker in workers:
            if worker not in self.gone:
                self.post(worker, [LeaveGroup(group)])

    def retime(self, worker: int, *, speed: float) -> None:
        """Let a ``sim`` device be of another speed from what is posted next on, for experiments.

        What the pool says of its devices stays as it was when it was opened: to notice is up to who measures.

        Args:
            worker: The device.
            speed: What costs are divided by from then on.

        Raises:
            UsageError: It is no ``sim`` device, or the speed is none.
        """
        kind = self.devices[worker].kind if 0 <= worker < len(self.devices) else "not there"
        if kind != "sim" or not 0 < speed < math.inf:
            raise UsageError(
                f"device {worker} is {kind} and cannot be of speed {speed}: a sim device can be of any above 0"
            )
        self.post(worker, [Retime(speed)])

    def relink(
        self, source: int, target: int, *, bandwidth_bps: float | None = None, latency_s: float | None = None
    ) -> None:
        """Let an emulated link be of other values, both ways, from what is posted next on, for experiments.

        Args:
            source: The device at one end.
            target: The device at the other end.
            bandwidth_bps: Bytes per second; ``None`` for what it was.
            latency_s: Seconds that everything takes in addition; ``None`` for what it was.

        Raises:
            UsageError: The pool was opened without that link, or there is none of such values.
        """
        for link in ((source, target), (target, source)):
            self.links = changed(self.links, link, bandwidth_bps, latency_s)
            self.post(link[0], [Retime(links=outgoing(self.links, link, 0))])

    def recover_workers(self, *, patience_s: float = PATIENCE_S) -> RecoveryReport:
        """Go on after a loss: end the workers that are lost, start them again where that can be, keep the others.

        What the lost ones held is gone, and so are the groups that they were in. Workers that survive keep what they
        have; they may have been in the middle of something, which then has failed.

        Args:
            patience_s: How long a survivor may take to be done with what it was given; one that takes longer is lost,
                too.

        Returns:
            What was found and done.

        Raises:
            OneboxError: The pool is closed, or something else is wrong with it than lost workers, or workers are lost
                again and again.
        """
        healing = recover_workers(
            self._client_loop, self._members, self._replace, present=self.present, patience_s=patience_s
        )
        for source in self._sources:
            source.connected()
        self.gone |= set(healing.gone)
        self.devices = tuple(healing.devices.get(device.number, device) for device in self.devices)
        return healing

    def _replace(self, worker: int) -> tuple[WorkerHandle, str] | None:
        """Let the source of a worker start it again, where that is possible."""
        for source in self._sources:
            made = (
                source.replace(worker, self._client_loop.client_key) if isinstance(source, RestartableSource) else None
            )
            if made is not None:
                return made
        return None

    def close(self) -> None:
        """End all workers and close all sockets. Idempotent."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        for call in self.closing:
            call()
        broken = self._client_loop.broken is not None
        self._client_loop.stop(Shutdown())
        end_all(self._members, grace_s=0.0 if broken else 2.0)
        for source in self._sources:
            source.close()
