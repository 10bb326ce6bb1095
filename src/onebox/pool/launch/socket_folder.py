"""Folders for sockets of this machine, which only this user can enter."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from onebox.errors import PoolError
from onebox.portable import lock_file

_LONGEST = 70
"""Longest path of a parent folder, in bytes, that leaves room for our folder and a socket in it."""

_PREFIX = "onebox-s-"


class SocketFolder:
    """A folder that only this user can enter, in which processes of this machine bind their sockets.

    Its path is short, because that of a socket has 107 bytes at most (``unix(7)``). The process that made it holds a
    lock on it: the folder of one that was killed is removed by the next process of this user that makes one.

    Raises:
        PoolError: No such folder can be created.
    """

    def __init__(self) -> None:
        candidates = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm"))
        places = [place for place in candidates if len(os.fsencode(place)) <= _LONGEST]
        for place in places * 2:  # again, where another process takes a new one for one that was left
            with contextlib.suppress(OSError):
                _remove_left(place)
                self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=place)  # created with mode 0700
                self._lock = _locked(self.path)
                return
        raise PoolError(f"no folder for sockets can be made in {', '.join(places)}: let one of them be writable")

    def close(self) -> None:
        """Remove the folder; existing connections stay. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: str | Path) -> int:
    """Lock a folder as long as the descriptor that is returned is open.

    Raises:
        OSError: Another process has locked it, or it is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock_file(descriptor)
        os.stat(folder)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_left(place: str) -> None:
    """Remove the folders of this user's processes that were killed, with the sockets in them and nothing else."""
    for folder in Path(place).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # such as one that is in use
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = _locked(folder)
            try:
                for each in folder.iterdir():
                    if stat.S_ISSOCK(each.lstat().st_mode):
                        each.unlink()
                folder.rmdir()
            finally:
                os.close(lock)
