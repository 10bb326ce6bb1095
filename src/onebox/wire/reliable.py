"""Reliable messages over interrupted connections: numbered, acknowledged, sent again; exactly once and in order.

A TCP connection loses nothing while it lasts; when it breaks, data in flight is lost. So nothing is retransmitted on a
timeout alone, which would send large tensors twice. A sender queries its peer's progress: after a new connection, when
the peer reports a gap, or when nothing has been acknowledged for a while. The query follows all earlier messages, so
the reply identifies exactly the lost ones; only these are repeated.

Each message is preceded, within its first frame, by 33 bytes: its kind, the epoch of the sender (a random number of its
start), the sender's own receive progress, and two numbers whose meaning depends on the kind. Acknowledgements are
piggybacked on messages of the other direction, or sent alone if there are none.

Pure: frames and times in, frames out; the caller owns the socket.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onebox.errors import WireError

WINDOW_MESSAGES = 512
"""Most messages in flight. Fewer than a socket queues (1000), so that ZeroMQ never stops reading a connection: a full
one would look dead."""

WINDOW_BYTES = 256 << 20
"""Most bytes in flight, unless a single message is larger: two seconds on a network of 1 Gbit/s."""

ACK_MESSAGES = 64
ACK_BYTES = 16 << 20
"""Received bytes after which an acknowledgement is sent: a small part of the window, so that the sender need not
wait."""

ACK_S = 0.05
"""Longest delay of an acknowledgement for piggybacking."""

ASK_S = 1.0
ASK_MOST_S = 8.0
"""Longest time without an acknowledgement before the peer is queried; it doubles up to this value. A worker replies
between two instructions, so long silence is normal."""

RESENDS = 100
"""Most times that a message is sent again: each takes memory until it leaves, and a peer may ask for it at will."""

_MESSAGE, _ACK, _ASK, _CONNECTED, _ANSWER, _MISSING = range(6)

_HEAD = struct.Struct("<BQQQQ")

Frames = Sequence[Any]

FRAME_BYTES = 640
"""Memory that a received frame takes beside its bytes, rounded up: Python's and ZeroMQ's objects for it."""

EARLY_FRAMES = WINDOW_BYTES // FRAME_BYTES
"""Most frames kept of messages that arrived too early: many may be empty."""


def held_bytes(frames: Frames) -> int:
    """Return the memory that a received message takes, about; that of many empty frames is not that of their bytes.

    Example:
        >>> held_bytes([b"header", b""])
        1286
    """
    return sum(map(len, frames)) + FRAME_BYTES * len(frames)


class Restarted(WireError):
    """The peer has restarted and has no record of earlier messages."""


@dataclass(slots=True)
class _Sent:
    """A message in flight.

    Args:
        number: Its number.
        frames: Its frames; not copied.
        size_bytes: Their length.
        asked: Number of queries before it was last sent: a later one shows whether it has arrived.
        resends: How often it was sent again.
    """

    number: int
    frames: Frames
    size_bytes: int
    asked: int
    resends: int = 0


class Sender:
    """Messages that have been sent but not acknowledged, and messages that wait for the window.

    Args:
        window_messages: Most messages in flight.
        window_bytes: Most bytes in flight, unless a single message is larger.
    """

    def __init__(self, window_messages: int = WINDOW_MESSAGES, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_messages = window_messages
        self._window_bytes = window_bytes
        self._waiting: deque[tuple[Frames, int]] = deque()
        self._away: deque[_Sent] = deque()
        self._again: list[_Sent] = []
        self._away_bytes = 0
        self._number = 0
        self._asked = 0
        self._answered = 0
        self._ask = 0
        self._quiet_s = 0.0
        self._patience_s = ASK_S

    @property
    def full(self) -> bool:
        """True if messages wait for the window."""
        return bool(self._waiting)

    @property
    def progress(self) -> tuple[int, int]:
        """Messages that were accepted for sending, and how many of them have been acknowledged."""
        return self._number + len(self._waiting), self._number - len(self._away)

    @property
    def under_way(self) -> tuple[int, int]:
        """Messages and bytes that have been sent but not acknowledged."""
        return len(self._away), self._away_bytes

    @property
    def due_s(self) -> float:
        """Time of the next send without further events; infinite if there is none."""
        if self._again or self._ask or (self._waiting and self._fits(self._waiting[0][1])):
            return -math.inf
        return self._quiet_s + self._patience_s if self._away else math.inf

    def post(self, frames: Frames) -> None:
        """Accept a message for sending."""
        self._waiting.append((frames, sum(map(len, frames))))

    def ask(self, kind: int = _ASK) -> None:
        """Query the peer's progress with the next output."""
        self._ask = max(self._ask, kind)

    def doubt(self) -> None:
        """Query the peer's progress, if anything is in flight."""
        if self._away:
            self.ask()

    def acknowledged(self, number: int, now_s: float) -> None:
        """Process an acknowledgement of all messages up to a number.

        Raises:
            WireError: It has not been sent.
        """
        if number > self._number:
            raise WireError(f"message {number} was acknowledged; the last that was sent is {self._number}")
        away = self._away
        if not away or number < away[0].number:
            return
        while away and away[0].number <= number:
            self._away_bytes -= away.popleft().size_bytes
        self._again = [sent for sent in self._again if sent.number > number]
        self._quiet_s, self._patience_s = now_s, ASK_S

    def answered(self, question: int, held: int, now_s: float) -> None:
        """Process the reply to a query; messages that it shows to be lost are sent again.

        Args:
            question: Number of the query.
            held: The first message that the peer has beyond the gap; 0 for none.
            now_s: The time.

        Raises:
            WireError: There was no such query, or a message was lost too often.
        """
        if question > self._asked:
            raise WireError(f"an answer to question {question}; {self._asked} have been asked")
        if question > self._answered:
            self._answered = question
            self._quiet_s, self._patience_s = now_s, ASK_S
            self._again = [
                sent for sent in self._away if sent.asked < question and (not held or sent.number < held)
            ]  # includes earlier losses, unless sent again since
            for sent in self._again:
                sent.resends += 1
                if sent.resends > RESENDS:
                    raise WireError(f"the other side has lost message {sent.number} {RESENDS} times")

    def outgoing(self, now_s: float) -> list[tuple[int, int, Frames]]:
        """Return kind, number and frames of the messages to send now: lost ones, then waiting ones, then a query."""
        parcels: list[tuple[int, int, Frames]] = []
        for sent in self._again:
            sent.asked = self._asked
            parcels.append((_MESSAGE, sent.number, sent.frames))
        self._again = []
        while self._waiting and self._fits(self._waiting[0][1]):
            frames, size_bytes = self._waiting.popleft()
            self._number += 1
            if not self._away:
                self._quiet_s, self._patience_s = now_s, ASK_S
            self._away.append(_Sent(self._number, frames, size_bytes, self._asked))
            self._away_bytes += size_bytes
            parcels.append((_MESSAGE, self._number, frames))
        if self._away and now_s >= self._quiet_s + self._patience_s:
            self._quiet_s, self._patience_s = now_s, min(2 * self._patience_s, ASK_MOST_S)
            self.ask()
        if self._ask:
            self._asked += 1
            parcels.append((self._ask, self._asked, ()))
            self._ask = 0
        return parcels

    def _fits(self, size_bytes: int) -> bool:
        if not self._away:
            return True
        return len(self._away) < self._window_messages and self._away_bytes + size_bytes <= self._window_bytes


