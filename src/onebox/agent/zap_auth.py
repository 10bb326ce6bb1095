"""Client authentication: a handler of ZeroMQ's authentication protocol (ZAP, RFC 27)."""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils import z85

from onebox.agent.log_rate_limit import Reporter

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
