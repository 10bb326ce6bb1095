"""The workers of all leases of a host: started, watched and ended without anybody waiting for them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from onebox.agent.demand import Share
from onebox.errors import PoolError, WorkerDied
from onebox.pool.failures import Place
from onebox.pool.process import START_S, WorkerProcess
from onebox.wire import new_keys
from onebox.wire.agents import Started
from onebox.worker import Ports, WorkerConfig

CLOSE_S = 2.0
"""How long the workers of an agent that ends may take to be gone."""


class LeasedWorker(WorkerProcess):
    """A worker that belongs to a lease."""

    ports_found: Ports | None = None
    ended = False

    @property
    def outlet(self) -> int:
        """A file descriptor that becomes readable when :meth:`ports` does not wait any more."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def bury(self) -> None:
        """Let go of a process that has ended."""
        self.ended = True
        self.close(grace_s=0.0)


# ---- news


@dataclass(frozen=True)
class Ready:
    """All workers of a lease can be connected to."""

    lease: int
    workers: tuple[Started, ...]


@dataclass(frozen=True)
class NotStarted:
    """The workers of a lease could not be started."""

    lease: int
    why: str


@dataclass(frozen=True)
class Died:
    """A worker ended by itself."""

    lease: int
    worker: int
    exit_status: int | None
    last_words: str


@dataclass(frozen=True)
class Gone:
    """All workers of a lease that was to end have ended."""

    lease: int


News = Ready | NotStarted | Died | Gone


@dataclass
class _Crew:
    lease: int
    until_s: float
    keys: list[str] = field(default_factory=list)
    workers: list[LeasedWorker] = field(default_factory=list)
    ready: bool = False
    failed: bool = False
    ending: bool = False


class Workers:
    """All workers of an agent.

    Args:
        host: Its name, for messages.
        bind: The IP address that workers bind to.
        advertise: The address of this host that clients connect to.
    """

    def __init__(self, *, host: str, bind: str, advertise: str) -> None:
        self._host = host
        self._bind = bind
        self._advertise = advertise
        self._crews: dict[int, _Crew] = {}
        self._closed = False

    def start(self, lease: int, shares: Sequence[Share], client_key: str, speed: float, now_s: float) -> str | None:
        """Start the workers of a lease, which takes them seconds; news follow.

        Args:
            lease: The lease, which has none yet.
            shares: What each is to have.
            client_key: The public key of the client that they are to let in.
            speed: Fraction of their full speed that CPU workers work at.
            now_s: The time.

        Returns:
            Why that failed at once; None if it did not.
        """
        crew = self._crews[lease] = _Crew(lease, now_s + START_S)
        try:
            for number, share in enumerate(shares):
                keys = new_keys()
                config = WorkerConfig(
                    share.device,
                    share.threads,
                    keys.public,
                    keys.secret,
                    client_key,
                    self._bind,
                    quota_bytes=share.memory_bytes,
                    speed=speed if share.device == "cpu" else 1.0,
                    owner=os.getpid(),
                )
                place = Place(worker=number, host=self._host, device=share.device)
                crew.workers.append(LeasedWorker(place, config))
                crew.keys.append(keys.public)
        except OSError as error:
            crew.failed = True
            return f"{shares[len(crew.workers)].device} on {self._host}: no worker could be started: {error.strerror}"
        return None

    def processes(self, lease: int) -> tuple[int, ...]:
        """Return the process ids of the workers of a lease."""
        return tuple(worker.pid for worker in self._crews[lease].workers)

    def descriptors(self) -> Iterator[int]:
        """Yield the file descriptors that become readable when there is something to attend to."""
        for crew in self._crews.values():
            for worker in crew.workers:
                if not worker.ended:
                    yield worker.descriptor
                    if worker.ports_found is None and not (crew.failed or crew.ending):
                        yield worker.outlet

    def end(self, lease: int, grace_s: float, now_s: float) -> None:
        """End the workers of a lease: wait for their own end for a while, then kill them; :class:`Gone` follows, also
        where there are none."""
        crew = self._crews.setdefault(lease, _Crew(lease, now_s))
        crew.ending = True
        crew.until_s = now_s + grace_s
        if grace_s <= 0:
            self._kill(crew)

    def attend(self, ready: Set[int], now_s: float) -> list[News]:
        """See to what has happened.

        Args:
            ready: The descriptors that are readable.
            now_s: The time.
        """
        news: list[News] = []
        for crew in list(self._crews.values()):
            for number, worker in enumerate(crew.workers):
                if not worker.ended:
                    news += self._look(crew, number, worker, ready)
            if now_s >= crew.until_s and not crew.ready and not crew.failed and not crew.ending:
                news.append(self._fail(crew, f"a worker did not start within {START_S:.0f} s"))
            if crew.ending and now_s >= crew.until_s:
                self._kill(crew)
            if crew.ending and all(worker.ended for worker in crew.workers):
                del self._crews[crew.lease]
                news.append(Gone(crew.lease))
        return news

    def close(self) -> None:
        """End all workers. Idempotent."""
        crews, self._crews = list(self._crews.values()), {}
        for crew in crews:
            self._kill(crew)
        for crew in crews:
            for worker in crew.workers:
                worker.close(grace_s=CLOSE_S)

    def _look(self, crew: _Crew, number: int, worker: LeasedWorker, ready: Set[int]) -> list[News]:
        """See what has become of one worker."""
        if worker.descriptor in ready:
            death = worker.death()
            worker.bury()
            if crew.ending or crew.failed:
                return []
            if not crew.ready:
                return [self._fail(crew, str(death))]
            return [Died(crew.lease, number, death.exit_status, death.last_words)]
        if crew.ready or crew.failed or crew.ending or worker.ports_found is not None or worker.outlet not in ready:
            return []
        try:
            worker.ports_found = worker.ports()
        except (PoolError, WorkerDied) as error:
            return [self._fail(crew, str(error))]
        started = [self._started(key, each) for key, each in zip(crew.keys, crew.workers, strict=True)]
        if any(each is None for each in started):
            return []
        crew.ready = True
        return [Ready(crew.lease, tuple(each for each in started if each is not None))]

    def _started(self, key: str, worker: LeasedWorker) -> Started | None:
        """Return what a client is told of a worker; None while its sockets are not bound."""
        ports = worker.ports_found
        if ports is None:
            return None
        return Started(
            worker.place.device, worker.pid, key, self._advertised(ports.commands), self._advertised(ports.beats)
        )

    def _advertised(self, endpoint: str) -> str:
        """Return the endpoint that clients are to connect to."""
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}"

    def _fail(self, crew: _Crew, why: str) -> NotStarted:
        crew.failed = True
        return NotStarted(crew.lease, why)

    def _kill(self, crew: _Crew) -> None:
        for worker in crew.workers:
            if not worker.ended:
                worker.kill()
