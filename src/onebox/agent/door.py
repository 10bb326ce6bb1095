"""Who is let in: the agent's end of ZeroMQ's authentication (ZAP, RFC 27), and how often somebody may do something."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils import z85

ADDRESSES = 1024
"""The most addresses whose failures are counted; the one that has been quiet for the longest is forgotten first."""

_FAILURES = 5.0
_FAILURE_S = 10.0
_ALL = "*"
_ALL_FAILURES = 50.0
_ALL_FAILURE_S = 1.0

_BATCH = 64
_TEXT = 64


class Tell(Protocol):
    """How an agent reports what happens, such as a journal's ``tell``."""

    def __call__(self, event: str, **fields: str | int | float | None) -> None:
        """Take the news of an event."""


class Rate:
    """A token bucket: so many at once, then one in so many seconds; pure.

    Args:
        burst: How many at once.
        every_s: Seconds until there may be another one.
        now_s: The time.
    """

    def __init__(self, burst: float, every_s: float, now_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._tokens = burst
        self._at_s = now_s

    def allows(self, now_s: float) -> bool:
        """Tell whether there may be one more now, and count it if so."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at_s) / self._every_s)
        self._at_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass
class _Stranger:
    rate: Rate
    untold: int = 0


class Strangers:
    """Which failed handshakes are worth a line: a few of each address, not too many of all; pure."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Stranger] = OrderedDict()
        self._all: _Stranger | None = None

    def __len__(self) -> int:
        return len(self._known)

    def failed(self, address: str, now_s: float) -> int:
        """Take the news of a failure; return how many of this address are to be told of now, 0 for none."""
        if self._all is None:
            self._all = _Stranger(Rate(_ALL_FAILURES, _ALL_FAILURE_S, now_s))
        who = self._known.setdefault(address, _Stranger(Rate(_FAILURES, _FAILURE_S, now_s)))
        self._known.move_to_end(address)
        if len(self._known) > ADDRESSES:
            self._known.popitem(last=False)
        who.untold += 1
        if not who.rate.allows(now_s) or not self._all.rate.allows(now_s):
            return 0
        told, who.untold = who.untold, 0
        return told


class Door:
    """Answers ZeroMQ's question whether a key may come in; what a let-in client sends bears its key as ``User-Id``.

    A key that is known comes in however many strangers knock from the same address: who is refused could otherwise
    keep out others behind the same router. A stranger learns only that it is refused.

    Args:
        context: The one whose sockets are guarded.
        name_of: From a public key to the name of its client; None for a stranger.
        tell: Told of who is refused.

    Raises:
        zmq.ZMQError: This context has a door already.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name_of: Callable[[str], str | None], tell: Tell
    ) -> None:
        self._name_of = name_of
        self._tell = tell
        self._strangers = Strangers()
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def attend(self, now_s: float) -> None:
        """Answer those who knock, up to some; the others next time."""
        for _ in range(_BATCH):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(request, now_s)

    def close(self) -> None:
        """Close the door: nobody comes in any more."""
        self.socket.close(0)

    def _answer(self, request: list[bytes], now_s: float) -> None:
        number = request[1] if len(request) > 1 else b""
        key = self._key(request)
        if key is not None and self._name_of(key) is not None:
            self.socket.send_multipart([b"1.0", number, b"200", b"OK", key.encode(), b""])
            return
        self.socket.send_multipart([b"1.0", number, b"400", b"refused", b"", b""])
        address = request[3][:_TEXT].decode(errors="replace") if len(request) > 3 else "unknown"
        told = self._strangers.failed(address, now_s)
        if told:
            self._tell("handshake-refused", address=address, times=told)

    def _key(self, request: list[bytes]) -> str | None:
        """Return the public key in a request; None if it is no request for a CURVE key."""
        if len(request) != 7 or request[0] != b"1.0" or request[5] != b"CURVE" or len(request[6]) != 32:
            return None
        return z85.encode(request[6]).decode()
