"""Client authentication: a handler of ZeroMQ's authentication protocol (ZAP, RFC 27), and a count of the connections
that do not get as far."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import zmq
from zmq.utils import z85

from onebox.agent.reporter import Reporter
from onebox.wire import ConnectionEvent, socket_of

_BATCH = 64
_TEXT = 64


class ZapAuthenticator:
    """Accepts or rejects public keys for ZeroMQ; messages of an accepted client carry its key as ``User-Id``.

    A known key is accepted however many unknown ones come from the same address: otherwise a rejected client could lock
    out others behind the same router. A rejected client gets no reason.

    Args:
        context: The context whose sockets are protected.
        name_of: Maps a public key to the name of its client; None for an unknown key.
        report: Sink of rejections, with their addresses.

    Raises:
        zmq.ZMQError: This context has an authenticator already.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name_of: Callable[[str], str | None], report: Reporter
    ) -> None:
        self._name_of = name_of
        self._report = report
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def attend(self, now_s: float) -> None:
        """Answer pending requests up to a limit; the others next time."""
        for _ in range(_BATCH):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(request, now_s)

    def close(self) -> None:
        """Close the socket: no further connection is accepted."""
        self.socket.close(0)

    def _answer(self, request: list[bytes], now_s: float) -> None:
        number = request[1] if len(request) > 1 else b""
        key = self._key(request)
        if key is not None and self._knows(key, now_s):
            self.socket.send_multipart([b"1.0", number, b"200", b"OK", key.encode(), b""])
            return
        self.socket.send_multipart([b"1.0", number, b"400", b"refused", b"", b""])
        address = request[3][:_TEXT].decode(errors="replace") if len(request) > 3 else "unknown"
        self._report.refusal("handshake-refused", address, now_s, address=address)

    def _knows(self, key: str, now_s: float) -> bool:
        try:
            return self._name_of(key) is not None
        except Exception as error:  # ZeroMQ waits for the answer to this request before it sends the next one
            self._report.refusal("failed", "door", now_s, part="door", reason=f"{type(error).__name__}: {error}")
            return False

    def _key(self, request: list[bytes]) -> str | None:
        """Return the public key in a request; None if it is not a request for a CURVE key."""
        if len(request) != 7 or request[0] != b"1.0" or request[5] != b"CURVE" or len(request[6]) != 32:
            return None
        return z85.encode(request[6]).decode()


HANDSHAKE_S = 30.0
"""Time after which ZeroMQ drops a connection without a handshake, by default."""

HANDSHAKE_EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
)


class HandshakeCount:
    """Count of the connections that ended without a handshake, such as those of port scans and browsers. Pure.

    ZeroMQ does not say which connection a handshake belongs to. So connections that are open, and young enough to be
    in their handshake, are left out of the count until they end or are older.
    """

    def __init__(self) -> None:
        self._open: dict[int, float] = {}
        self._accepted = self._answered = self._counted = 0

    def accepted(self, descriptor: int, now_s: float) -> None:
        """Record a new connection."""
        self._accepted += 1
        self._open[descriptor] = now_s

    def answered(self) -> None:
        """Record a handshake, accepted or rejected."""
        self._answered += 1

    def ended(self, descriptor: int) -> None:
        """Record the end of a connection."""
        self._open.pop(descriptor, None)

    def take(self, now_s: float) -> int:
        """Return the number of further connections that ended without a handshake."""
        young = sum(now_s - since_s <= HANDSHAKE_S for since_s in self._open.values())
        found = max(0, self._accepted - self._answered - young - self._counted)
        self._counted += found
        return found


class HandshakeMonitor:
    """Reports connections to the agent's socket that end without a handshake.

    Args:
        report: Sink of the reports, which limits their rate.
    """

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._count = HandshakeCount()
        self._address = "unknown"

    def attend(self, events: Iterable[ConnectionEvent], now_s: float) -> None:
        """Process events of the socket, :data:`HANDSHAKE_EVENTS` and others, in their order."""
        for event, descriptor in events:
            if event == zmq.EVENT_ACCEPTED:
                self._count.accepted(descriptor, now_s)
                self._address = _peer(descriptor) or self._address
            elif event == zmq.EVENT_DISCONNECTED:
                self._count.ended(descriptor)
            elif event & HANDSHAKE_EVENTS:
                self._count.answered()
        for _ in range(self._count.take(now_s)):
            self._report.refusal(
                "no-handshake", "connections", now_s, latest=self._address, reason="what connected is no onebox client"
            )


def _peer(descriptor: int) -> str:
    """Return the address at the other end of a connection; empty where it has ended."""
    with contextlib.suppress(OSError), socket_of(descriptor) as connection:
        return str(connection.getpeername()[0])[:_TEXT]
    return ""