class Receiver:
    """Received messages, delivered once and in order, and those that arrived too early.

    Args:
        window_messages: Most messages that the peer may have in flight.
        window_bytes: Most bytes kept of messages that arrived too early.
    """

    def __init__(self, window_messages: int = WINDOW_MESSAGES, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_messages = window_messages
        self._window_bytes = window_bytes
        self._early: dict[int, tuple[Frames, int]] = {}
        self._early_bytes = self._early_frames = 0
        self._missed = 0
        self._new_messages = self._new_bytes = 0
        self.received = 0
        self.missing = False
        """True if a gap is to be reported to the peer."""
        self.due_s = math.inf
        """Time at which an acknowledgement is due."""

    @property
    def held(self) -> int:
        """The first message that arrived too early; 0 for none."""
        return min(self._early, default=0)

    @property
    def kept(self) -> tuple[int, int]:
        """Messages and bytes that arrived too early."""
        return len(self._early), self._early_bytes

    def take(self, number: int, frames: Frames, now_s: float) -> list[Frames]:
        """Process a message and return those that are next in order: none, it, or it and later ones that arrived
        before.

        Raises:
            WireError: It is beyond its sender's window.
        """
        if number > self.received + self._window_messages:
            raise WireError(f"message {number} came after {self.received}; {self._window_messages} may be under way")
        self.due_s = min(self.due_s, now_s + ACK_S)
        if number != self.received + 1:
            self._keep(number, frames)
            return []
        messages = [frames]
        size_bytes = sum(map(len, frames))
        self.received = number
        while self._early and (next_one := self._early.pop(self.received + 1, None)) is not None:
            messages.append(next_one[0])
            self._early_bytes -= next_one[1]
            self._early_frames -= len(next_one[0])
            size_bytes += next_one[1]
            self.received += 1
        self._new_messages += len(messages)
        self._new_bytes += size_bytes
        if self._new_messages >= ACK_MESSAGES or self._new_bytes >= ACK_BYTES:
            self.due_s = -math.inf
        self._look()
        return messages

    def said(self) -> None:
        """Record that an acknowledgement is being sent."""
        self.due_s = math.inf
        self._new_messages = self._new_bytes = 0

    def _keep(self, number: int, frames: Frames) -> None:
        """Keep a message that arrived too early, if there is room; otherwise it will be sent again."""
        size_bytes = sum(map(len, frames))
        known = number <= self.received or number in self._early
        fits = self._early_bytes + size_bytes <= self._window_bytes and self._early_frames + len(frames) <= EARLY_FRAMES
        if not known and fits:
            self._early[number] = frames, size_bytes
            self._early_bytes += size_bytes
            self._early_frames += len(frames)
        self._look()

    def _look(self) -> None:
        """Detect gaps, once each."""
        if self._early and self._missed != self.received + 1:
            self._missed = self.received + 1
            self.missing = True


class Reliable:
    """One end of a bidirectional connection.

    Args:
        epoch: A number unique to this start.
        window_messages: Most messages in flight in each direction; the same at both ends.
        window_bytes: Most bytes in flight, unless a single message is larger; the same at both ends.

    Example:
        >>> here, there = Reliable(1), Reliable(2)
        >>> here.post([b"hello"])
        >>> [parcel] = here.outgoing(0.0)
        >>> [[bytes(frame) for frame in message] for message in there.take(parcel, 0.0)]
        [[b'hello']]
        >>> there.take(parcel, 0.0)
        []
    """

    def __init__(self, epoch: int, window_messages: int = WINDOW_MESSAGES, window_bytes: int = WINDOW_BYTES) -> None:
        self.sender = Sender(window_messages, window_bytes)
        self.receiver = Receiver(window_messages, window_bytes)
        self._epoch = epoch
        self._peer: int | None = None
        self._question = 0

    @property
    def due_s(self) -> float:
        """Time at which :meth:`outgoing` is due without further events; infinite if never."""
        if self._question or self.receiver.missing:
            return -math.inf
        return min(self.receiver.due_s, self.sender.due_s)

    @property
    def full(self) -> bool:
        """True if messages wait for acknowledgements."""
        return self.sender.full

    def post(self, frames: Frames) -> None:
        """Accept a message for sending; its frames are kept, not copied, and must not change until it has arrived.

        Args:
            frames: At least one; the first is copied when it is sent, so it should be short.
        """
        self.sender.post(frames)

    def connected(self) -> None:
        """Record a new connection: both ends query the losses of the previous one."""
        self.sender.ask(_CONNECTED)

    def take(self, parcel: Frames, now_s: float) -> list[Frames]:
        """Process received frames and return the messages that are next in order, if any.

        Args:
            parcel: The received frames.
            now_s: The time.

        Raises:
            Restarted: It is from another start of the peer.
            WireError: It breaks the protocol.
        """
        if not parcel or len(parcel[0]) < _HEAD.size:
            raise WireError(
                "a message without its number: the other side speaks another version of this protocol; "
                "install the same version of onebox on both sides"
            )
        kind, epoch, acknowledged, number, held = _HEAD.unpack_from(parcel[0])
        if epoch != self._peer:
            if self._peer is not None:
                raise Restarted("the other side has started anew and has lost all that it was sent before")
            self._peer = epoch
        self.sender.acknowledged(acknowledged, now_s)
        if kind == _MESSAGE:
            return self.receiver.take(number, [memoryview(parcel[0])[_HEAD.size :], *parcel[1:]], now_s)
        if kind in (_ASK, _CONNECTED):
            self._question = max(self._question, number)
            if kind == _CONNECTED:
                self.sender.doubt()
        elif kind == _ANSWER:
            self.sender.answered(number, held, now_s)
        elif kind == _MISSING:
            self.sender.doubt()
        elif kind != _ACK:
            raise WireError(f"a message of kind {kind}; there are 0 to {_MISSING}")
        return []

    def outgoing(self, now_s: float) -> list[list[Any]]:
        """Return the transmissions that are due, in order; each is a list of frames.

        Args:
            now_s: The time.
        """
        receiver = self.receiver
        parcels: list[list[Any]] = []
        for kind, number, frames in self.sender.outgoing(now_s):
            head = self._head(kind, number)
            parcels.append([b"".join((head, frames[0])), *frames[1:]] if frames else [head])
        if self._question:
            parcels.append([self._head(_ANSWER, self._question, receiver.held)])
            self._question = 0
        if receiver.missing:
            parcels.append([self._head(_MISSING, 0)])
            receiver.missing = False
        if not parcels and now_s >= receiver.due_s:
            parcels.append([self._head(_ACK, 0)])
        if parcels:
            receiver.said()
        return parcels

    def _head(self, kind: int, number: int, held: int = 0) -> bytes:
        return _HEAD.pack(kind, self._epoch, self.receiver.received, number, held)
