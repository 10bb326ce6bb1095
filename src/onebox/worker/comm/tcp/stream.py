"""One ordered stream of bytes over one or several connections of the same direction.

What is written goes in numbered chunks, each by the connection that has the fewest bytes queued, of those that are used
(:mod:`onebox.worker.comm.tcp.meter`): one where it fills the link. The reader puts them in order.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Sequence

from onebox.worker.comm.tcp.connection import TcpConnection
from onebox.worker.comm.tcp.meter import LinkMeter

CHUNK_BYTES = 1 << 20
"""Most bytes of a chunk."""

SPREAD_BYTES = 1 << 16
"""The same over several connections: less than the kernel's window of one, so that one takes it while others send."""

_AHEAD_BYTES = 1 << 16
"""Most bytes that are read before they are asked for."""

_HEAD = struct.Struct("<II")
"""Of a chunk: its number, modulo :data:`_NUMBERS`, and its bytes."""

_NUMBERS = 1 << 32


class ConnectionWriter:
    """The writing end.

    Args:
        connections: Its connections.
        meter: Sends by way of them.
    """

    def __init__(self, connections: Sequence[TcpConnection], meter: LinkMeter) -> None:
        self.connections = connections
        self.meter = meter
        self._number = 0
        self._most = CHUNK_BYTES if len(connections) == 1 else SPREAD_BYTES

    def write(self, head: bytes, body: memoryview) -> None:
        """Write the head and the body of a message.

        Raises:
            OSError: A connection has ended.
        """
        first = body[: self._most - len(head)]
        self._chunk(len(head) + len(first), head, first)
        for start in range(len(first), len(body), self._most):
            part = body[start : start + self._most]
            self._chunk(len(part), part)

    def _chunk(self, size_bytes: int, *parts: bytes | memoryview) -> None:
        self.meter.send(_HEAD.pack(self._number, size_bytes), *filter(len, parts))
        self._number = (self._number + 1) % _NUMBERS


class _Source:
    """The reading end of a connection."""

    def __init__(self, connection: TcpConnection) -> None:
        self.connection = connection
        self.left = 0
        """Bytes of its chunk that have not been read."""
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = self._end = 0

    def at_hand(self, size_bytes: int) -> memoryview | None:
        """Return the next bytes of the chunk, valid until more are read; ``None`` if they have not all been read
        ahead."""
        start, end = self._start, self._start + size_bytes
        if size_bytes > self.left or end > self._end:
            return None
        self._start = end
        return self._ahead[start:end]

    def read(self, target: memoryview) -> int:
        """Read some bytes; return their number, 0 at the end."""
        if self._start == self._end:
            if len(target) >= _AHEAD_BYTES:
                return self.connection.receive(target)
            self._start, self._end = 0, self.connection.receive(self._ahead)
        count = min(len(target), self._end - self._start)
        target[:count] = self._ahead[self._start : self._start + count]
        self._start += count
        return count

    def begin(self) -> int:
        """Read the head of the next chunk; return its number, -1 at the end.

        Raises:
            BlockingIOError: It has not come.
            OSError: There is none.
        """
        while (left := self._end - self._start) < _HEAD.size:
            self._ahead[:left] = self._ahead[self._start : self._end]
            self._start, self._end = 0, left
            count = self.connection.receive(self._ahead[left:])
            if not count:
                if left:
                    raise ConnectionError("a connection ended in the head of a chunk")
                return -1
            self._end += count
        number, self.left = _HEAD.unpack_from(self._ahead, self._start)
        self._start += _HEAD.size
        if not 0 < self.left <= CHUNK_BYTES:
            raise ConnectionError("no head of a chunk")
        return int(number)


class ConnectionReader:
    """The reading end.

    Args:
        connections: Its connections; of several, none blocks any more.
    """

    def __init__(self, connections: Sequence[TcpConnection]) -> None:
        self._waiting = [_Source(each) for each in connections]
        """Those whose next chunk has not begun to come."""
        self._begun: dict[int, _Source] = {}  # the others, by the number of their chunk
        self._number = 0
        if len(connections) > 1:
            for each in connections:
                each.raw.setblocking(False)

    def read(self, size_bytes: int) -> memoryview | None:
        """Return the next bytes, valid until more are read; ``None`` where the stream has ended before them.

        Raises:
            OSError: A connection has ended in the middle, or does not have chunks.
        """
        if not size_bytes:  # the next chunk may not come for long
            return memoryview(b"")
        source = self._begun.get(self._number) or self._next()
        part = None if source is None else source.at_hand(size_bytes)
        if source is not None and part is not None:
            self._count(source, size_bytes)
            return part
        target = memoryview(bytearray(size_bytes))
        return target if self.read_into(target) else None

    def read_into(self, target: memoryview) -> bool:
        """Fill a target; return ``False`` where the stream has ended before it.

        Raises:
            OSError: A connection has ended in the middle, or does not have chunks.
        """
        done = 0
        while done < len(target):
            source = self._begun.get(self._number) or self._next()
            if source is None:
                if done:
                    raise ConnectionError("the connection ended in the middle of a message")
                return False
            try:
                count = source.read(target[done : done + source.left])
            except BlockingIOError:
                _await([source])
                continue
            if not count:
                raise ConnectionError("the connection ended in the middle of a message")
            done += count
            self._count(source, count)
        return True

    def _count(self, source: _Source, size_bytes: int) -> None:
        """Note bytes of the present chunk that have been read."""
        source.left -= size_bytes
        if not source.left:
            del self._begun[self._number]
            self._waiting.append(source)
            self._number = (self._number + 1) % _NUMBERS

    def _next(self) -> _Source | None:
        """Return the connection that has the next chunk; ``None`` at the end of all."""
        while self._number not in self._begun:
            if not self._waiting:
                return None
            before = len(self._waiting)
            for source in self._waiting.copy():
                try:
                    number = source.begin()
                except BlockingIOError:
                    continue
                self._waiting.remove(source)
                if number in self._begun:
                    raise ConnectionError("two chunks of one number")
                if number >= 0:
                    self._begun[number] = source
            if len(self._waiting) == before:
                _await(self._waiting)
        return self._begun[self._number]


def _await(sources: Sequence[_Source]) -> None:
    """Wait until something has come by one of some connections."""
    came = select.poll()
    for each in sources:
        came.register(each.connection.raw, select.POLLIN)
    came.poll()
