"""The pool: devices for use by a client, each owned by a worker."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from onebox.cost import PoolProfile, load, store
from onebox.drawing import save, topology_figure
from onebox.errors import OneboxError, PoolError, UsageError, WorkerDied
from onebox.pool.backends.base import HostedWorker, RestartableSource, WorkerHandle, WorkerSource, end_all
from onebox.pool.client.connection import WorkerReply
from onebox.pool.client.loop import ClientLoop
from onebox.pool.core_usage import HostCores, host_cores
from onebox.pool.devices import DeviceInfo, check_kinds, nccl_ranks, require_devices, welcome
from onebox.pool.discovery import LOCAL_HOST, cores
from onebox.pool.errors import raise_first
from onebox.pool.network.client_bandwidth import ClientBandwidth
from onebox.pool.network.emulated import LinkMap, changed, directed, outgoing
from onebox.pool.network.profile import measure_pool, profile_key, renew_links
from onebox.pool.network.transport_paths import explain_unshared, shares_memory
from onebox.pool.reclaim import Reclaimer
from onebox.pool.recovery import PATIENCE_S, RecoveryReport, recover_workers
from onebox.pool.spare_workers import SpareWorkers
from onebox.pool.streams.message_log import FIRST_BUFFER
from onebox.pool.streams.stream_recovery import StreamRecovery
from onebox.pool.topology_view import places_of, pool_html
from onebox.wire import dtype_name
from onebox.wire.protocol.eager import DefaultType
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Retime
from onebox.wire.protocol.requests import Instruction, Shutdown
from onebox.wire.protocol.responses import Hello, WorkerMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOG = logging.getLogger("onebox")

HELLO_S = 5.0
"""How long a worker may take to say hello whose port has been reached before."""

GROUP_S = 1800.0
"""Bound of every wait inside a group of workers: a slow peer may take long; a dead or hung one is detected
elsewhere."""

_LINKS_S = 300.0
"""How long a measurement of the links between hosts is recent: plans of several islands or trainers share it."""


class Pool:
    """Devices, each owned by a worker process; made by :func:`open`.

    A context manager: leaving it ends all workers and closes all sockets.
    """

    attached = False
    """True for the pool of a parent process, whose devices other processes use, too."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UsageError(
            "a Pool cannot be pickled or copied: it holds connections to its workers. Open another one where it is "
            "needed, or give its devices to processes of this script, as onebox run does"
        )

    def __init__(
        self,
        handles: Sequence[WorkerHandle],
        sources: Sequence[WorkerSource],
        client_loop: ClientLoop,
        devices: Sequence[DeviceInfo],
        links: LinkMap | None = None,
        plain_links: bool = False,
        first_number: int = 1,
    ) -> None:
        self.devices: tuple[DeviceInfo, ...] = tuple(devices)
        """The devices, in the order of their numbers."""
        self.links: LinkMap = directed(links or {}, devices)
        """The emulated links of each direction."""
        self.plain_links = plain_links
        """True if workers of different hosts send each other tensors without encryption, and over NCCL."""
        self._handles = list(handles)
        self._sources = list(sources)
        self._spares = SpareWorkers(self._sources)
        self._client_loop = client_loop
        self._forming: dict[int, list[Future[WorkerReply]]] = {}  # of groups that no member has left
        self.order = threading.RLock()
        """Held while several workers get messages that make them wait for each other: where several threads use the
        pool, all workers must get those in the same order."""
        self._recovering = threading.RLock()
        self._recoveries = 0
        self._losses: dict[int, tuple[int, OneboxError]] = {}  # of each worker the latest, with its recovery's number
        self.first_number = first_number
        """The lowest number of a definition or group; lower ones are those of other processes that use the workers."""
        self.first_buffer = FIRST_BUFFER + first_number - 1
        """The lowest number of a script's buffers, and the number of its stream."""
        self._numbers = itertools.count(first_number)
        # of child processes; none is used again, as workers may still end a group of an earlier one
        self.child_numbers = itertools.count(1)
        self._owner = os.getpid()
        self._closed = False
        self._default_types: dict[int, torch.dtype] = {}
        self.shared = shares_memory()
        """True if new groups use shared memory between workers of one host, where they can."""
        self.client_bandwidth = ClientBandwidth(self)
        """Bandwidth from this process to the workers."""
        self.round_trip_s = 0.0
        """Round-trip time to the furthest worker when the pool was opened, in seconds; 0 where all are on this
        machine."""
        self.gone: frozenset[int] = frozenset()
        """Devices whose workers were lost and could not be restarted; see :meth:`recover_workers`."""
        self._streams: StreamRecovery | None = None
        self._reclaimer = Reclaimer(self._replace)
        self._excluded: set[int] = set()
        self.trainers: weakref.WeakSet[object] = weakref.WeakSet()
        """The open trainers on the pool, which plan for the devices as they are: none moves to another place then."""
        self.moved: list[Callable[[], object]] = []
        """Callbacks for when devices are others after a recovery."""
        self.closing: list[Callable[[], object]] = []
        """Callbacks for the closing of the pool, before its workers end."""
        self._opened_s = time.time()
        self.profiled: PoolProfile | None = None
        """The result of the latest call of :meth:`profile`."""
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

    def _repr_html_(self) -> str:
        """Return the pool as a notebook shows it."""
        return pool_html(self.devices, self.profiled)

    def figure(self, path: str | Path | None = None) -> Figure:
        """Return a figure of the hosts, their devices, and the links between them.

        Links are as wide as they are fast once :meth:`profile` has measured them, or planning has.

        Args:
            path: A file for it, a ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            UsageError: The file cannot be written.
            MissingExtra: Matplotlib is not installed.
        """
        found = topology_figure(*places_of(self.devices, self.profiled))
        if path is not None:
            save(found, path)
        return found

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process id of each worker."""
        return tuple(handle.pid for handle in self._handles)

    @property
    def present(self) -> tuple[int, ...]:
        """The numbers of the devices that are not gone."""
        return tuple(number for number in range(len(self.devices)) if number not in self.gone)

    @property
    def cores(self) -> tuple[HostCores, ...]:
        """The cores of each host, with its workers' busy threads and the cores that are left; this host first.

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
        """Bytes of tensors sent to each worker so far, after compression."""
        sent = self._client_loop.sent_bytes
        return tuple(sent.get(worker, 0) for worker in range(len(self.devices)))

    @property
    def received_bytes(self) -> tuple[int, ...]:
        """Bytes of tensors received from each worker so far."""
        received = self._client_loop.received_bytes
        return tuple(received.get(worker, 0) for worker in range(len(self.devices)))

    def busy_ns(self, worker: int) -> int:
        """Return the nanoseconds for which a device has worked for scripts so far, as far as replies have told; in a
        process that uses the devices of its parent, for itself."""
        return self._client_loop.work.busy_ns.get(worker, 0)

    def waited_ns(self, worker: int) -> int:
        """Return the nanoseconds for which a device has waited for others for scripts, likewise."""
        return self._client_loop.work.waited_ns.get(worker, 0)

    @property
    def broken(self) -> bool:
        """True when nothing can be posted, until the pool is recovered."""
        return self._client_loop.broken is not None

    def isolate(self, domains: Sequence[Sequence[int]]) -> None:
        """Divide the devices into fault domains: the loss of a worker concerns only what is posted to those of its own.

        The others finish what they have been given, and are given more; only exchanges with the lost worker fail. The
        workers of a domain are still lost to all who wait for them, until :meth:`recover_workers`.

        Args:
            domains: The devices of each domain; those in none form one by themselves.
        """
        self._client_loop.domains = {worker: number for number, own in enumerate(domains, 1) for worker in own}

    def give_up(self, worker: int, error: OneboxError) -> None:
        """Mark a worker as lost, for :meth:`recover_workers` to end it and to start another.

        Raises:
            OneboxError: The pool is closed.
        """
        self._client_loop.give_up(worker, error)

    def near(self, worker: int) -> bool:
        """Return whether a worker is a process of this machine."""
        return self.devices[worker].host == LOCAL_HOST

    def new_number(self) -> int:
        """Return a number, unique in this pool, for a buffer, definition or group."""
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
        self.require_owner()
        post = self._client_loop.post if self._streams is None else self._streams.post
        return post(worker, instructions, frames, answer=answer)

    def recover_scripts(self, budget_bytes: int) -> None:
        """Let scripts on the devices survive the loss of workers; see :class:`StreamRecovery`.

        Args:
            budget_bytes: The most bytes of a snapshot, and of what is sent between two.
        """
        self._streams = StreamRecovery(self, self._client_loop.post, budget_bytes)

    @property
    def script_recovery(self) -> StreamRecovery | None:
        """The recovery of scripts after the loss of workers; ``None`` where they do not survive it."""
        return self._streams

    def require_owner(self) -> None:
        """Require that this is the process that has opened the pool.

        Raises:
            PoolError: This is a forked one, in which no thread serves the pool.
        """
        if os.getpid() != self._owner:
            raise PoolError("a forked process cannot use its parent's pool; open one there with onebox.open()")

    def default_type(self, worker: int, kind: torch.dtype) -> DefaultType:
        """Return the instruction that sets a worker's default element type, for the caller to post.

        Results of operators on integers, and of optimizers that keep scalars, depend on it.
        """
        self._default_types[worker] = kind
        return DefaultType(dtype_name(kind))  # type: ignore[arg-type]

    def follow_default_type(self) -> None:
        """Set the default element type of all workers to that of this process, where it is another one."""
        kind = torch.get_default_dtype()
        for worker in self.present:
            if self._default_types.get(worker, torch.float32) is not kind:
                self.post(worker, [self.default_type(worker, kind)])

    def form_group(self, workers: Sequence[int], via: Literal["workers", "client"]) -> int:
        """Form a group of workers and return its number.

        Args:
            workers: Members; their order gives the ranks.
            via: ``workers`` for transfers from worker to worker: by NCCL among different GPUs of one host, through
                memory where they find that they can share it, else over TCP, encrypted if they are of several hosts.
                ``client`` for sums that the client computes.

        Raises:
            UsageError: A device is not there; they mix ``sim`` with others, or are such and the client is to compute
                sums.
            OneboxError: The group could not be formed.
        """
        group = self.new_number()
        try:
            answers = raise_first(self.begin_group(workers, via, number=group, scripts=True))
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.leave_group(group, workers)
            raise
        self.note_group(workers, answers)
        return group

    def begin_group(
        self,
        workers: Sequence[int],
        via: Literal["workers", "client"],
        *,
        number: int,
        aside: bool = False,
        tagged: bool = False,
        scripts: bool = False,
    ) -> list[Future[WorkerReply]]:
        """Start to form a group without waiting for it; for its members and way see :meth:`form_group`.

        Args:
            number: Its number, from :meth:`new_number`.
            aside: Whether it is for background transfers between host memories.
            tagged: Whether its messages must match by channel, which those of NCCL do not.
            scripts: Whether it is a script's, so that a recovery forms it anew.

        Returns:
            Futures of its members' replies, for :meth:`note_group`; where one fails, the group has to be left.

        Raises:
            UsageError: As :meth:`form_group`.
            OneboxError: The pool is broken; some members may have received the request.
        """
        group = number
        require_devices(workers, len(self))
        check_kinds([self.devices[worker] for worker in workers], "a group")
        emulated = any(self.devices[worker].kind == "sim" for worker in workers)
        if via == "client" and emulated:
            raise UsageError("sim devices have no values that a client could add up; let their sums go via workers")
        by_nccl = via == "workers" and not aside and not tagged  # even if this client has no NCCL
        shared = via == "workers" and (self.shared or emulated)

        def form(group: int) -> list[Future[WorkerReply]]:  # once more after a recovery, with workers on other hosts
            sockets: Literal["tcp", "tls"] = "tls" if self.encrypts(workers) else "tcp"
            backend: Literal["tcp", "tls", "client"] = "client" if via == "client" else sockets
            nccl = self.nccl_ranks(workers) if by_nccl else ((),) * len(workers)
            self._client_loop.form(group, workers)
            asked = []
            for rank, worker in enumerate(workers):
                address, links = self.devices[worker].address, outgoing(self.links, workers, rank)
                request = FormGroup(
                    group, rank, len(workers), backend, address, GROUP_S, shared, links, aside, nccl[rank]
                )
                asked.append(self.post(worker, [request], answer=True))
            return asked

        with self.order:
            streams = self._streams if scripts else None
            asked = form(group) if streams is None else streams.begin_group(group, workers, form)
            self._forming[group] = asked
        return asked

    def encrypts(self, workers: Sequence[int]) -> bool:
        """Return whether the connections of a group of workers are encrypted: where they are of several hosts, unless
        the pool was opened with ``plain_links``."""
        return not self.plain_links and len({self.devices[worker].host for worker in workers}) > 1

    def nccl_ranks(self, workers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return for each rank of a group of workers the ranks with which it uses NCCL: those of its host, or all where
        the pool was opened with ``plain_links``."""
        return nccl_ranks([self.devices[worker] for worker in workers], between_hosts=self.plain_links)

    def is_formed(self, group: int) -> bool:
        """Return whether all members of a group have replied that it is formed, or has failed; until then none may
        leave.

        A member that leaves earlier would be missing for those that are still connecting to it.
        """
        return all(future.done() for future in self._forming.get(group, ()))

    def note_group(self, workers: Sequence[int], answers: Sequence[WorkerReply]) -> None:
        """Log why some members of a formed group do not share memory."""
        for line in explain_unshared([self.devices[worker] for worker in workers], answers):
            _LOG.warning("%s", line)

    def profile(self, *, fresh: bool = False, cache: bool = True, probe: Collection[int] = ()) -> PoolProfile:
        """Return the speeds of the devices and of the links between them, and the groups of near devices.

        Measured once: the profile of such a pool is kept on disk, in the user's cache folder. Measuring takes a second
        or two for a few devices; nothing else should run on them meanwhile. Of links that are alike one is measured.

        Args:
            fresh: Whether to measure again a known pool.
            cache: Whether to read and write the cache.
            probe: In a known pool, devices whose links between hosts are timed again, unless this pool did so in the
                last five minutes: less than a second for two hosts. A link that has changed is logged.

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
        key = profile_key(self.devices, self.links, plain_links=self.plain_links)
        known = load(key, PoolProfile) if cache and not fresh else None
        if known is None:
            found = measure_pool(self)
        else:
            found = renew_links(self, known, probe, max(self._opened_s, time.time() - _LINKS_S))
        if cache and found is not known:
            store(key, found)
        self.profiled = found
        return found

    def is_whole(self, group: int) -> bool:
        """Return whether a group is formed and, as far as is known, no member has left it."""
        return self._client_loop.serves(self._present(group))

    def _present(self, group: int) -> int:
        """Return the present number of a group, which a recovery may have formed anew."""
        return group if self._streams is None else self._streams.number(group)

    def has_failed(self, group: int) -> bool:
        """Return whether, as far as is known, a member has left a group because it could not do its part."""
        return self._client_loop.has_failed(self._present(group))

    def claim(self, worker: int) -> None:
        """Reserve a device for the collectives of this process, among those that use the pool.

        Raises:
            UsageError: It is another one's.
        """

    def release(self, worker: int) -> None:
        """End a claim of a device."""

    def groups_of(self, worker: int) -> dict[int, tuple[int, ...]]:
        """Return the groups that a worker is in, with their members.

        Raises:
            OneboxError: The pool is closed.
        """
        return self._client_loop.groups_of(worker)

    def end_groups(self, groups: Mapping[int, Sequence[int]]) -> None:
        """End groups of which a process that used them has ended: exchanges in them fail.

        Args:
            groups: Members by group.

        Raises:
            OneboxError: The pool is closed or broken.
        """
        self._client_loop.dissolve(groups)
        self.interrupt_groups(groups)
        for group, members in groups.items():
            self.leave_group(group, members)

    def leave_group(self, group: int, workers: Sequence[int]) -> None:
        """Dissolve a group."""
        self._forming.pop(group, None)
        if self._streams is not None:
            group = self._streams.leave(group)
        for worker in workers:
            if worker not in self.gone:
                self.post(worker, [LeaveGroup(group)])

    def interrupt_groups(self, groups: Mapping[int, Sequence[int]]) -> None:
        """End all waits in groups, which are to be left then: their exchanges fail.

        Args:
            groups: Members by group.
        """
        for worker in sorted(set(itertools.chain.from_iterable(groups.values())) - self.gone):
            own = [group for group, members in groups.items() if worker in members]
            self._client_loop.interrupt(worker, own)

    def silence_s(self, worker: int) -> float:
        """Return the seconds since a worker was last heard; each sends a heartbeat once a second at least."""
        return self._client_loop.silence_s(worker)

    def memory(self, worker: int) -> WorkerMemory:
        """Return the memory of a worker's buffers as of its last heartbeat, so that nothing waits for the worker."""
        return self._client_loop.memory.get(worker, WorkerMemory(0, 0, 0))

    def retime(self, worker: int, *, speed: float) -> None:
        """Change the speed of a ``sim`` device for everything that is posted later, for experiments.

        The pool's description of its devices does not change: the new speed shows only in measurements.

        Args:
            worker: The device.
            speed: The new divisor of costs.

        Raises:
            UsageError: It is not a ``sim`` device, or the speed is invalid.
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
        """Change the values of an emulated link, in both directions, for everything that is posted later, for
        experiments.

        Args:
            source: The device at one end.
            target: The device at the other end.
            bandwidth_bps: Bytes per second; ``None`` to keep it.
            latency_s: Added seconds of each transfer; ``None`` to keep it.

        Raises:
            UsageError: The pool was opened without that link, or the values are invalid.
        """
        for link in ((source, target), (target, source)):
            self.links = changed(self.links, link, bandwidth_bps, latency_s)
            self.post(link[0], [Retime(links=outgoing(self.links, link, 0))])

    @property
    def lost(self) -> frozenset[int]:
        """The workers that are lost until :meth:`recover_workers`."""
        return frozenset(self._client_loop.lost.copy())

    @property
    def recoveries(self) -> int:
        """Number of recoveries begun so far."""
        return self._recoveries

    def losses(self, seen: int) -> dict[int, OneboxError]:
        """Return the errors of the workers lost in recoveries after the first few: their state is gone.

        Args:
            seen: The earlier number of :attr:`recoveries`.
        """
        return {worker: error for worker, (number, error) in [*self._losses.items()] if number > seen}

    def recover_workers(
        self, *, seen: int | None = None, patience_s: float = PATIENCE_S, elsewhere: bool = False
    ) -> RecoveryReport:
        """Recover from a loss: end the lost workers, restart them where possible, keep the others.

        The state of lost workers is gone, and so are their groups. Surviving workers keep theirs; instructions that
        they were executing may have failed. Of several callers at once the first recovers the pool for all.

        Args:
            seen: Number of :attr:`recoveries` that the caller has taken note of. If workers were lost in later ones,
                and none is missing now, they are reported and nothing is done. ``None`` for all.
            patience_s: How long a survivor may make no progress with its earlier work; one that exceeds it is lost,
                too.
            elsewhere: Whether workers whose hosts are gone are started in another place, unless there are trainers.

        Returns:
            A report of this recovery, and of those that the caller has not seen.

        Raises:
            OneboxError: The pool is closed, has another error than lost workers, or loses workers repeatedly.
        """
        with self._recovering:
            seen = self._recoveries if seen is None else seen
            if self.broken or not self.losses(seen):
                self._recoveries += 1
                self._recover(patience_s, elsewhere=elsewhere and not self.trainers)
            lost = self.losses(seen)
            return RecoveryReport(
                number=self._recoveries,
                lost={worker: self._client_loop.missing.get(worker, error) for worker, error in lost.items()},
                replaced=tuple(sorted(lost.keys() - self.gone)),
                gone=tuple(sorted(lost.keys() & self.gone)),
            )

    def _recover(self, patience_s: float, *, elsewhere: bool) -> None:
        used_bytes: dict[int, int] = {}

        def note(worker: int, error: OneboxError) -> None:
            self._losses[worker] = self._recoveries, error
            used_bytes.setdefault(worker, self._client_loop.memory.get(worker, WorkerMemory(0, 0, 0)).peak_bytes)

        tried: set[int] = set()

        def move(worker: int) -> tuple[WorkerHandle, str] | None:
            made, failure = None, None
            if worker not in tried:  # else its device fails as soon as it is used
                tried.add(worker)
                try:
                    made = self._replace(worker)
                except OneboxError as error:
                    failure = error
            made = made or self._spares.start(self.devices[worker], used_bytes[worker], self._client_loop.client_key)
            if made is None and failure is not None:
                raise failure
            return made

        try:
            replace = move if elsewhere else self._replace
            found = recover_workers(
                self._client_loop, self._handles, replace, note, present=self.present, patience_s=patience_s
            )
            for worker in found.devices:
                self._default_types.pop(worker, None)
            devices = tuple(found.devices.get(device.number, device) for device in self.devices)
            moved, self.devices = devices != self.devices, devices
            for source in self._sources:
                source.connected()
            for call in self.moved if moved else ():
                call()
        finally:
            missing = self._client_loop.missing.keys()
            fresh = {worker for worker in missing - self.gone if isinstance(self._handles[worker], HostedWorker)}
            self.gone = frozenset(missing)
            self._reclaimer.seek(fresh - self._excluded)
            self._reclaimer.seek(fresh & self._excluded, doubtful=True)
            self._excluded.clear()

    def exclude(self, devices: Collection[int]) -> None:
        """Mark devices as lost, so that the next recovery gives them up: they are taken back later, after growing
        intervals.

        Args:
            devices: Devices that were taken back, some of which may be gone again.

        Raises:
            OneboxError: The pool is closed.
        """
        with self._recovering:
            for worker in sorted(set(devices) - self.gone):
                place = self._handles[worker].place
                self._excluded.add(worker)
                self._client_loop.give_up(
                    worker, WorkerDied(f"{place} was back, and was lost again with the next step", **vars(place))
                )

    @property
    def returning(self) -> bool:
        """True if devices that are gone can be used again, after :meth:`readmit`."""
        return self._reclaimer.ready

    def readmit(self) -> dict[int, float]:
        """Take back the devices that were gone and whose hosts have returned, with new workers, which have no state.

        Returns:
            Seconds that each of them was away, by number.

        Raises:
            OneboxError: The pool is closed or broken.
        """
        with self._recovering:
            return self._readmit()

    def _readmit(self) -> dict[int, float]:
        started = self._reclaimer.take()
        back: dict[int, float] = {}
        hellos: dict[int, Future[Hello]] = {}
        for worker, new in started.items():
            with contextlib.suppress(OneboxError):  # it has ended since
                hellos[worker] = self._client_loop.connect(new.handle, new.key)
        for worker, hello in hellos.items():
            new = started[worker]
            with contextlib.suppress(OneboxError):
                device = welcome(new.handle, hello, HELLO_S)
                self._handles[worker] = new.handle
                self.devices = tuple(device if each.number == worker else each for each in self.devices)
                self._default_types.pop(worker, None)
                self._reclaimer.accepted(worker)
                back[worker] = new.away_s
        for worker, new in started.items():
            if worker in back:
                continue
            if worker in hellos:
                self._client_loop.drop(worker)
            self._client_loop.miss(worker, PoolError(f"{new.handle.place} was gone again before it was in use"))
            new.handle.close(grace_s=0.0)
            self._reclaimer.seek([worker])
        self._client_loop.mend()
        self.gone -= set(back)
        self.follow_default_type()
        return back

    def why_gone(self, worker: int) -> str:
        """Return the cause by which a device is gone, in one line."""
        error = self._client_loop.missing.get(worker)
        return "" if error is None else str(error).partition("\n")[0]

    def _replace(self, worker: int) -> tuple[WorkerHandle, str] | None:
        """Restart a worker by its source, where that is possible."""
        if worker in self._excluded:
            return None
        moved = self._spares.sources.get(worker)
        for source in self._sources if moved is None else [moved]:
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
        with contextlib.ExitStack() as last_first:  # each is called, whatever others raise
            last_first.callback(self._reclaimer.close)
            for source in reversed(self._sources):
                last_first.callback(source.close)
            last_first.callback(self._end_workers)
            last_first.callback(self._reclaimer.stop)
            if self._streams is not None:
                last_first.callback(self._streams.close)
            for call in reversed(self.closing):
                last_first.callback(call)

    def _end_workers(self) -> None:
        broken = self._client_loop.broken is not None
        try:
            self._client_loop.stop(Shutdown())
        finally:
            end_all(self._handles, grace_s=0.0 if broken else 2.0)
