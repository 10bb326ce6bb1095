"""The workers of all leases of a host: started, monitored and ended without blocking."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from subprocess import SubprocessError

from onebox.agent.admission import Share
from onebox.agent.lease_processes import LeaseIsolation, LeaseProcesses
from onebox.errors import PoolError, UsageError
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.cpu_affinity import CoreAllocator
from onebox.pool.launch.stderr_tail import KEPT_BYTES, without_addresses
from onebox.pool.launch.worker_process import LAST_WORDS, WorkerProcess
from onebox.pool.launch.zygotes import WorkerSpawner, worker_environment
from onebox.reaping import KILLED_S, has_ended
from onebox.wire import new_keys
from onebox.wire.protocol.agents import Started
from onebox.worker import SHARING_KEY_BYTES, START_S, Ports, WorkerConfig

STARTS = 4
"""Workers of a lease that are started in one turn: one start takes some ten milliseconds."""

CLOSE_S = 2.0
"""How long the workers may take to end when the agent ends."""

LEAVE_S = 10.0
"""Time after which killed processes that do not end are left behind, so that their lease ends."""

CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL})
"""Signals by which a process ends that has used a wrong address, or found its stack overwritten."""

_POLL_S = 0.01
_CHECK_S = 1.0


class LeasedWorker(WorkerProcess):
    """A worker that belongs to a lease.

    Args:
        place: Location of the worker, for messages.
        config: Its configuration.
        processes: The processes of its lease.
        spawner: What forks it; it imports PyTorch itself where ``None``.
    """

    ports_found: Ports | None = None
    ended = False
    mute = False
    """True when its output has ended."""

    def __init__(
        self, place: WorkerLocation, config: WorkerConfig, processes: LeaseProcesses, spawner: WorkerSpawner | None
    ) -> None:
        self._processes = processes
        super().__init__(place, config, processes.account, spawner)

    def limit(self) -> None:
        """Have the lease's limits apply to it."""
        try:
            self._processes.add(self.pid, self.descriptor)
        except ProcessLookupError:
            pass  # it has ended, which is seen next
        except OSError as error:
            raise OSError(error.errno, f"it cannot be limited: {error.strerror}") from None

    def last_words(self) -> str:
        """Return the end of the worker's standard error, without addresses of memory, which workers of other clients
        share."""
        whole = without_addresses(self._stderr.text(KEPT_BYTES))  # before it is cut, perhaps within one
        return whole.encode()[-LAST_WORDS:].decode(errors="ignore")

    def kill(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def release(self) -> None:
        """Release the resources of a process that has ended; one that was killed long ago and has not is left behind,
        without a wait, which would hold up other leases."""
        self.ended = True
        self.close(grace_s=0.0, killed_s=KILLED_S if has_ended(self.descriptor, 0.0) else 0.0)


# ---- events


@dataclass(frozen=True)
class LeaseReady:
    """All workers of a lease are ready for connections."""

    lease: int
    workers: tuple[Started, ...]


@dataclass(frozen=True)
class LeaseNotStarted:
    """The workers of a lease could not be started."""

    lease: int
    why: str


@dataclass(frozen=True)
class LeasedWorkerExited:
    """A worker ended by itself."""

    lease: int
    worker: int
    exit_status: int | None
    last_words: str


@dataclass(frozen=True)
class LeaseClosed:
    """All workers of an ending lease have ended.

    Args:
        lease: The lease.
        left: Other processes of it that did not end when they were killed.
    """

    lease: int
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClientImportsAlone:
    """The workers of a lease's client import PyTorch themselves from now on."""

    lease: int
    why: str


@dataclass(frozen=True)
class ZygoteEnded:
    """A process that forks the workers of leases has ended; the next lease starts another."""

    process: int
    why: str


LeaseEvent = LeaseReady | LeaseNotStarted | LeasedWorkerExited | LeaseClosed | ClientImportsAlone


@dataclass
class _Crew:
    lease: int
    until_s: float
    processes: LeaseProcesses
    client: str = ""
    client_key: str = ""
    speed: float = 1.0
    to_start: deque[Share] = field(default_factory=deque)
    waits: bool = False
    """True while the next one to start waits for the imports of a zygote."""
    keys: list[str] = field(default_factory=list)
    workers: list[LeasedWorker] = field(default_factory=list)
    ready: bool = False
    failed: bool = False
    ending: bool = False
    ended_s: float | None = None
    cores: tuple[tuple[int, ...], ...] = ()


class Workers:
    """All workers of an agent.

    Args:
        host: Its name, for messages.
        bind: The IP address that workers bind to.
        advertise: The address of this host that clients connect to.
        isolation: Users and cgroups of leases; closed by the caller.
        ports: The TCP ports that workers bind, two or three each; empty for any free ones.
        sharing_key: A secret of the workers that share memory; its own where ``None``.
    """

    def __init__(
        self,
        *,
        host: str,
        bind: str,
        advertise: str,
        isolation: LeaseIsolation,
        ports: range = range(0),
        sharing_key: bytes | None = None,
    ) -> None:
        self._host = host
        self._bind = bind
        self._sharing_key = sharing_key or secrets.token_bytes(SHARING_KEY_BYTES)
        self._advertise = advertise
        self._isolation = isolation
        self._ports = ports
        self._zygotes = isolation.zygotes()
        self._alone: set[str] = set()  # keys of the clients, which are paired, whose workers no zygote forks
        self._news: list[LeaseEvent] = []
        self._failure: OSError | None = None  # not raised yet
        self._crews: dict[int, _Crew] = {}
        self._closed = False
        self._check_s = 0.0
        self._core_allocator = CoreAllocator()

    def start(
        self, lease: int, shares: Sequence[Share], client: str, client_key: str, speed: float, now_s: float
    ) -> str | None:
        """Start the workers of a lease, which takes seconds; events follow.

        Args:
            lease: The lease, which has no workers yet.
            shares: The share of each worker.
            client: The key of the client, as the agent has verified it.
            client_key: The public key of the client that they accept.
            speed: Fraction of their full speed that CPU workers work at.
            now_s: The time.

        Returns:
            The reason for an immediate failure; None if there was none.
        """
        try:
            processes = self._isolation.isolate(lease, shares)
        except (OSError, UsageError) as error:
            return f"{self._host}: this lease cannot be kept apart from others: {error}"
        cores = self._core_allocator.allocate([share.threads if share.device == "cpu" else 0 for share in shares])
        crew = _Crew(lease, now_s + START_S, processes, client, client_key, speed, cores=cores)
        crew.to_start.extend(shares)
        self._crews[lease] = crew
        return self._start_some(crew, now_s)

    @property
    def pressed(self) -> bool:
        """True when :meth:`attend` has more to do at once: workers to start, a lease that ends before it has any, or
        events."""
        return bool(self._news) or any(
            crew.ended_s is None and not crew.workers if crew.ending else crew.to_start and not crew.waits
            for crew in self._crews.values()
        )

    @property
    def changing(self) -> bool:
        """True while workers of a lease start or end, which takes looks now and then."""
        return any(not crew.ready or crew.ending for crew in self._crews.values())

    def descriptors(self) -> Iterator[int]:
        """Yield the file descriptors that are readable when :meth:`attend` has work."""
        if self._zygotes is not None:
            yield from self._zygotes.descriptors()
        for crew in self._crews.values():
            for worker in crew.workers:
                if not worker.ended:
                    yield worker.descriptor
                    if worker.ports_found is None and not (worker.mute or crew.failed or crew.ending):
                        yield worker.outlet

    def end(self, lease: int, grace_s: float, now_s: float) -> None:
        """End the workers of a lease: wait a while for them to end by themselves, then kill them. :class:`LeaseClosed`
        follows, even without workers."""
        crew = self._crews.get(lease)
        if crew is None:
            crew = self._crews[lease] = _Crew(lease, now_s, LeaseProcesses())
        crew.ending = True
        crew.to_start.clear()
        crew.until_s = now_s + grace_s
        if grace_s <= 0:
            self._kill(crew)

    def kill(self, lease: int, worker: int) -> bool:
        """Kill one worker of a lease, and return whether it exists; :class:`LeasedWorkerExited` or :class:`LeaseClosed`
        follows."""
        crew = self._crews.get(lease)
        if crew is None or not 0 <= worker < len(crew.workers) or crew.workers[worker].ended:
            return False
        crew.workers[worker].kill()
        return True

    def attend(self, ready: Set[int], now_s: float) -> list[LeaseEvent]:
        """Process events of the workers.

        Args:
            ready: The descriptors that are readable.
            now_s: The time.

        Raises:
            OSError: A lease could not be attended to, now or in the last calls, as without a free descriptor, and no
                other has an event; call it again.
        """
        # What is closed here gives its descriptors to what is started here, of which `ready` says nothing.
        known = [(crew, list(enumerate(crew.workers))) for crew in self._crews.values()]
        if self._zygotes is not None:
            self._zygotes.attend(ready, now_s)
            if now_s >= self._check_s:
                self._check_s = now_s + _CHECK_S
                self._zygotes.attend_memory()
        for crew, workers in known:
            try:
                self._attend_crew(crew, workers, ready, now_s)
            except OSError as error:  # as without descriptors, or with a process that cannot be looked at
                self._failure = error
        if self._failure is not None and not self._news:
            failure, self._failure = self._failure, None
            raise failure
        news, self._news = self._news, []
        return news

    def _attend_crew(
        self, crew: _Crew, workers: Sequence[tuple[int, LeasedWorker]], ready: Set[int], now_s: float
    ) -> None:
        """Process events of the workers of one lease."""
        why = self._start_some(crew, now_s)
        if why is not None:
            self._news.append(LeaseNotStarted(crew.lease, why))
        for number, worker in workers:
            if not worker.ended:
                self._news += self._look(crew, number, worker, ready)
        if now_s >= crew.until_s and not crew.ready and not crew.failed and not crew.ending:
            self._news.append(self._fail(crew, f"a worker did not start within {START_S:.0f} s"))
        if crew.ending and now_s >= crew.until_s:
            self._kill(crew)
        if crew.ending and now_s >= crew.until_s + LEAVE_S:
            for worker in crew.workers:
                if not worker.ended:
                    worker.release()
        if crew.ending and all(worker.ended for worker in crew.workers):
            self._news += self._finish(crew, now_s)

    def ended_zygotes(self) -> list[ZygoteEnded]:
        """Return, once, the zygotes that have ended before the agent."""
        return [] if self._zygotes is None else [ZygoteEnded(*each) for each in self._zygotes.news()]

    def close(self) -> None:
        """End all workers. Idempotent."""
        crews, self._crews = list(self._crews.values()), {}
        for crew in crews:
            self._kill(crew)
        end_s = time.monotonic() + CLOSE_S
        for crew in crews:
            for worker in crew.workers:
                worker.close(grace_s=max(0.0, end_s - time.monotonic()))
            with contextlib.suppress(OSError):  # what cannot be looked at ends with its cgroup
                while not crew.processes.end() and time.monotonic() < end_s:
                    time.sleep(_POLL_S)
        if self._zygotes is not None:
            self._zygotes.close()
        self._core_allocator.close()

    def _finish(self, crew: _Crew, now_s: float) -> list[LeaseEvent]:
        """End a lease whose workers have ended, once its other processes have, too, which are killed, or do not in
        time, such as in a call of a driver."""
        if crew.ended_s is None:
            crew.ended_s = now_s
        left = crew.processes.kill()
        gone = not left and crew.processes.remove()
        if not gone and now_s < min(crew.ended_s, crew.until_s) + LEAVE_S:
            return []
        self._isolation.release(crew.processes.account)
        self._core_allocator.give_back([core for own in crew.cores for core in own])
        del self._crews[crew.lease]
        return [LeaseClosed(crew.lease, tuple(left))]

    def _start_some(self, crew: _Crew, now_s: float) -> str | None:
        """Start the next few workers of a lease, as far as none has to wait for a zygote: each start delays all other
        clients.

        Returns:
            The reason for a failure; None if there was none.
        """
        zygotes = None if crew.client in self._alone else self._zygotes
        for _ in range(min(len(crew.to_start), STARTS)):
            share = crew.to_start[0]
            environment = worker_environment(share.threads, crew.processes.account)
            crew.waits = zygotes is not None and not zygotes.prepare(environment, now_s)
            if crew.waits:
                return None
            crew.to_start.popleft()
            keys = new_keys()
            config = WorkerConfig(
                "sim" if share.device.startswith("sim") else share.device,  # its number counts for the lease alone
                share.threads,
                keys.public,
                keys.secret,
                crew.client_key,
                self._bind,
                quota_bytes=share.memory_bytes,
                speed=crew.speed if share.device == "cpu" else 1.0,
                first_port=min(self._ports, default=0),
                last_port=max(self._ports, default=0),
                owner=os.getpid(),
                cores=crew.cores[len(crew.workers)],
                advertise=self._advertise,
                sharing_key=self._sharing_key_of(crew.client_key),
                most_processes=crew.processes.most,
            )
            place = WorkerLocation(worker=len(crew.workers), host=self._host, device=share.device)
            try:
                crew.workers.append(LeasedWorker(place, config, crew.processes, zygotes))
            except (OSError, SubprocessError, RuntimeError) as error:  # between fork and exec; no further thread
                crew.to_start.clear()
                crew.failed = True
                return (
                    f"{share.device} on {self._host}: no worker could be started: {getattr(error, 'strerror', error)}"
                )
            crew.keys.append(keys.public)
        return None

    def _sharing_key_of(self, client_key: str) -> str:
        """Return the key of the workers that share memory: all of a client's here, in any of its leases."""
        made = hashlib.blake2b(client_key.encode(), key=self._sharing_key, digest_size=SHARING_KEY_BYTES)
        return made.hexdigest()

    def _look(self, crew: _Crew, number: int, worker: LeasedWorker, ready: Set[int]) -> list[LeaseEvent]:
        """Process the events of one worker."""
        if worker.descriptor in ready:
            death = worker.death()
            worker.release()
            self._note_crash(crew, worker, death.exit_status)
            if crew.ending or crew.failed:
                return []
            if not crew.ready:
                return [self._fail(crew, str(death))]
            return [LeasedWorkerExited(crew.lease, number, death.exit_status, death.last_words)]
        if crew.ready or crew.failed or crew.ending or worker.ports_found is not None or worker.outlet not in ready:
            return []
        try:
            worker.ports_found = worker.read_ports()
        except EOFError:
            worker.mute = True  # its end follows, or its time limit
        except PoolError as error:
            return [self._fail(crew, str(error))]
        if crew.to_start or worker.ports_found is None:
            return []
        started = [self._started(key, each) for key, each in zip(crew.keys, crew.workers, strict=True)]
        if any(each is None for each in started):
            return []
        crew.ready = True
        return [LeaseReady(crew.lease, tuple(each for each in started if each is not None))]

    def _note_crash(self, crew: _Crew, worker: LeasedWorker, status: int | None) -> None:
        """Have no zygote fork for a client again whose worker has crashed: it may be guessing numbers that all forks
        share; nor for one for which it forks none that works."""
        if status is not None and -status in CRASHES:
            why = f"a worker ended by {signal.Signals(-status).name}"
        elif (status or 0) > 0 and worker.forked and worker.ports_found is None and not crew.ending and not crew.failed:
            why = "a forked worker ended as it started"
        else:
            return
        if self._zygotes is not None and crew.client not in self._alone:
            self._alone.add(crew.client)
            self._news.append(ClientImportsAlone(crew.lease, why))

    def _started(self, key: str, worker: LeasedWorker) -> Started | None:
        """Return a worker's report for the client; None while its sockets are not bound."""
        ports = worker.ports_found
        if ports is None:
            return None
        return Started(
            worker.place.device, worker.pid, key, self._advertised(ports.commands), self._advertised(ports.heartbeats)
        )

    def _advertised(self, endpoint: str) -> str:
        """Return the endpoint that clients connect to."""
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}"

    def _fail(self, crew: _Crew, why: str) -> LeaseNotStarted:
        crew.failed = True
        crew.to_start.clear()
        return LeaseNotStarted(crew.lease, without_addresses(why))

    def _kill(self, crew: _Crew) -> None:
        for worker in crew.workers:
            if not worker.ended:
                worker.kill()
