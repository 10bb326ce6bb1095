"""A process that changes tensors while operators of another one read them, as a worker can do with what it has lent."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Sequence
from typing import NamedTuple

from onebox.forking import signal_at_end_of_parent

_NUMBER = struct.Struct("<Q")
_HEAD = struct.Struct("<3Q")  # number of the request, that of the last one that is followed, count of places
_PLACE = struct.Struct("<2Q8s")
_SEEN_AT = _NUMBER.size
_TURNS = 100  # between two looks at the request

MOST = (mmap.PAGESIZE - _HEAD.size) // _PLACE.size
"""Most places of a request."""


class Place(NamedTuple):
    """An element, and what it is changed to, and back.

    Args:
        offset: Its first byte in the memory.
        other: Other bytes, as many as it has, at most 8.
    """

    offset: int
    other: bytes


class Peer:
    """The process; it ends with this one.

    Args:
        memory: What both share.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._request = mmap.mmap(-1, mmap.PAGESIZE)
        self._number = 0
        self._process = os.fork()
        if self._process == 0:
            try:
                signal_at_end_of_parent(signal.SIGKILL)
                while True:
                    _follow(memory, self._request)
            finally:
                os._exit(1)

    def change(self, places: Sequence[Place]) -> None:
        """Change these elements from now on, and no others; return when the process does so."""
        self._number += 1
        for number, (offset, other) in enumerate(places):
            _PLACE.pack_into(self._request, _HEAD.size + number * _PLACE.size, offset, len(other), other)
        _HEAD.pack_into(self._request, 0, self._number, self._number - 1, len(places))
        while _NUMBER.unpack_from(self._request, _SEEN_AT)[0] != self._number:
            os.sched_yield()

    def close(self) -> None:
        """End the process."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _follow(memory: mmap.mmap, request: mmap.mmap) -> None:
    """Do what the request asks for until there is another one."""
    number, seen, count = _HEAD.unpack_from(request)
    if number == seen:  # nothing yet
        os.sched_yield()
        return
    changes = []
    for place in range(count):
        offset, width, other = _PLACE.unpack_from(request, _HEAD.size + place * _PLACE.size)
        changes.append((slice(offset, offset + width), memory[offset : offset + width], other[:width]))
    _NUMBER.pack_into(request, _SEEN_AT, number)
    while _NUMBER.unpack_from(request)[0] == number:
        for _ in range(_TURNS if changes else 0):
            for part, own, other in changes:
                memory[part] = other
                memory[part] = own
        if not changes:
            os.sched_yield()
    for part, own, _ in changes:
        memory[part] = own
