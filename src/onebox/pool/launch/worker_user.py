"""The users that workers run as where the launching process is root: one for each lease, without files or rights."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onebox.errors import UsageError

_LOCKS = Path("/run/onebox")
"""Folder of the file in which an agent locks a byte for each id that it uses, so that no other one takes it."""

_STATUS_BYTES = 1024  # what is read of it is at its beginning
_PROBE_S = 30.0
_PROBE = "import importlib.util as util, sys; sys.exit(not all(map(util.find_spec, ('onebox', 'torch', 'zmq'))))"


@dataclass(frozen=True)
class WorkerUser:
    """A user of this machine, who need not have an entry in its list of users.

    Args:
        user: User id.
        group: Group id.
        groups: Ids of all its groups, such as those that may use GPUs.
        home: Home folder.
    """

    user: int
    group: int
    groups: tuple[int, ...] = ()
    home: str = "/nonexistent"

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``subprocess.Popen`` that drop all other rights before the program runs."""
        return {"user": self.user, "group": self.group, "extra_groups": self.groups, "cwd": "/"}


class RunningProcess(NamedTuple):
    """A process of this machine that has not ended: its id, that of its parent, and its effective user."""

    process: int
    parent: int
    user: int


def running_process(process: int) -> RunningProcess | None:
    """Return a process; ``None`` if it has ended, or the system does not show it.

    Its user is not that of its folder in ``/proc``, which is root's where it has made itself undumpable.

    Raises:
        OSError: It cannot be looked at now, as without a free descriptor.
    """
    try:
        descriptor = os.open(f"/proc/{process}/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            lines = os.read(descriptor, _STATUS_BYTES).splitlines()
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    status = dict(line.split(b":\t", 1) for line in lines if line.startswith((b"State:", b"PPid:", b"Uid:")))
    if len(status) < 3 or status[b"State"][:1] in b"ZX":
        return None
    return RunningProcess(process, int(status[b"PPid"]), int(status[b"Uid"].split()[1]))


def running_processes() -> Iterator[RunningProcess]:
    """Yield the processes of this machine, as far as the system shows them.

    Raises:
        OSError: One cannot be looked at now, as without a free descriptor.
    """
    for name in os.listdir("/proc"):
        found = running_process(int(name)) if name.isdecimal() else None
        if found is not None:
            yield found


class LeaseUsers:
    """Users of an agent's leases: each lease has one of its own, so that its workers can do nothing to those of others.

    Args:
        ids: Their user ids, which are group ids, too.
        groups: Further groups of each, such as those that may use GPUs.
        home: Home folder of each.

    Raises:
        UsageError: The file of locks cannot be opened.
    """

    def __init__(self, ids: range, groups: tuple[int, ...] = (), home: str = "/nonexistent") -> None:
        self.ids = f"{ids.start}-{ids.stop - 1}"
        self._users = {number: WorkerUser(number, number, groups, home) for number in ids}
        self._waiting = list(ids)  # the one that was given back last is taken last
        try:
            _LOCKS.mkdir(mode=0o700, exist_ok=True)
            self._locks = os.open(_LOCKS / "user-ids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(f"{_LOCKS}/user-ids, where agents lock users of leases: {error.strerror}") from None

    def take(self) -> WorkerUser | None:
        """Return a user that neither another lease nor another process has; ``None`` where there is none."""
        taken = {process.user for process in running_processes()}
        for number in self._waiting:
            if number not in taken and self._lock(number, fcntl.F_WRLCK):
                self._waiting.remove(number)
                return self._users[number]
        return None

    def give_back(self, account: WorkerUser) -> None:
        """Give a user back whose processes have ended. Idempotent."""
        if account.user not in self._waiting:
            self._waiting.append(account.user)
        self._lock(account.user, fcntl.F_UNLCK)

    def close(self) -> None:
        """Release all locks. Idempotent."""
        if self._locks >= 0:
            os.close(self._locks)
            self._locks = -1

    def _lock(self, number: int, kind: int) -> bool:
        """Lock or unlock the byte of an id; return whether no other agent has it."""
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)  # struct flock
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, lock)  # of this object, rather than of this process
        except BlockingIOError:
            return False
        return True


def find_user(name: str) -> WorkerUser:
    """Look up a user of this machine.

    Raises:
        UsageError: There is no such user.
    """
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise UsageError(
            f"this machine has no user {name!r}; make one (useradd --system {name}), or name another"
        ) from None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return WorkerUser(entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def lease_users(name: str | None, ids: range, *, allow_root: bool) -> LeaseUsers | None:
    """Return the users that the workers of an agent's leases are to run as; ``None`` for the agent's own user.

    Args:
        name: User whose groups and home folder they have, such as groups that may use GPUs; ``None`` for no groups.
        ids: Their ids.
        allow_root: Whether workers may run as root; where no user is named, they then do.

    Raises:
        UsageError: The user is root or cannot be had, an id is another user's, or the users cannot run a worker.
    """
    account = None if name is None else find_user(name)
    if os.geteuid() != 0:
        if account is None or account.user == os.geteuid():
            return None
        raise UsageError(f"--user {name}: only root can start workers as another user; start onebox serve as {name}")
    if account is None and allow_root:
        return None
    if account is not None and (account.user == 0 or 0 in (account.group, *account.groups)):
        raise UsageError(f"--user {name}: that is root, or of root's group; name another user")
    check_user_ids(ids)
    groups, home = ((), "/nonexistent") if account is None else (account.groups, account.home)
    _probe(WorkerUser(ids.start, ids.start, groups, home))
    return LeaseUsers(ids, groups, home)


def check_user_ids(ids: range, folder: Path = Path("/etc")) -> None:
    """Require that ids are those of no user or group, nor of users of containers (``subuid(5)``, ``subgid(5)``).

    Args:
        ids: The ids.
        folder: Where the lists of containers' ids are.

    Raises:
        UsageError: One is.
    """
    remedy = "name others with --user-ids FIRST-LAST"
    for number in ids:
        with contextlib.suppress(KeyError):
            raise UsageError(f"the user id {number} is that of {pwd.getpwuid(number).pw_name}; {remedy}")
        with contextlib.suppress(KeyError):
            raise UsageError(f"the group id {number} is that of {grp.getgrgid(number).gr_name}; {remedy}")
    for path in (folder / "subuid", folder / "subgid"):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue  # this machine has none
        for line in lines:
            owner, _, numbers = line.partition(":")
            start, _, count = numbers.partition(":")
            if start.isdecimal() and count.isdecimal():
                begin, end = int(start), int(start) + int(count)
                if begin < ids.stop and ids.start < end:
                    raise UsageError(f"{path} gives the ids {begin}-{end - 1} to {owner}; {remedy}")


def _probe(account: WorkerUser) -> None:
    """Check that a user can start a worker's Python.

    Raises:
        UsageError: It cannot.
    """
    source = str(Path(__file__).resolve().parents[3])
    environment = {"PYTHONPATH": source, "HOME": account.home}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
            **account.options(),
        )
        works = done.returncode == 0
    except (OSError, subprocess.SubprocessError):
        works = False
    if not works:
        raise UsageError(
            f"a user of its own, such as {account.user} (--user-ids), cannot run {sys.executable} with onebox and "
            "torch, as workers do where root runs the agent: install them where everybody can read them, such as "
            "/opt, and not in a home; or start onebox serve as an ordinary user; in a container that has no other "
            "user there is --allow-root"
        )


__all__ = [
    "LeaseUsers",
    "RunningProcess",
    "WorkerUser",
    "check_user_ids",
    "find_user",
    "lease_users",
    "running_process",
    "running_processes",
]
