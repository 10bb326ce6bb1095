"""The processes of leases: forked by zygotes, kept apart by a user id and a cgroup for each lease, and ended together.

Workers start no process, as far as the filter of system calls reaches (:mod:`onebox.worker.sandbox.seccomp`). Whatever
was started all the same is found when the lease ends: by the cgroup or the user; where there are neither, by the zygote
that has forked the worker, which adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import IO

import psutil

from onebox.agent.admission import Share
from onebox.agent.cgroups import LeaseCgroup, LeaseCgroups, most_processes
from onebox.errors import UsageError
from onebox.forking import ForkServerEnded, SpawnFailed
from onebox.pool.launch.worker_user import LeaseUsers, RunningProcess, WorkerUser, running_process, running_processes
from onebox.pool.launch.zygotes import ForkedWorker, ZygoteProcess

SPARE_BYTES = 2 << 30
"""Available memory of this machine below which there is no zygote."""

MOST_ZYGOTES = 2
"""The most zygotes of an agent, which differ by the number of threads; each takes some 160 MB of memory of its own."""

IMPORT_S = 30.0
"""How long the imports of a zygote may take; then leases that wait for it import PyTorch themselves."""

SPAWN_S = 2.0
"""Bound of a fork, of a hundredth of a second: the agent, which has a single thread, waits for it."""

USED_S = 60.0
"""Time after the last use of a zygote in which none of another environment takes its place: clients choose theirs,
and none of them can have those of others import anew."""

RETRY_S = 60.0
"""Time without a zygote after one that could not be started, did not become ready or did not fork."""


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


@dataclass
class _Zygote:
    zygote: ZygoteProcess
    environment: dict[str, str]
    until_s: float
    used_s: float
    failure: str = ""


class LeaseZygotes:
    """The zygotes of an agent, each started when the first lease with its environment begins, and kept; a
    :class:`~onebox.pool.launch.zygotes.WorkerSpawner`.

    A fork has its parent's address layout, and so have the workers of all clients that one zygote has forked. It costs
    a fork instead of the import of PyTorch, and shares nearly all of its memory.

    Args:
        users: Whether each lease has a user of its own.
        enough_memory: Returns whether this machine has memory for a zygote.
    """

    def __init__(self, *, users: bool, enough_memory: Callable[[], bool]) -> None:
        self._users = users
        self._enough_memory = enough_memory
        self._found: list[_Zygote] = []  # the one that was used last comes last
        self._retired: list[ZygoteProcess] = []  # those that end with the last of their workers
        self._ended: list[tuple[int, str]] = []
        self._retry_s = 0.0

    def prepare(self, environment: Mapping[str, str], now_s: float) -> bool:
        """Start the zygote of an environment, unless there is one or cannot be one now; return whether workers can be
        started, by it or from scratch: ``False`` while it imports.

        Args:
            environment: The environment.
            now_s: The time.
        """
        found = next((each for each in self._found if each.environment == environment), None)
        if found is None:
            found = self._start(environment, now_s)
            if found is None:
                return True
        else:
            self._found.remove(found)
        self._found.append(found)
        found.used_s = now_s
        return found.zygote.ready or bool(found.failure)

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedWorker | None:
        """Start a worker; see :class:`~onebox.pool.launch.zygotes.WorkerSpawner`."""
        for found in self._found:
            if found.environment == environment and found.zygote.ready and not found.failure:
                try:
                    return found.zygote.fork_worker(stderr, account, within_s=SPAWN_S)
                except ForkServerEnded:
                    return None  # which the next call of attend() finds
                except SpawnFailed as error:
                    found.failure = str(error)
                except OSError:
                    pass  # as without a free descriptor
        return None

    def news(self) -> list[tuple[int, str]]:
        """Return, once, those that have ended before :meth:`close`: the process, 0 for one that could not be started,
        and the reason of each."""
        ended, self._ended = self._ended, []
        return ended

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptors that are readable when :meth:`attend` has work."""
        for found in self._found:
            yield found.zygote.channel

    def attend(self, ready: Set[int], now_s: float) -> None:
        """End those that do not become ready in time, or do not fork, or send anything by themselves.

        Args:
            ready: The descriptors that are readable.
            now_s: The time.
        """
        for zygote in [each for each in self._retired if each.ended]:
            self._retired.remove(zygote)
            zygote.close()
        for found in list(self._found):
            lost = found.zygote.ready and found.zygote.channel in ready
            if not found.zygote.ready and not found.failure:
                self._attend_imports(found, now_s)
            if found.failure:
                self._retry_s = now_s + RETRY_S
            if found.failure or lost:
                self._end(found, found.failure or f"it has ended{found.zygote.last_words()}")
                found.zygote.close()

    def attend_memory(self) -> None:
        """End all if this machine has too little memory."""
        if self._found and not self._enough_memory():
            for found in list(self._found):
                self._retire(found, "memory is short")

    def close(self) -> None:
        """End all. Idempotent."""
        for zygote in [*(found.zygote for found in self._found), *self._retired]:
            zygote.close()
        self._found, self._retired = [], []

    def _start(self, environment: Mapping[str, str], now_s: float) -> _Zygote | None:
        if now_s < self._retry_s or not self._enough_memory():
            return None
        unused = [found for found in self._found if found.zygote.ready and now_s >= found.used_s + USED_S]
        if len(self._found) >= MOST_ZYGOTES and not unused:
            return None
        try:
            zygote = ZygoteProcess(environment, users=self._users, stays=True)
        except (OSError, SubprocessError) as error:
            self._retry_s = now_s + RETRY_S
            self._ended.append((0, f"it could not be started: {error}"))
            return None
        if len(self._found) >= MOST_ZYGOTES:
            self._retire(unused[0], "leases have other environments")
        return _Zygote(zygote, dict(environment), now_s + IMPORT_S, now_s)

    def _attend_imports(self, found: _Zygote, now_s: float) -> None:
        try:
            if not found.zygote.wait_ready(0.0) and now_s >= found.until_s:
                found.failure = f"it is not ready after {IMPORT_S:.0f} s"
        except (ForkServerEnded, SpawnFailed) as error:
            found.failure = str(error)

    def _retire(self, found: _Zygote, why: str) -> None:
        """Have a zygote fork no more; it tells how its workers end, and ends with the last of them."""
        self._end(found, why)
        found.zygote.stop()
        self._retired.append(found.zygote)

    def _end(self, found: _Zygote, why: str) -> None:
        self._found.remove(found)
        self._ended.append((found.zygote.pid, why))


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
