"""A TCP connection between two workers, with TLS 1.3 or without.

TLS works in memory here, beside the socket: so the socket is read and written in large pieces, where OpenSSL would make
two system calls for each record of 16 KiB.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

_PIECE_BYTES = 1 << 18
"""Most bytes that are encrypted, or read for decryption, at a time."""

_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""Seconds until the first probe of an idle connection, and between two, and the number of probes without answer."""


class TcpConnection:
    """A connection; one thread at a time uses it, but for :meth:`shut`.

    Args:
        raw: The socket.
        context: The settings of TLS; ``None`` to do without.
        serving: Whether this end is the server of TLS.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext | None, *, serving: bool) -> None:
        self.raw = raw
        self._tls: ssl.SSLObject | None = None
        if context is not None:
            self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = context.wrap_bio(self._came, self._goes, server_side=serving)
            self._piece = memoryview(bytearray(_PIECE_BYTES))

    def shake_hands(self) -> None:
        """Begin TLS, or go on with that.

        Raises:
            BlockingIOError: The other end has to go on first, and the socket does not block.
            OSError: It has failed.
        """
        if self._tls is None:
            return
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._read_more()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the other end is told why
                raise
        self._flush()

    @property
    def certificate(self) -> bytes:
        """The certificate of the other end; empty without TLS."""
        return b"" if self._tls is None else self._tls.getpeercert(binary_form=True) or b""

    def send(self, *parts: bytes | memoryview) -> None:
        """Send parts, one after the other; the socket blocks.

        Raises:
            OSError: The connection has ended.
        """
        if self._tls is None:
            first, *rest = parts
            sent = self.raw.sendmsg(parts)
            for part in (first, *rest):
                if sent < len(part):
                    self.raw.sendall(memoryview(part)[sent:])
                sent = max(0, sent - len(part))
            return
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE_BYTES):
                self._tls.write(view[start : start + _PIECE_BYTES])
                if self._goes.pending >= _PIECE_BYTES:
                    self._flush()
        self._flush()

    def receive(self, target: memoryview) -> int:
        """Receive some bytes, at least one; return their number, 0 at the end.

        Raises:
            BlockingIOError: None have come, and the socket does not block.
            OSError: The connection has ended.
        """
        if self._tls is None:
            return self.raw.recv_into(target)
        count = 0
        while count < len(target):
            try:
                received = self._tls.read(len(target) - count, target[count:])
            except ssl.SSLWantReadError:
                if count:
                    break
                self._read_more()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            else:
                count += int(received)
                if not received:
                    break
        return count

    def settle(self) -> None:
        """Set the options of a connection that has been made."""
        with suppress(OSError):
            self.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # routers forget idle connections
            for option, value in _KEEP_ALIVE.items():
                self.raw.setsockopt(socket.IPPROTO_TCP, option, value)
        self.raw.settimeout(None)

    def shut(self) -> None:
        """End the waits of the thread that uses it; callable from any thread."""
        with suppress(OSError):
            self.raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. Idempotent."""
        self.raw.close()

    def _flush(self) -> None:
        if self._goes.pending:
            self.raw.sendall(self._goes.read())

    def _read_more(self) -> None:
        count = self.raw.recv_into(self._piece)
        if count:
            self._came.write(self._piece[:count])
        else:
            self._came.write_eof()
