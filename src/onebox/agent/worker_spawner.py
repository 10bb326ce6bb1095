"""The nursery of one lease: its workers are forked by a process that has imported all.

A fork has its parent's memory at its parent's addresses, and what protects one against attacks is in part that nobody
knows these. Therefore nothing is forked for two clients by the same process, and one that ends with its lease is as
early as one can be had: a lease of a single worker has none, since that would take no shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from subprocess import SubprocessError
from typing import IO

from onebox.agent.admission import Share
from onebox.pool.launch.fork_server import ForkedProcess, ForkServerEnded, ForkServerProcess, SpawnFailed
from onebox.pool.launch.worker_process import worker_environment
from onebox.pool.launch.worker_user import WorkerUser

_BIRTH_S = 2.0
"""How long the agent, whose one thread does everything, waits for a fork; then workers are started from nothing."""


class LeaseForkServer:
    """What may fork the workers of a lease; a :class:`~onebox.pool.launch.fork_server.WorkerSpawner`.

    Args:
        shares: What the workers of the lease are to have. Those that have as many threads as most have are forked: an
            environment says how many.
        account: Whom workers run as; the agent's own user where ``None``.
    """

    def __init__(self, shares: Sequence[Share], account: WorkerUser | None) -> None:
        self._nursery: ForkServerProcess | None = None
        self._ready = False
        self._environment: dict[str, str] = {}
        threads, count = next(iter(Counter(share.threads for share in shares).most_common(1)), (1, 0))
        if count > 1:
            self._environment = worker_environment(threads, account)
            try:
                self._nursery = ForkServerProcess(self._environment, account)
            except (OSError, SubprocessError):
                self._nursery = None  # there will be an error of a worker's start that says why

    def descriptors(self) -> list[int]:
        """Return what becomes readable when there is something to :meth:`attend` to."""
        return [] if self._nursery is None or self._ready else [self._nursery.channel]

    def attend(self) -> bool:
        """Take what the nursery has said, without a wait; return whether workers can be started, by it or otherwise."""
        if self._nursery is not None and not self._ready:
            try:
                self._ready = self._nursery.wait_ready(0.0)
            except (ForkServerEnded, SpawnFailed):
                self.close()
        return self._ready or self._nursery is None

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedProcess | None:
        """Start a worker; see :class:`~onebox.pool.launch.fork_server.WorkerSpawner`."""
        if self._nursery is None or environment != self._environment:
            return None
        try:
            return self._nursery.spawn_worker(stderr, within_s=_BIRTH_S)
        except SpawnFailed:
            return None
        except ForkServerEnded:
            self.close()
            return None

    def close(self) -> None:
        """End it at once, and with it its workers. Idempotent."""
        if self._nursery is not None:
            self._nursery.close(grace_s=0.0)
            self._nursery = None
