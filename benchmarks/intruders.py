"""Those who should not get in: what each hears from a socket that is guarded by CURVE.

To hear what everybody may is no success: ZeroMQ's greeting, an error, and the WELCOME of a handshake, which has nothing
in it but a fresh key that the intruder cannot use (RFC 26). A message, or the READY that ends a handshake, is one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

from onebox.wire import KeyPair, configure, new_keys

TOKEN = b"0123456789abcdef"
"""Of every session here: what tells them apart is the key."""

SILENCE_MS = 1500
"""Who has heard nothing for so long will hear nothing: a handshake over loopback takes a millisecond."""

_GREETING_BYTES = 64
_COMMAND, _LONG = 0x04, 0x02
_PUBLIC = (b"WELCOME", b"ERROR")

Disguise = Callable[["zmq.Socket[bytes]"], None]


def disguises(server: str, client: str) -> dict[str, Disguise]:
    """Return ways to try without the secret key of a client, by name.

    Args:
        server: The server's public key.
        client: That of a client that is let in.
    """

    def plain(tried: zmq.Socket[bytes]) -> None:
        tried.plain_username = b"client"
        tried.plain_password = server.encode()

    return {
        "no key (mechanism NULL)": lambda tried: None,
        "a password (mechanism PLAIN)": plain,
        "an unknown key": lambda tried: configure(tried, new_keys(), server_key=server),
        "a wrong key of the server": lambda tried: configure(tried, new_keys(), server_key=new_keys().public),
        "a client's public key, without its secret": lambda tried: configure(
            tried, KeyPair(client, new_keys().secret), server_key=server
        ),
    }


def hears(endpoint: str, disguise: Disguise, message: bytes) -> bool:
    """Connect, say something, and tell whether anything is answered."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as tried:
        tried.linger = 0
        disguise(tried)
        tried.connect(endpoint)
        with contextlib.suppress(zmq.Again):
            tried.send_multipart([TOKEN, message], zmq.NOBLOCK)
        return bool(tried.poll(SILENCE_MS))


class Recorder:
    """A proxy that hands on one connection and keeps what its client said; a context manager.

    Args:
        endpoint: Where to.
    """

    def __init__(self, endpoint: str) -> None:
        self.said = b""
        self.heard = b""
        self._to = _address(endpoint)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._end, self._ended = socket.socketpair()
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="recorder")
        self._thread.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.send(b"x")
        self._thread.join(10)
        for each in (self._listening, self._end, self._ended):
            each.close()

    def _run(self) -> None:
        ready, _, _ = select.select([self._listening, self._ended], [], [], 30)
        if self._listening not in ready:
            return
        near, _ = self._listening.accept()
        with near, socket.create_connection(self._to, timeout=10) as far:
            while True:
                ready, _, _ = select.select([near, far, self._ended], [], [], 30)
                if not ready or self._ended in ready:
                    return
                for side, other in ((near, far), (far, near)):
                    if side in ready:
                        part = side.recv(1 << 16)
                        if not part:
                            return
                        other.sendall(part)
                        if side is near:
                            self.said += part
                        else:
                            self.heard += part


def replay(endpoint: str, said: bytes) -> bytes:
    """Say what a client has said, again, and return what is answered until it falls silent or hangs up."""
    heard = b""
    with socket.create_connection(_address(endpoint), timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(said)
        end_s = time.monotonic() + SILENCE_MS / 1000
        while (left_s := end_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            try:
                part = connection.recv(1 << 16)
            except OSError:
                break
            if not part:
                break
            heard += part
    return heard


def got_in(heard: bytes) -> bool:
    """Tell whether more was answered than everybody gets."""
    frames = heard[_GREETING_BYTES:]
    while frames:
        flags = frames[0]
        head = 9 if flags & _LONG else 2
        if len(frames) < head:
            return False
        size = int.from_bytes(frames[1:head], "big")
        body, frames = frames[head : head + size], frames[head + size :]
        if not flags & _COMMAND or body[1 : 1 + body[0]] not in _PUBLIC:
            return True
    return False


def _address(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
