"""The processes of a lease: kept apart from those of others by a user id and a cgroup, and ended together.

Workers start no process, as far as the filter of system calls reaches (:mod:`onebox.worker.sandbox.seccomp`). Whatever
was started all the same is found when the lease ends: by the cgroup or the user; where there are neither, by the zygote
that has forked the worker, which adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

import psutil

from onebox.agent.admission import Share
from onebox.agent.cgroups import LeaseCgroup, LeaseCgroups, most_processes
from onebox.agent.lease_zygotes import LeaseZygotes
from onebox.errors import UsageError
from onebox.pool.launch.worker_user import LeaseUsers, RunningProcess, WorkerUser, running_process, running_processes

SPARE_BYTES = 2 << 30
"""Available memory of this machine below which there is no zygote."""


class LeaseProcesses:
    """The processes of one lease.

    Args:
        account: User that they run as, which no other process has; the agent's own user where ``None``.
        cgroup: Their cgroup; ``None`` where there are none.
        most: Most processes and threads of that user; 0 for no limit.
    """

    def __init__(self, account: WorkerUser | None = None, cgroup: LeaseCgroup | None = None, most: int = 0) -> None:
        self.account = account
        self.cgroup = cgroup
        self.most = most

    def add(self, process: int, descriptor: int) -> None:
        """Add a process that the agent has started, which has not read its configuration yet; see
        :meth:`LeaseCgroup.add`.

        Raises:
            ProcessLookupError: It has ended.
            OSError: The system refuses.
        """
        if self.cgroup is not None:
            self.cgroup.add(process, descriptor)

    def kill(self) -> list[int]:
        """Kill all of them, as far as the cgroup or the user tells them, without waiting; return those that had not
        ended."""
        if self.cgroup is not None:
            self.cgroup.kill()
        left = self._running()
        for found in left:
            _kill(found)
        return [found.process for found in left]

    def end(self) -> bool:
        """Kill all of them, without waiting; return whether they have ended."""
        return not self.kill() and self.remove()

    def remove(self) -> bool:
        """Remove the cgroup; return whether it is gone, as it is once its processes have ended."""
        return self.cgroup is None or self.cgroup.remove()

    def _running(self) -> list[RunningProcess]:
        if self.cgroup is not None:  # which none of them leaves
            return [each for each in map(running_process, self.cgroup.processes()) if each is not None]
        if self.account is None:
            return []
        return [each for each in running_processes() if each.user == self.account.user]


class LeaseIsolation:
    """Users and cgroups for the leases of an agent.

    Args:
        users: Users of leases; the agent's own where ``None``.
        cgroups: Cgroups of leases; none where ``None``.
        import_per_client: Whether each worker imports PyTorch anew, so that no two clients have the same address
            layout, rather than a zygote once.
    """

    def __init__(
        self,
        users: LeaseUsers | None = None,
        cgroups: LeaseCgroups | None = None,
        *,
        import_per_client: bool = False,
    ) -> None:
        self._users = users
        self._cgroups = cgroups
        self._import_per_client = import_per_client

    @property
    def state(self) -> dict[str, str]:
        """Users, cgroups and imports, for the journal."""
        return {
            "users": "the agent's" if self._users is None else f"one for each lease: {self._users.ids}",
            "cgroups": "off" if self._cgroups is None else self._cgroups.state,
            "imports": "one for each worker" if self._import_per_client else "one for all clients",
        }

    def zygotes(self) -> LeaseZygotes | None:
        """Return what forks the workers of leases; ``None`` where each worker imports PyTorch. The caller closes it."""
        if self._import_per_client:
            return None
        return LeaseZygotes(users=self._users is not None, enough_memory=lambda: _available_bytes() >= SPARE_BYTES)

    def isolate(self, lease: int, shares: Sequence[Share]) -> LeaseProcesses:
        """Return a lease's user and cgroup, which no process has yet.

        Args:
            lease: The lease.
            shares: The shares of its workers.

        Raises:
            UsageError: All users are taken.
            OSError: The system refuses to make a cgroup.
        """
        account: WorkerUser | None = None
        if self._users is not None:
            account = self._users.take()
            if account is None:
                raise UsageError(f"all user ids of leases are taken: {self._users.ids} (onebox serve --user-ids)")
        try:
            cgroup = None if self._cgroups is None else self._cgroups.make(lease, shares)
            return LeaseProcesses(account, cgroup, 0 if account is None else most_processes(shares))
        except OSError:
            self.release(account)
            raise

    def release(self, account: WorkerUser | None) -> None:
        """Take a user back, which no lease gets before its processes have ended."""
        if self._users is not None and account is not None:
            self._users.give_back(account)

    def close(self) -> None:
        """Remove all cgroups, and kill what is left in them; give up all users. Idempotent."""
        if self._cgroups is not None:
            self._cgroups.close()
        if self._users is not None:
            self._users.close()


def _available_bytes() -> int:
    """Return the memory of this machine that is available; 0 where that cannot be read."""
    try:
        return int(psutil.virtual_memory().available)
    except OSError:
        return 0


def _kill(found: RunningProcess) -> None:
    """Kill a process, unless its number is by now another's."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(found.process)
        try:
            if running_process(found.process) == found:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


__all__ = ["SPARE_BYTES", "LeaseIsolation", "LeaseProcesses"]
