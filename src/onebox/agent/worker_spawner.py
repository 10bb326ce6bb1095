"""The fork server of one lease, which forks its workers after importing what they need.

A fork has its parent's address layout, and protection against attacks rests in part on the secrecy of that layout.
Therefore no process forks workers of two clients: each server starts and ends with its lease. A lease of a single
worker has none, since that would save no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from subprocess import SubprocessError
from typing import IO

from onebox.agent.admission import Share
from onebox.forking import ForkServerEnded, SpawnFailed
from onebox.pool.launch.fork_server import ForkedWorker, ForkServerProcess
from onebox.pool.launch.worker_process import worker_environment
from onebox.pool.launch.worker_user import WorkerUser

_SPAWN_S = 2.0
"""How long the agent, which has a single thread, waits for a fork; then workers are started from scratch."""


class LeaseForkServer:
    """Fork server for the workers of a lease; a :class:`~onebox.pool.launch.fork_server.WorkerSpawner`.

    Args:
        shares: Shares of the lease's workers. Only those with the most common number of threads are forked, because the
            number is part of the environment.
        account: User that workers run as; the agent's own user where ``None``.
    """

    def __init__(self, shares: Sequence[Share], account: WorkerUser | None) -> None:
        self._server: ForkServerProcess | None = None
        self._ready = False
        self._environment: dict[str, str] = {}
        threads, count = next(iter(Counter(share.threads for share in shares).most_common(1)), (1, 0))
        if count > 1:
            self._environment = worker_environment(threads, account)
            try:
                self._server = ForkServerProcess(self._environment, account)
            except (OSError, SubprocessError):
                self._server = None  # the start of a worker will raise an error with the cause

    def descriptors(self) -> list[int]:
        """Return the descriptors that are readable when :meth:`attend` has work."""
        return [] if self._server is None or self._ready else [self._server.channel]

    def attend(self) -> bool:
        """Read the server's message without blocking; return whether workers can be started, by it or from scratch."""
        if self._server is not None and not self._ready:
            try:
                self._ready = self._server.wait_ready(0.0)
            except (ForkServerEnded, SpawnFailed):
                self.close()
        return self._ready or self._server is None

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedWorker | None:
        """Start a worker; see :class:`~onebox.pool.launch.fork_server.WorkerSpawner`."""
        if self._server is None or environment != self._environment:
            return None
        try:
            return self._server.spawn_worker(stderr, within_s=_SPAWN_S)
        except SpawnFailed:
            return None
        except ForkServerEnded:
            self.close()
            return None

    def close(self) -> None:
        """Kill it, and with it its workers. Idempotent."""
        if self._server is not None:
            self._server.close(grace_s=0.0)
            self._server = None
