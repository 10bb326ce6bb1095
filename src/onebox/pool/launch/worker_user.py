"""The users that workers run as where the launching process is root: one for each lease, without files or rights."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onebox.errors import UsageError

_LOCKS = Path("/run/onebox")
"""Folder of the file in which an agent locks a byte for each id that it uses, so that no other one takes it."""

_NO_HOME = "/nonexistent"

_STATUS_BYTES = 1024  # what is read of it is at its beginning
_PROBE_S = 30.0
_PROBE = "import importlib.util as util, sys; sys.exit(not all(map(util.find_spec, ('onebox', 'torch', 'zmq'))))"

_SUBORDINATE = re.compile(r"^([^:\n]*):(\d+):(\d+)", re.MULTILINE | re.ASCII)


@dataclass(frozen=True)
class WorkerUser:
    """A user of this machine, who need not be in its list of users: its id, those of its group and of all its
    groups, and its home folder."""

    user: int
    group: int
    groups: tuple[int, ...] = ()
    home: str = _NO_HOME

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``subprocess.Popen`` that drop all other rights before the program runs."""
        return {"user": self.user, "group": self.group, "extra_groups": self.groups, "cwd": "/"}


class RunningProcess(NamedTuple):
    """A process of this machine that has not ended: its id, that of its parent, and its effective user."""

    process: int
    parent: int
    user: int


def running_process(process: int) -> RunningProcess | None:
    """Return a process; ``None`` if it has ended, or the system does not show it. An ``OSError`` where it cannot be
    looked at now, as without a free descriptor."""
    try:
        with open(f"/proc/{process}/status", "rb", buffering=0) as status_file:
            lines = status_file.read(_STATUS_BYTES).splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # its folder's owner is not its user, but root where it has made itself undumpable
    status = dict(line.split(b":\t", 1) for line in lines if line.startswith((b"State:", b"PPid:", b"Uid:")))
    if len(status) < 3 or status[b"State"][:1] in b"ZX":
        return None
    return RunningProcess(process, int(status[b"PPid"]), int(status[b"Uid"].split()[1]))


def running_processes() -> Iterator[RunningProcess]:
    """Yield the processes of this machine, as far as the system shows them. An ``OSError`` as for one."""
    for name in os.listdir("/proc"):
        found = running_process(int(name)) if name.isdecimal() else None
        if found is not None:
            yield found


class LeaseUsers:
    """Users of an agent's leases, which differ in user and group id: each lease has one of its own, so that its workers
    can do nothing to those of others. A ``UsageError`` where the file of locks cannot be opened."""

    def __init__(self, ids: range, groups: tuple[int, ...] = (), home: str = _NO_HOME) -> None:
        self.ids = f"{ids.start}-{ids.stop - 1}"
        self._groups, self._home = groups, home
        self._free = list(ids)  # the one that was given back last is taken last
        try:
            _LOCKS.mkdir(mode=0o700, exist_ok=True)
            self._locks = os.open(_LOCKS / "user-ids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(f"{_LOCKS}/user-ids, where agents lock users of leases: {error.strerror}") from None

    def take(self) -> WorkerUser | None:
        """Return a user that neither another lease nor any process has; ``None`` where there is none."""
        taken = {process.user for process in running_processes()}
        for number in self._free:
            if number not in taken and self._lock(number, fcntl.F_WRLCK):
                self._free.remove(number)
                return WorkerUser(number, number, self._groups, self._home)
        return None

    def give_back(self, account: WorkerUser) -> None:
        """Give a user back; while a process has it, nobody takes it. Idempotent."""
        if account.user not in self._free:
            self._free.append(account.user)
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


def lease_users(name: str | None, ids: range, *, allow_root: bool) -> LeaseUsers | None:
    """Return the users that the workers of an agent's leases are to run as; ``None`` for the agent's own user.

    Args:
        name: User whose groups, such as those that may use GPUs, and home folder they have; ``None`` for none.
        ids: Their ids.
        allow_root: Whether workers may run as root; where no user is named, they then do.

    Raises:
        UsageError: The user is root or cannot be had, an id is another user's, or the users cannot run a worker.
    """
    groups: tuple[int, ...] = ()
    home = _NO_HOME
    if name is not None:
        try:
            entry = pwd.getpwnam(name)
        except (KeyError, ValueError):
            raise UsageError(
                f"this machine has no user {name!r}; make one (useradd --system {name}), or name another"
            ) from None
        groups, home = tuple(os.getgrouplist(name, entry.pw_gid)), entry.pw_dir
    if os.geteuid() != 0:
        if name is None or entry.pw_uid == os.geteuid():
            return None
        raise UsageError(f"--user {name}: only root can start workers as another user; start onebox serve as {name}")
    if name is None and allow_root:
        return None
    if name is not None and 0 in (entry.pw_uid, *groups):  # its own group is one of them
        raise UsageError(f"--user {name}: that is root, or of root's group; name another user")
    check_user_ids(ids)
    _probe(WorkerUser(ids.start, ids.start, groups, home))
    return LeaseUsers(ids, groups, home)


def check_user_ids(ids: range, folder: Path = Path("/etc")) -> None:
    """Require that ids are those of no user or group, nor of users of containers (``subuid(5)``, ``subgid(5)`` in a
    folder).

    Raises:
        UsageError: One is.
    """
    remedy = "name others with --user-ids FIRST-LAST"
    owners: tuple[tuple[str, Callable[[int], Sequence[Any]]], ...] = ("user", pwd.getpwuid), ("group", grp.getgrgid)
    for number in ids:
        for what, owner in owners:
            with contextlib.suppress(KeyError):
                raise UsageError(f"the {what} id {number} is that of {owner(number)[0]}; {remedy}")
    for path in (folder / "subuid", folder / "subgid"):
        with contextlib.suppress(OSError):  # this machine has none
            for owner_of, start, count in re.findall(
                r"^([^:\n]*):(\d+):(\d+)$", path.read_text(errors="replace"), re.M
            ):
                begin, end = int(start), int(start) + int(count)
                if begin < ids.stop and ids.start < end:
                    raise UsageError(f"{path} gives the ids {begin}-{end - 1} to {owner_of}; {remedy}")


def _probe(account: WorkerUser) -> None:
    """Require that a user can start a worker's Python."""
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "HOME": account.home}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": environment, **account.options()}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        line = [sys.executable, "-P", "-c", _PROBE]
        if subprocess.run(line, timeout=_PROBE_S, check=False, **options).returncode == 0:
            return
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
    "lease_users",
    "running_process",
    "running_processes",
]
