"""The processes of a lease: kept apart from those of others by a user id and a cgroup, forked by a server, and ended
together.

No process forks workers of two clients: each lease has a fork server of its own, or that of an earlier lease of the
same client, which is kept for a while (:class:`KeptForkServers`), as what a lease has left in one is never another
client's. A new fork server is forked by a zygote, since the import of PyTorch is nearly all of a start
(:mod:`onebox.pool.launch.zygotes`); its workers then have the address layout of those of all clients, on whose secrecy
protection against attacks rests in part. An agent can do without (:class:`LeaseIsolation`).

Workers start no process, as far as the filter of system calls reaches (:mod:`onebox.worker.sandbox.seccomp`). Whatever
was started all the same is found when the lease ends: by the cgroup, by the user, or as a descendant of the lease's
fork server, which adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from subprocess import SubprocessError
from typing import IO

import psutil

from onebox.agent.admission import Share
from onebox.agent.cgroups import LeaseCgroup, LeaseCgroups, most_processes
from onebox.errors import UsageError
from onebox.forking import ForkServerEnded, SpawnFailed
from onebox.pool.launch.fork_server import ForkedWorker, ForkServerProcess, ZygoteProcess, worker_environment
from onebox.pool.launch.worker_user import LeaseUsers, RunningProcess, WorkerUser, running_process, running_processes
from onebox.pool.launch.zygotes import Zygotes

_SPAWN_S = 2.0
"""How long the agent, which has a single thread, waits for a fork; then workers are started from scratch."""

KEPT_S = 50.0
"""How long the fork server of an ended lease is kept at most: shorter than the time without a fork after which it ends
by itself."""

MOST_KEPT = 4
"""The most fork servers that an agent keeps; each takes some 160 MB of memory of its own without a zygote, and 3 MB as
the fork of one."""

SPARE_BYTES = 2 << 30
"""Available memory of this machine below which none is kept, and no zygote either."""

_CHECK_S = 1.0


class LeaseForkServer:
    """Fork server for the workers of a lease; a :class:`~onebox.pool.launch.fork_server.WorkerSpawner`.

    Args:
        shares: Shares of the lease's workers. Only those with the most common number of threads are forked, because the
            number is part of the environment.
        account: User that workers run as; the agent's own user where ``None``.
        zygotes: What forks it, if there is one for its environment; it imports PyTorch itself where ``None``.
        now_s: The time.
    """

    def __init__(
        self, shares: Sequence[Share], account: WorkerUser | None, zygotes: Zygotes | None = None, now_s: float = 0.0
    ) -> None:
        self.account = account
        self._server: ForkServerProcess | None = None
        self._ready = False
        self._doubtful = False
        self._environment = _environment(shares, account) if shares else {}
        self._zygotes = zygotes
        self._zygote = zygotes.find(self._environment, now_s) if zygotes is not None and shares else None
        self._origin: ZygoteProcess | None = None  # that has forked the server
        if self._zygote is not None:
            self._fork()
        elif shares:
            self._start()

    @property
    def pid(self) -> int | None:
        """Its process id; ``None`` where there is none, or none any more."""
        return None if self._server is None or self._server.ended else self._server.pid

    @property
    def process_descriptor(self) -> int:
        """A descriptor of the process; -1 where there is none, as of a child, which is not awaited before its end."""
        return -1 if self._server is None else self._server.descriptor

    @property
    def idle(self) -> bool:
        """True if it can fork workers, has always done so, and has sent nothing unexpected, such as its end."""
        if self._server is None or not self._ready or self._doubtful or self._server.ended:
            return False
        poll = select.poll()
        poll.register(self._server.channel, select.POLLIN)
        return not poll.poll(0)

    @property
    def channel(self) -> int:
        """The descriptor that is readable when the fork server has ended; -1 where there is none."""
        return -1 if self._server is None else self._server.channel

    def fits(self, shares: Sequence[Share]) -> bool:
        """Return whether it has the environment that one for these shares would have."""
        return self._environment == _environment(shares, self.account)

    def descriptors(self) -> list[int]:
        """Return the descriptors that are readable when :meth:`attend` has work."""
        awaited = self._zygote or (None if self._ready else self._server)
        return [] if awaited is None or awaited.channel < 0 else [awaited.channel]

    def attend(self) -> bool:
        """Read the server's message without blocking, or its zygote's; return whether workers can be started, by it or
        from scratch."""
        if self._zygote is not None:
            self._fork()
        if self._server is not None and not self._ready:
            try:
                self._ready = self._server.wait_ready(0.0)
            except (ForkServerEnded, SpawnFailed) as error:
                self.close()
                if self._origin is not None and self._zygotes is not None:
                    self._zygotes.drop(self._origin, f"a fork server that it has forked fails: {error}")
                    self._origin = None
                    self._start()
        return self._zygote is None and (self._ready or self._server is None)

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedWorker | None:
        """Start a worker; see :class:`~onebox.pool.launch.fork_server.WorkerSpawner`."""
        if self._server is None or self._doubtful or environment != self._environment:
            return None
        try:
            return self._server.spawn_worker(stderr, within_s=_SPAWN_S)
        except SpawnFailed:
            self._doubtful = True  # it may fork later
            return None
        except ForkServerEnded:
            self.close()
            return None

    def retire_zygote(self, why: str) -> None:
        """Have no other fork server forked by the zygote that has forked this one, if one has."""
        if self._origin is not None and self._zygotes is not None:
            self._zygotes.retire(self._origin, why)

    def _fork(self) -> None:
        """Let the zygote fork the server, unless it still imports; start the server anew if it does not fork."""
        zygote = self._zygote
        assert zygote is not None and self._zygotes is not None
        try:
            if not zygote.wait_ready(0.0):
                return
            self._server = ForkServerProcess(self._environment, self.account, zygote)
            self._origin = zygote
        except (ForkServerEnded, SpawnFailed) as error:
            self._zygotes.drop(zygote, str(error))
        except OSError:
            pass  # as without a free descriptor
        self._zygote = None
        if self._server is None:
            self._start()

    def _start(self) -> None:
        try:
            self._server = ForkServerProcess(self._environment, self.account)
        except (OSError, SubprocessError):
            self._server = None  # the start of a worker will raise an error with the cause

    def close(self) -> None:
        """Kill it, and with it its workers. Idempotent."""
        self._zygote = None
        server, self._server = self._server, None
        if server is not None:
            server.close(grace_s=0.0)


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
        """Add a process that the agent has started, which has not read a message of a client yet; see
        :meth:`LeaseCgroup.add`.

        Raises:
            ProcessLookupError: It has ended.
            OSError: The system refuses.
        """
        if self.cgroup is not None:
            self.cgroup.add(process, descriptor)

    def kill(self, fork_server: LeaseForkServer) -> list[int]:
        """Kill all of them, without waiting; the fork server only where the cgroup finds the others.

        Returns:
            Those that had not ended, without the fork server.
        """
        if self.cgroup is not None:
            self.cgroup.kill()
        left = self.others(fork_server.pid)
        for found in left:
            _kill(found)
        return [found.process for found in left]

    def end(self, fork_server: LeaseForkServer) -> bool:
        """Kill all of them, without waiting, and the fork server last; return whether they have ended."""
        if self.kill(fork_server):
            return False
        fork_server.close()
        return self.remove()

    def remove(self) -> bool:
        """Remove the cgroup; return whether it is gone, as it is once its processes have ended."""
        return self.cgroup is None or self.cgroup.remove()

    def others(self, fork_server: int | None) -> list[RunningProcess]:
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
        import_per_client: Whether PyTorch is imported anew for each client, so that no two have the same address
            layout, rather than once by a zygote.
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
            "imports": "one for each client" if self._import_per_client else "one for all clients",
        }

    def zygotes(self) -> Zygotes | None:
        """Return what forks the fork servers of leases; ``None`` where each client has an import of its own. The caller
        closes it."""
        if self._import_per_client:
            return None
        return Zygotes(users=self._users is not None, enough_memory=lambda: _available_bytes() >= SPARE_BYTES)

    def isolate(self, lease: int, shares: Sequence[Share], account: WorkerUser | None = None) -> LeaseProcesses:
        """Return a lease's user and cgroup, which no process has yet.

        Args:
            lease: The lease.
            shares: The shares of its workers.
            account: The user of a fork server that was kept, which stays with it; another one where ``None``.

        Raises:
            UsageError: All users are taken.
            OSError: The system refuses to make a cgroup.
        """
        kept = account
        if self._users is not None and kept is None:
            account = self._users.take()
            if account is None:
                raise UsageError(f"all user ids of leases are taken: {self._users.ids} (onebox serve --user-ids)")
        try:
            cgroup = None if self._cgroups is None else self._cgroups.make(lease, shares)
            return LeaseProcesses(account, cgroup, 0 if account is None else most_processes(shares))
        except OSError:
            if kept is None:
                self.release(account)
            raise

    def release(self, account: WorkerUser | None) -> None:
        """Take back a user, which no other lease gets while a process has it."""
        if self._users is not None and account is not None:
            self._users.give_back(account)

    def set_aside(self, fork_server: LeaseForkServer) -> bool:
        """Move a fork server out of its lease's cgroup, which will end all its processes; return whether it was
        moved, or need not be."""
        if self._cgroups is None or fork_server.pid is None:
            return fork_server.pid is not None
        try:
            self._cgroups.set_aside(fork_server.pid, fork_server.process_descriptor)
        except OSError:
            return False
        return True

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


@dataclass(frozen=True)
class _Kept:
    client: str
    fork_server: LeaseForkServer
    process: int
    until_s: float


class KeptForkServers:
    """Fork servers of ended leases, each for the next lease of the same client: at most one for each client, at most
    :data:`MOST_KEPT`, each for :data:`KEPT_S` at most. The user that one runs as stays reserved for it.

    Args:
        isolation: Users of leases.
        accepts: Returns whether a client, named by its key, may still take leases.
        available_bytes: Returns the memory of this machine that is available.
    """

    def __init__(
        self,
        isolation: LeaseIsolation,
        accepts: Callable[[str], bool] = lambda client: True,
        available_bytes: Callable[[], int] = _available_bytes,
    ) -> None:
        self._isolation = isolation
        self._accepts = accepts
        self._available_bytes = available_bytes
        self._kept: list[_Kept] = []  # the one that was kept first comes first
        self._ended: list[tuple[str, int, str]] = []
        self._check_s = 0.0

    def wants(self, client: str, fork_server: LeaseForkServer) -> bool:
        """Return whether a client's fork server would be kept now."""
        return fork_server.idle and self._accepts(client) and self._available_bytes() >= SPARE_BYTES

    def keep(self, client: str, fork_server: LeaseForkServer, now_s: float) -> None:
        """Keep the fork server of a lease none of whose other processes is left.

        An earlier one of the client ends, and the oldest of all if there are too many.

        Args:
            client: The client's key, which the agent has verified.
            fork_server: The fork server, now owned by this object.
            now_s: The time.
        """
        for each in [each for each in self._kept if each.client == client]:
            self._end(each, "its client has another")
        self._kept.append(_Kept(client, fork_server, fork_server.pid or 0, now_s + KEPT_S))
        while len(self._kept) > MOST_KEPT:
            self.give_way(f"{MOST_KEPT} others are kept")

    def take(self, client: str, shares: Sequence[Share], now_s: float) -> LeaseForkServer | None:
        """Return the fork server kept for a client, which the caller then owns; ``None`` if it has none that fits.

        One with which other processes of its user, or descendants, have appeared ends instead.
        """
        for each in self._kept:
            fork_server = each.fork_server
            if each.client != client or not fork_server.fits(shares):
                continue
            if now_s < each.until_s and fork_server.idle and _is_alone(fork_server):
                self._kept.remove(each)
                return fork_server
            self._end(each, "it had ended, or was no longer alone")
            return None
        return None

    def give_way(self, why: str) -> bool:
        """End the one that was kept first; return whether there was one."""
        if not self._kept:
            return False
        self._end(self._kept[0], why)
        return True

    def news(self) -> list[tuple[str, int, str]]:
        """Return, once, those that have ended: the client, the process and the reason of each."""
        ended, self._ended = self._ended, []
        return ended

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptors that are readable when :meth:`attend` has work."""
        for each in self._kept:
            yield each.fork_server.channel

    def attend(self, ready: Set[int], now_s: float) -> None:
        """End those that are due, that do anything by themselves, whose clients are no longer accepted, or whose memory
        is needed."""
        for each in list(self._kept):
            if now_s >= each.until_s:
                self._end(each, f"kept for {KEPT_S:.0f} s")
            elif each.fork_server.channel in ready:
                self._end(each, "it has ended")
        if self._kept and now_s >= self._check_s:
            self._check_s = now_s + _CHECK_S
            short = self._available_bytes() < SPARE_BYTES
            for each in list(self._kept):
                if short or not self._accepts(each.client):
                    self._end(each, "memory is short" if short else "its client is no longer accepted")

    def close(self) -> None:
        """End all. Idempotent."""
        while self.give_way("the agent ends"):
            pass

    def end(self, fork_server: LeaseForkServer) -> None:
        """End a fork server without workers, and give back its user."""
        with contextlib.suppress(OSError):
            LeaseProcesses(fork_server.account).kill(fork_server)
        with contextlib.suppress(OSError):  # its end cannot be waited for: it loses its agent and ends by itself
            fork_server.close()
        self._isolation.release(fork_server.account)

    def _end(self, kept: _Kept, why: str) -> None:
        self._kept.remove(kept)
        self._ended.append((kept.client, kept.process, why))
        self.end(kept.fork_server)


def _is_alone(fork_server: LeaseForkServer) -> bool:
    """Return whether no other process has a fork server's user or descends from it; not where that cannot be read."""
    try:
        return not LeaseProcesses(fork_server.account).others(fork_server.pid)
    except OSError:
        return False


def is_confined(process: int) -> bool:
    """Return whether a process has given up new privileges and has a filter of system calls beside those of this one,
    without which it could change others of its user."""
    theirs, own = _status(process), _status(os.getpid())
    count = "Seccomp_filters"  # Linux from 5.9
    if count not in theirs or count not in own:
        return False
    return (theirs.get("NoNewPrivs"), theirs.get("Seccomp")) == ("1", "2") and int(theirs[count]) > int(own[count])


def _status(process: int) -> dict[str, str]:
    """Return the fields of a process's status; none where it cannot be read."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _environment(shares: Sequence[Share], account: WorkerUser | None) -> dict[str, str]:
    """Return the environment of the workers with the most common number of threads."""
    ((threads, _),) = Counter(share.threads for share in shares).most_common(1) or ((1, 0),)
    return worker_environment(threads, account)


def _kill(found: RunningProcess) -> None:
    """Kill a process, unless its number is by now another's."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(found.process)
        try:
            if running_process(found.process) == found:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


__all__ = [
    "KEPT_S",
    "MOST_KEPT",
    "SPARE_BYTES",
    "KeptForkServers",
    "LeaseForkServer",
    "LeaseIsolation",
    "LeaseProcesses",
    "is_confined",
]
