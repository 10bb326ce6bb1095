"""Messages between two workers: their headers, and how those that have come are filed by channel and order. Pure but
for the condition that waits for them.

A message is a tensor, or the next part of one, or leave to send more in a channel: so much as a reader has asked for.
So a channel that nobody reads holds up no other, and takes a bounded part of the reader's memory.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict, deque
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.wire import DTYPES, TensorSpec

WINDOW_BYTES = 64 << 20
"""Bytes of a channel that nobody has asked for from which on no more are sent, beside one message."""

UNASKED_BYTES = 8 << 30
"""Most bytes of all channels that nobody has asked for."""

_LEAVE_BYTES = WINDOW_BYTES // 4
"""Bytes that were asked for, and for which the sender has no leave yet, from which on it is told."""

MOST_MESSAGES = 1 << 18
"""Most messages that wait for a reader, and most channels."""

_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 58

_NAMES = list(DTYPES)
_CODES = {name: code for code, name in enumerate(_NAMES)}

_HEAD = struct.Struct("<BBH4xqqqq")
"""Whether it is a tensor, element type, dimensions, channel, code, first byte of the part, bytes of the part."""

HEAD_BYTES = _HEAD.size
_SIZE_BYTES = 8


class PeerFault(Exception):
    """A peer has sent what no worker sends."""


class MessageHeader(NamedTuple):
    """A header.

    Args:
        channel: The channel.
        code: Purpose code; free for the user.
        start: First byte of the part in the whole.
        size_bytes: Bytes of the part that follow; of a leave, the bytes that may be sent.
        spec: Spec of the whole; ``None`` for a leave.
    """

    channel: int
    code: int
    start: int
    size_bytes: int
    spec: TensorSpec | None

    def encode(self) -> bytes:
        """Return its bytes.

        Example:
            >>> header = MessageHeader(3, 7, 0, 24, TensorSpec("float32", (2, 3)))
            >>> data = header.encode()
            >>> size_bytes = rest_bytes(data[:HEAD_BYTES])
            >>> decode(data[:HEAD_BYTES], data[HEAD_BYTES:]) == header, size_bytes
            (True, 16)
        """
        shape = () if self.spec is None else self.spec.shape
        kind, dtype = (0, 0) if self.spec is None else (1, _CODES[self.spec.dtype])
        head = _HEAD.pack(kind, dtype, len(shape), self.channel, self.code, self.start, self.size_bytes)
        return head + struct.pack(f"<{len(shape)}q", *shape)


def rest_bytes(head: bytes | memoryview) -> int:
    """Return the bytes of a header's second part, from the first one of :data:`HEAD_BYTES`.

    Raises:
        PeerFault: It is no header.
    """
    kind, dtype, dimensions, *_ = _HEAD.unpack(head)
    if kind > 1 or dtype >= len(_NAMES) or dimensions > _MOST_DIMENSIONS:
        raise PeerFault("a message without a header")
    return _SIZE_BYTES * int(dimensions)


def decode(head: bytes | memoryview, rest: bytes | memoryview) -> MessageHeader:
    """Return a header from its two parts, of which nothing leads out of the whole tensor.

    Raises:
        PeerFault: It would.
    """
    kind, dtype, _, channel, code, start, size_bytes = _HEAD.unpack(head)
    if not kind:
        if size_bytes < 0:
            raise PeerFault("leave to send fewer bytes than none")
        return MessageHeader(channel, code, start, size_bytes, None)
    shape = struct.unpack(f"<{len(rest) // _SIZE_BYTES}q", rest)
    if min(shape, default=0) < 0 or prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise PeerFault(f"a tensor of shape {shape}")
    spec = TensorSpec(_NAMES[dtype], shape)
    if start < 0 or size_bytes < 0 or start + size_bytes > spec.size_bytes:
        raise PeerFault(f"bytes {start} to {start + size_bytes} of {spec}")
    return MessageHeader(channel, code, start, size_bytes, spec)


class ReceivedMessage(NamedTuple):
    """A tensor that has come.

    Args:
        code: Its purpose code.
        spec: Its spec.
        tensor: Its elements, which are the reader's own.
    """

    code: int
    spec: TensorSpec
    tensor: Tensor


class _Channel:
    """Messages that have come by one channel, by order."""

    __slots__ = ("asked", "came", "counted_bytes", "forgotten", "messages", "part", "read_bytes")

    def __init__(self) -> None:
        self.asked = 0
        self.came = 0
        self.messages: dict[int, ReceivedMessage] = {}
        self.forgotten: set[int] = set()
        self.part: tuple[ReceivedMessage, int] | None = None  # one that has come as far as a byte
        self.counted_bytes = 0  # of these, those that count as read
        self.read_bytes = 0  # asked for, without leave to send as many more

    @property
    def idle(self) -> bool:
        """True if it is as it was at first."""
        nothing = not self.messages and not self.forgotten and self.part is None
        return nothing and self.asked == self.came and not self.read_bytes


class Inbox:
    """The messages that one peer sends; one thread files them, another one asks for them.

    Args:
        most_bytes: Most bytes that nobody has asked for.
    """

    def __init__(self, most_bytes: int = UNASKED_BYTES) -> None:
        self.changed = threading.Condition()
        """Notified of each message, and of the end; its lock guards all else."""
        self.failure = ""
        """Why nothing more comes."""
        self._most_bytes = most_bytes
        self._channels: dict[int, _Channel] = defaultdict(_Channel)
        self._unasked_bytes = self._unasked = 0
        self._dropped: deque[tuple[int, int]] = deque()  # nobody waits for them; filled from any thread

    def expect(self, channel: int) -> tuple[int, int]:
        """Ask for the next message of a channel that has not been asked for; return its order, and the bytes for which
        the sender is to get leave."""
        with self.changed:
            self._settle()
            found = self._channels[channel]
            found.asked += 1
            message = found.messages.get(found.asked)
            if message is not None:
                self._unasked -= 1
                self._unasked_bytes -= message.tensor.nbytes
                found.read_bytes += message.tensor.nbytes
            return found.asked, self._leave(found)

    def place(self, header: MessageHeader) -> memoryview:
        """Return where the bytes of a message belong.

        Raises:
            PeerFault: It is not the next part of an incomplete one, or too much has come that nobody asked for.
        """
        spec = header.spec
        assert spec is not None
        with self.changed:
            found = self._channels[header.channel]
            if found.part is None:
                if header.start:
                    raise PeerFault(f"a part of {spec} from byte {header.start} on, where none has begun")
                asked = found.asked > found.came
                if not asked and self._unasked_bytes + spec.size_bytes > max(self._most_bytes, spec.size_bytes):
                    raise PeerFault(f"more than {self._most_bytes} bytes that nobody has asked for")
                if self._unasked >= MOST_MESSAGES or len(self._channels) > MOST_MESSAGES:
                    raise PeerFault(f"more than {MOST_MESSAGES} messages that nobody has asked for")
                data = torch.empty(spec.size_bytes, dtype=torch.uint8)
                found.part = ReceivedMessage(header.code, spec, data), 0
            message, came_bytes = found.part
        if (message.spec, message.code, came_bytes) != (spec, header.code, header.start):
            raise PeerFault(f"a part of {spec} from byte {header.start} on, where byte {came_bytes} is due")
        return message.tensor.numpy().data[came_bytes : came_bytes + header.size_bytes]

    def filed(self, header: MessageHeader) -> int:
        """File a message, or a part of one, whose bytes have come; return the bytes for which the sender is to get
        leave."""
        with self.changed:
            self._settle()
            found = self._channels[header.channel]
            assert found.part is not None
            message, came_bytes = found.part
            came_bytes += header.size_bytes
            found.part = message, came_bytes
            if came_bytes < message.spec.size_bytes:
                return self._leave(found)
            leave = self._leave(found)
            found.part, found.counted_bytes = None, 0
            found.came += 1
            if found.came > found.asked:
                self._unasked += 1
                self._unasked_bytes += message.spec.size_bytes
            if found.came in found.forgotten:
                found.forgotten.discard(found.came)
            else:
                tensor = message.tensor.view(DTYPES[message.spec.dtype]).view(message.spec.shape)
                found.messages[found.came] = message._replace(tensor=tensor)
                self.changed.notify_all()
            self._tidy(header.channel, found)
            return leave

    def take(self, channel: int, order: int) -> ReceivedMessage | None:
        """Remove and return a message that was asked for; ``None`` if it has not come. With the lock."""
        found = self._channels[channel]
        message = found.messages.pop(order, None)
        if message is not None:
            self._tidy(channel, found)
        return message

    def drop(self, channel: int, order: int) -> None:
        """Forget a message that was asked for; for finalizers, which run in the middle of any method."""
        self._dropped.append((channel, order))

    def end(self, why: str) -> None:
        """Note that nothing more comes; the first reason stays."""
        with self.changed:
            self.failure = self.failure or why
            self.changed.notify_all()

    def _settle(self) -> None:
        while self._dropped:
            channel, order = self._dropped.popleft()
            if self.take(channel, order) is None:
                self._channels[channel].forgotten.add(order)

    def _leave(self, found: _Channel) -> int:
        if found.part is not None and found.asked > found.came:  # it counts as far as it has come
            found.read_bytes += found.part[1] - found.counted_bytes
            found.counted_bytes = found.part[1]
        if found.read_bytes < _LEAVE_BYTES:
            return 0
        leave, found.read_bytes = found.read_bytes, 0
        return leave

    def _tidy(self, channel: int, found: _Channel) -> None:
        if found.idle:
            del self._channels[channel]  # numbering may begin anew


class Window:
    """The bytes that may be sent in each channel."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = defaultdict(int)

    def open(self, channel: int, size_bytes: int) -> bool:
        """Return whether a message may be sent: there is room for it, or little on the way."""
        sent_bytes = self._sent[channel]
        return sent_bytes < WINDOW_BYTES // 2 or sent_bytes + size_bytes <= WINDOW_BYTES

    def sent(self, channel: int, size_bytes: int) -> None:
        """Note a message that is sent."""
        self._sent[channel] += size_bytes

    def leave(self, channel: int, size_bytes: int) -> None:
        """Note that more may be sent.

        Raises:
            PeerFault: So much was not sent.
        """
        if size_bytes > self._sent[channel]:
            raise PeerFault(f"leave for {size_bytes} bytes where {self._sent[channel]} were sent")
        self._sent[channel] -= size_bytes
