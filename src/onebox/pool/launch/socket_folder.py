"""Folders for sockets of this machine, which only this user can enter."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

from onebox.errors import PoolError

_LONGEST = 70
"""Longest path of a parent folder, in bytes, that leaves room for our folder and a socket in it."""


class SocketFolder:
    """A folder that only this user can enter, in which processes of this machine bind their sockets.

    Its path is short, because that of a socket has 107 bytes at most (``unix(7)``).

    Raises:
        PoolError: No such folder can be created.
    """

    def __init__(self) -> None:
        candidates = dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm"))
        places = [place for place in candidates if len(os.fsencode(place)) <= _LONGEST]
        for place in places:
            with contextlib.suppress(OSError):
                self.path = tempfile.mkdtemp(prefix="onebox-", dir=place)  # created with mode 0700
                return
        raise PoolError(f"no folder for sockets can be made in {', '.join(places)}: let one of them be writable")

    def close(self) -> None:
        """Remove the folder; existing connections stay. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
