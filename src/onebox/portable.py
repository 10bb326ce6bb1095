"""Functions of an operating system that a client uses, in one form for Linux, macOS and Windows.

Workers and agents run on Linux, and use Linux itself. tests/unit/test_portable.py lists their modules, and checks that
all others use only what each of the three systems has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from onebox.errors import UsageError

if sys.platform == "win32":
    import _thread
    import msvcrt
else:
    import fcntl

LINUX = sys.platform == "linux"
"""True where workers and agents can run, and a feed's stages as processes."""

SYSTEM = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
"""The system's name, for messages."""

UNIX_SOCKETS = hasattr(socket, "AF_UNIX")
"""True where processes can connect by a path that only their user can enter."""

END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that end a program; Windows has no SIGHUP."""

_DRAINED_BYTES = 4096


def require_linux(what: str, instead: str) -> None:
    """Require a system that workers and agents run on.

    Args:
        what: A clause that says what runs there.
        instead: What to do on another system.

    Raises:
        UsageError: This is another system.
    """
    if not LINUX:
        raise UsageError(f"{what} on Linux alone, and this machine has {SYSTEM}; {instead}")


class Wakeup:
    """A descriptor that a poller watches, readable from :meth:`set` to :meth:`clear`; any thread may set it.

    An ``eventfd(2)`` where the system has it; elsewhere a pair of connected sockets, the one kind of descriptor that
    can be polled everywhere.
    """

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, ...] = ()
        if hasattr(os, "eventfd"):
            self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._sockets = socket.socketpair()
            for each in self._sockets:
                each.setblocking(False)
            self.descriptor = self._sockets[0].fileno()

    @property
    def entrance(self) -> int:
        """The descriptor that eight bytes are written to by code that sets it itself."""
        return self._sockets[1].fileno() if self._sockets else self.descriptor

    def set(self) -> None:
        """Make it readable."""
        if hasattr(os, "eventfd"):
            os.eventfd_write(self.descriptor, 1)
        else:
            with contextlib.suppress(BlockingIOError):  # full, and so readable
                self._sockets[1].send(b"\0")

    def clear(self) -> None:
        """Make it unreadable until it is set again."""
        with contextlib.suppress(BlockingIOError):  # it is not set
            if hasattr(os, "eventfd"):
                os.eventfd_read(self.descriptor)
            else:
                while len(self._sockets[0].recv(_DRAINED_BYTES)) == _DRAINED_BYTES:
                    pass

    def close(self) -> None:
        """Close it; called once."""
        if self._sockets:
            for each in self._sockets:
                each.close()
        else:
            os.close(self.descriptor)


def usable_cores() -> int:
    """Return the number of cores that this process may use; all of the machine's where a process is not bound to
    some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def after_fork_in_child(action: Callable[[], None]) -> None:
    """Have a function called in each process that this one forks, where it can."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


def wake_main_thread(number: signal.Signals) -> None:
    """Send the main thread a signal, which also ends a system call that it waits in; on Windows only its handler runs,
    once the call has ended."""
    main = threading.main_thread().ident
    assert main is not None
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(main, number)


# ---- files


class OthersAccess(NamedTuple):
    """Rights that other users have on a file or folder, as far as the system's ``stat`` tells them.

    Args:
        owned: Whether it belongs to another user than this one and the system's.
        readable: Whether others can read it.
        writable: Whether others can write to it.
    """

    owned: bool
    readable: bool
    writable: bool


def access_of_others(about: os.stat_result) -> OthersAccess:
    """Return the rights of other users.

    Windows has lists of them, which ``stat`` does not tell: there, what is in a user's folder is taken for theirs.
    """
    if sys.platform == "win32":
        return OthersAccess(owned=False, readable=False, writable=False)
    else:
        mode = about.st_mode
        owned = about.st_uid not in (os.geteuid(), 0)
        return OthersAccess(owned=owned, readable=bool(mode & 0o077), writable=bool(mode & 0o022))


def lock_file(descriptor: int) -> None:
    """Lock a file against other processes, until it is closed.

    Raises:
        BlockingIOError: Another one has locked it.
    """
    if sys.platform == "win32":
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_to_read(path: str | os.PathLike[str]) -> int:
    """Open a file for :func:`read_at`, without a wait for the other end of a pipe; return its descriptor."""
    if sys.platform == "win32":
        return os.open(path, os.O_RDONLY | os.O_BINARY)
    else:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def read_at(descriptor: int, size_bytes: int, offset: int) -> bytes:
    """Read a part of a file that many threads read; it may return fewer bytes, and none only at the end."""
    if sys.platform != "win32":
        return os.pread(descriptor, size_bytes, offset)
    with _reading:  # there is one position for all
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size_bytes)


_reading = threading.Lock()


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk; Windows keeps the entries' journal itself.

    Raises:
        OSError: They cannot be written.
    """
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)  # Windows syncs what it writes
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
