"""The processes of a lease: kept apart from those of others by a user id and a cgroup, forked by a server, and ended
together.

A fork has its parent's address layout, and protection against attacks rests in part on the secrecy of that layout.
Therefore no process forks workers of two clients: each fork server starts and ends with its lease. A lease of a single
worker has one only where nothing else finds processes that the worker leaves, since it saves no time.

Workers start no process, as far as the filter of system calls reaches (:mod:`onebox.worker.sandbox.seccomp`). Whatever
was started all the same is found when the lease ends: by the cgroup, by the user, or as a descendant of the lease's
fork server, which adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from subprocess import SubprocessError
from typing import IO

from onebox.agent.admission import Share
from onebox.agent.cgroups import LeaseCgroup, LeaseCgroups
from onebox.errors import UsageError
from onebox.forking import ForkServerEnded, SpawnFailed
from onebox.pool.launch.fork_server import ForkedWorker, ForkServerProcess, worker_environment
from onebox.pool.launch.worker_user import LeaseUsers, RunningProcess, WorkerUser, running_process, running_processes

_SPAWN_S = 2.0
"""How long the agent, which has a single thread, waits for a fork; then workers are started from scratch."""


class LeaseForkServer:
    """Fork server for the workers of a lease; a :class:`~onebox.pool.launch.fork_server.WorkerSpawner`.

    Args:
        shares: Shares of the lease's workers. Only those with the most common number of threads are forked, because the
            number is part of the environment.
        account: User that workers run as; the agent's own user where ``None``.
        single: Whether a single worker is forked, too.
    """

    def __init__(self, shares: Sequence[Share], account: WorkerUser | None, *, single: bool) -> None:
        self._server: ForkServerProcess | None = None
        self._ready = False
        self._environment: dict[str, str] = {}
        threads, count = next(iter(Counter(share.threads for share in shares).most_common(1)), (1, 0))
        if count > (0 if single else 1):
            self._environment = worker_environment(threads, account)
            try:
                self._server = ForkServerProcess(self._environment, account)
            except (OSError, SubprocessError):
                self._server = None  # the start of a worker will raise an error with the cause

    @property
    def pid(self) -> int | None:
        """Its process id; ``None`` where there is none."""
        return None if self._server is None else self._server.pid

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


class LeaseProcesses:
    """The processes of one lease.

    Args:
        account: User that they run as, which no other process has; the agent's own user where ``None``.
        cgroup: Their cgroup; ``None`` where there are none.
    """

    def __init__(self, account: WorkerUser | None = None, cgroup: LeaseCgroup | None = None) -> None:
        self.account = account
        self.cgroup = cgroup

    @property
    def marked(self) -> bool:
        """True if they are found by a user or a cgroup of their own."""
        return self.account is not None or self.cgroup is not None

    def add(self, process: int) -> None:
        """Add a process that the agent has started, which has not read a message of a client yet.

        Raises:
            OSError: The system refuses.
        """
        if self.cgroup is not None:
            self.cgroup.add(process)

    def kill(self, fork_server: LeaseForkServer) -> list[int]:
        """Kill all of them, without waiting; the fork server only where the cgroup finds the others.

        Returns:
            Those that had not ended, without the fork server.
        """
        if self.cgroup is not None:
            self.cgroup.kill()
        left = self._others(fork_server.pid)
        for found in left:
            _kill(found)
        return [found.process for found in left]

    def end(self, fork_server: LeaseForkServer) -> bool:
        """Kill all of them, without waiting, and the fork server last; return whether they have ended."""
        if self.kill(fork_server):
            return False
        fork_server.close()
        return self.cgroup is None or self.cgroup.remove()

    def _others(self, fork_server: int | None) -> list[RunningProcess]:
        """Return those that run, without the fork server."""
        if self.cgroup is not None:  # which none of them leaves
            found = map(running_process, self.cgroup.processes())
            return [each for each in found if each is not None and each.process != fork_server]
        if fork_server is None and self.account is None:
            return []
        running = list(running_processes())
        family = {fork_server}
        while born := {each.process for each in running if each.parent in family} - family:
            family |= born
        user = None if self.account is None else self.account.user
        mine = (each for each in running if each.user == user or each.process in family)
        return [each for each in mine if each.process != fork_server]


class LeaseIsolation:
    """Users and cgroups for the leases of an agent.

    Args:
        users: Users of leases; the agent's own where ``None``.
        cgroups: Cgroups of leases; none where ``None``.
    """

    def __init__(self, users: LeaseUsers | None = None, cgroups: LeaseCgroups | None = None) -> None:
        self._users = users
        self._cgroups = cgroups

    @property
    def state(self) -> dict[str, str]:
        """Users and cgroups, for the journal."""
        return {
            "users": "the agent's" if self._users is None else f"one for each lease: {self._users.ids}",
            "cgroups": "off" if self._cgroups is None else self._cgroups.state,
        }

    def isolate(self, lease: int, shares: Sequence[Share]) -> LeaseProcesses:
        """Return a lease's user and cgroup, which no process has yet.

        Raises:
            UsageError: All users are taken.
            OSError: The system refuses to make a cgroup.
        """
        account = None
        if self._users is not None:
            account = self._users.take()
            if account is None:
                raise UsageError(f"all user ids of leases are taken: {self._users.ids} (onebox serve --user-ids)")
        try:
            return LeaseProcesses(account, None if self._cgroups is None else self._cgroups.make(lease, shares))
        except OSError:
            if self._users is not None and account is not None:
                self._users.give_back(account)
            raise

    def release(self, processes: LeaseProcesses) -> None:
        """Take back the user of processes that have ended."""
        if self._users is not None and processes.account is not None:
            self._users.give_back(processes.account)

    def close(self) -> None:
        """Remove all cgroups, and kill what is left in them; give up all users. Idempotent."""
        if self._cgroups is not None:
            self._cgroups.close()
        if self._users is not None:
            self._users.close()


def _kill(found: RunningProcess) -> None:
    """Kill a process, unless its number is by now another's."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(found.process)
        try:
            if running_process(found.process) == found:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


__all__ = ["LeaseForkServer", "LeaseIsolation", "LeaseProcesses"]
