"""Messages that survive a cut of the network: numbered, acknowledged, sent again; exactly once and in order.

A TCP connection loses nothing while it lasts; when it breaks, whatever was under way is lost. So nothing is sent again
because of time alone, which would send large tensors twice. A sender asks its peer how far it has come: when a new
connection is made, when the peer says that it misses something, or when nothing has been acknowledged for a while.
The question follows what was sent before it, and so the answer tells exactly what was lost; only that is repeated.

Each message is preceded, within its first frame, by 33 bytes: its kind, the epoch of the sender (a number that it drew
when it started), how far the sender has received, and two numbers whose meaning depends on the kind. Acknowledgements
ride on messages of the other direction, or go alone where there are none.

Pure: frames and times in, frames out; who calls it owns the socket.
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
"""The most messages under way. Fewer than a socket queues (1000), so that ZeroMQ never stops to read a connection:
one that is full would look like one that is dead."""

WINDOW_BYTES = 256 << 20
"""The most bytes under way, unless a single message is larger: two seconds of a network of 1 Gbit/s."""

ACK_MESSAGES = 64
ACK_BYTES = 16 << 20
"""What may come in before it is acknowledged: a small part of the window, so that the sender need not wait."""

ACK_S = 0.05
"""How long an acknowledgement waits for a message to ride on."""

ASK_S = 1.0
ASK_MOST_S = 8.0
"""How long without an acknowledgement until the peer is asked; twice as long each time, up to the second. A worker
answers between two instructions, and so a long silence is nothing unusual."""

_MESSAGE, _ACK, _ASK, _CONNECTED, _ANSWER, _MISSING = range(6)

_HEAD = struct.Struct("<BQQQQ")

Frames = Sequence[Any]


class Restarted(WireError):
    """The peer is not the one that it was: it has started anew and knows nothing of what it was sent before."""


@dataclass(slots=True)
class _Sent:
    """A message under way.

    Args:
        number: Its number.
        frames: Its frames; not copied.
        size_bytes: Their length.
        asked: How many questions had been asked when it was last sent: a later one tells whether it has arrived.
    """

    number: int
    frames: Frames
    size_bytes: int
    asked: int


class Sender:
    """What has been sent and not been acknowledged, and what waits until there is room.

    Args:
        window_messages: The most messages under way.
        window_bytes: The most bytes under way, unless a single message is larger.
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
        """Whether something waits for room."""
        return bool(self._waiting)

    @property
    def under_way(self) -> tuple[int, int]:
        """Messages and bytes that have been sent and not been acknowledged."""
        return len(self._away), self._away_bytes

    @property
    def due_s(self) -> float:
        """When something is to be sent unless news come; infinite when never."""
        if self._again or self._ask or (self._waiting and self._fits(self._waiting[0][1])):
            return -math.inf
        return self._quiet_s + self._patience_s if self._away else math.inf

    def post(self, frames: Frames) -> None:
        """Take a message to be sent."""
        self._waiting.append((frames, sum(map(len, frames))))

    def ask(self, kind: int = _ASK) -> None:
        """Ask the peer with what goes out next how far it has come."""
        self._ask = max(self._ask, kind)

    def doubt(self) -> None:
        """Ask the peer how far it has come, if anything is under way."""
        if self._away:
            self.ask()

    def acknowledged(self, number: int, now_s: float) -> None:
        """Take the news that the peer has everything up to a number.

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
        """Take the answer to a question; what it shows to be lost is sent again.

        Args:
            question: Which.
            held: The first message that the peer has beyond what it misses; 0 for none.
            now_s: The time.

        Raises:
            WireError: Nobody has asked that.
        """
        if question > self._asked:
            raise WireError(f"an answer to question {question}; {self._asked} have been asked")
        if question > self._answered:
            self._answered = question
            self._quiet_s, self._patience_s = now_s, ASK_S
            self._again = [
                sent for sent in self._away if sent.asked < question and (not held or sent.number < held)
            ]  # what an earlier answer named is among it, unless it has been sent since

    def outgoing(self, now_s: float) -> list[tuple[int, int, Frames]]:
        """Return kind, number and frames of what is to be sent now: what was lost, then what waits, then a question."""
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
    """What has been received, each once and in order, and what came too early.

    Args:
        window_messages: The most messages that its peer may have under way.
        window_bytes: The most bytes that are kept of what came too early.
    """

    def __init__(self, window_messages: int = WINDOW_MESSAGES, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_messages = window_messages
        self._window_bytes = window_bytes
        self._early: dict[int, tuple[Frames, int]] = {}
        self._early_bytes = 0
        self._missed = 0
        self._new_messages = self._new_bytes = 0
        self.received = 0
        self.missing = False
        """Whether the peer is to be told that something is missing."""
        self.due_s = math.inf
        """When what has been received is to be acknowledged."""

    @property
    def held(self) -> int:
        """The first message that came too early; 0 for none."""
        return min(self._early, default=0)

    @property
    def kept(self) -> tuple[int, int]:
        """Messages and bytes that came too early."""
        return len(self._early), self._early_bytes

    def take(self, number: int, frames: Frames, now_s: float) -> list[Frames]:
        """Take a message and return what is next in order: nothing, it, or it and some that came before it.

        Raises:
            WireError: It is further ahead than the window of its sender.
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
            size_bytes += next_one[1]
            self.received += 1
        self._new_messages += len(messages)
        self._new_bytes += size_bytes
        if self._new_messages >= ACK_MESSAGES or self._new_bytes >= ACK_BYTES:
            self.due_s = -math.inf
        self._look()
        return messages

    def said(self) -> None:
        """Take the news that the peer is being told how far it has been received."""
        self.due_s = math.inf
        self._new_messages = self._new_bytes = 0

    def _keep(self, number: int, frames: Frames) -> None:
        """Keep a message that came too early, where there is room; otherwise it will be sent again."""
        size_bytes = sum(map(len, frames))
        known = number <= self.received or number in self._early
        if not known and self._early_bytes + size_bytes <= self._window_bytes:
            self._early[number] = frames, size_bytes
            self._early_bytes += size_bytes
        self._look()

    def _look(self) -> None:
        """Notice what is missing, once each."""
        if self._early and self._missed != self.received + 1:
            self._missed = self.received + 1
            self.missing = True


class Reliable:
    """One end of a pair of directions.

    Args:
        epoch: A number that no other start of this end has.
        window_messages: The most messages under way in each direction; the same at both ends.
        window_bytes: The most bytes, unless a single message is larger; the same at both ends.

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
        """When :meth:`outgoing` is to be called unless something comes before; infinite when never."""
        if self._question or self.receiver.missing:
            return -math.inf
        return min(self.receiver.due_s, self.sender.due_s)

    @property
    def full(self) -> bool:
        """Whether something waits until the peer has acknowledged what is under way."""
        return self.sender.full

    def post(self, frames: Frames) -> None:
        """Take a message to be sent; its frames are kept, not copied, and must not change until it has arrived.

        Args:
            frames: One at least; the first is copied when it is sent, so it is to be short.
        """
        self.sender.post(frames)

    def connected(self) -> None:
        """Take the news of a new connection: both ends ask what the end of the one before has cost."""
        self.sender.ask(_CONNECTED)

    def take(self, parcel: Frames, now_s: float) -> list[Frames]:
        """Take what has come and return the messages that are next in order, if any.

        Args:
            parcel: The frames that came.
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
        """Return what is to be sent now, in this order; each is a list of frames.

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
