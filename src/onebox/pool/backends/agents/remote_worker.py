"""The pool's handle of a worker that an agent started on its host."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

from onebox.errors import PoolError, WorkerDied
from onebox.pool.errors import AFTERWARDS, WorkerLocation, how_it_ended
from onebox.portable import Wakeup
from onebox.wire.protocol.agents import Started
from onebox.worker import Ports


class RemoteWorker:
    """A worker of a lease; a :class:`~onebox.pool.backends.base.WorkerHandle`.

    Args:
        host: Name of its host in the pool.
        address: The address of that host that peers connect to.
        lease: Number of the lease.
        started: The agent's report of its start.

    Raises:
        PoolError: Its endpoints are not at that address.
    """

    def __init__(self, host: str, address: str, lease: int, started: Started) -> None:
        there = f"tcp://[{address}]:" if ":" in address else f"tcp://{address}:"
        for endpoint in (started.commands, started.heartbeats):
            if not endpoint.startswith(there) or not endpoint.removeprefix(there).isdecimal():
                raise PoolError(f"the agent on {host} names {endpoint!r} for a worker; allowed is its own {there}PORT")
        self.place = WorkerLocation(worker=0, host=host, device=started.device)
        self.address = address
        self.lease = lease
        self.key = started.key
        self.pid = started.process
        self.heard_s = time.monotonic()
        """Time at which its agent was last heard; see :class:`~onebox.pool.backends.base.HostedWorker`."""
        self.lost_s: float | None = None
        """Time at which it was given up."""
        self._ports = Ports(started.commands, started.heartbeats)
        self._lock = threading.Lock()
        self._exit_status: int | None = None
        self._last_words = ""
        self._end = ""
        self._closed = False
        self._wakeup = Wakeup()
        self.descriptor = self._wakeup.descriptor

    def number(self, worker: int) -> None:
        """Set its number in the pool."""
        self.place = replace(self.place, worker=worker)

    def unreachable(self, within_s: float) -> str:
        """Return why one of its ports cannot be reached, by opening a connection to each; empty if both can.

        ZeroMQ would try again in silence, until the worker counts as hung.

        Args:
            within_s: Longest wait for both.
        """
        end_s = time.monotonic() + within_s
        for endpoint in (self._ports.commands, self._ports.heartbeats):
            where, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            try:
                connection = (where.strip("[]"), int(port))
                socket.create_connection(connection, max(0.001, end_s - time.monotonic())).close()
            except TimeoutError:
                return f"no answer at {where}, port {port}, within {within_s:.0f} s"
            except OSError as error:
                return f"{where}, port {port}: {error.strerror or error}"
        return ""

    def ports(self) -> Ports:
        """Return its endpoints, which it had bound before the agent reported its start.

        Raises:
            WorkerDied: It has ended since.
        """
        if self._end:
            raise self.death()
        return self._ports

    def ended(self, exit_status: int | None, last_words: str) -> None:
        """Mark its process as ended by itself."""
        said = f"; its last words:\n{last_words}" if last_words else "; it said nothing"
        self._tell(f", process {self.pid}, {how_it_ended(exit_status)}{said}", exit_status, last_words)

    def lost(self, why: str) -> None:
        """Mark it as ended by others, or no longer known to the agent."""
        self.lost_s = self.lost_s or time.monotonic()
        self._tell(f" {why}", None, "")

    def death(self) -> WorkerDied:
        """Return the error that describes its end."""
        return WorkerDied(
            f"{self.place}{self._end or ' is gone'}\n  {AFTERWARDS}",
            exit_status=self._exit_status,
            last_words=self._last_words,
            worker=self.place.worker,
            host=self.place.host,
            device=self.place.device,
        )

    def close(self, *, grace_s: float) -> None:
        """Release it; its process ends with its lease. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wakeup.close()

    def _tell(self, end: str, exit_status: int | None, last_words: str) -> None:
        with self._lock:
            if self._end:  # the first cause reported is kept
                return
            self._end, self._exit_status, self._last_words = end, exit_status, last_words
            if not self._closed:
                self._wakeup.set()
