"""The channel: ZeroMQ sockets with CURVE encryption, and the parts in which frames travel over them.

A worker is the server: it binds, and lets in one client key. What the frames hold is decoded by
:mod:`onebox.wire.protocol.codec`.

ZeroMQ takes what a stranger announces before it knows who that is, up to the limit of a frame, so frames are small: a
longer one travels in parts of :data:`PART_BYTES`, of which the last is shorter and may be empty. Between processes of
one machine a stranger does not get as far: their sockets lie in a folder that only their user can enter.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from msgspec import Struct

from onebox.errors import UsageError, WireError

PART_BYTES = 1 << 20
"""The most bytes that travel in one piece, which is also what a stranger's connection can make a worker hold. Small
parts are fast, too: one is encrypted while the other is on its way (64 MiB over loopback: 1.7 GB/s, in one piece 0.6).
"""

_CURVE_BYTES = 1024
"""More than what CURVE adds to a part (RFC 26: 33 bytes)."""

HANDSHAKE_MS = 3_000
"""How long a peer may take for the CURVE handshake; the client tries again."""

RECONNECT_MS = 50
RECONNECT_MOST_MS = 200
CONNECT_MS = 500
"""How soon a broken connection is made again, and how long one try may take: a cut ends unannounced."""

HEARTBEAT_LOST_MS = 1_500
"""A connection over which signs of life come is broken when it has brought nothing for so long."""

TCP_LOST_MS = 2_000
"""A TCP connection whose other end has acknowledged nothing for so long is dead. Left to itself the kernel would wait
after a cut of two seconds for another two until it tries again (RFC 6298), and a quarter of an hour until it gives up.
"""

Frames = Sequence[Any]


class KeyPair(Struct, frozen=True):
    """A CURVE key pair in Z85 text; ``repr`` never shows the secret."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def new_keys() -> KeyPair:
    """Make a CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def configure(socket: zmq.Socket[bytes], keys: KeyPair, *, server_key: str | None, queue: int = 1000) -> None:
    """Set a socket's security, limits and queues, before it binds or connects.

    Args:
        socket: The socket.
        keys: Its own keys.
        server_key: The server's public key on a client; ``None`` on a server.
        queue: The most messages queued in each direction.
    """
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    if server_key is None:
        socket.curve_server = True
        socket.zap_domain = b"onebox"
    else:
        socket.curve_serverkey = server_key.encode()
    socket.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + _CURVE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)


def detect_dead_peers(socket: zmq.Socket[bytes], *, beats: bool = False) -> None:
    """Let a TCP connection that is dead be noticed soon and made again; before the socket binds or connects.

    Args:
        socket: The socket, configured.
        beats: Whether only signs of life come over it, so that ZeroMQ can ask for some of its own between them; where
            large tensors go, these would wait behind them and look like silence.
    """
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_MAXRT, TCP_LOST_MS)
    if beats:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_LOST_MS // 3)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LOST_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_LOST_MS)


def listen(socket: zmq.Socket[bytes], address: str, ports: Sequence[int] = ()) -> str:
    """Bind a socket and return the endpoint to connect to.

    Args:
        socket: A server's, configured.
        address: An IP address of this host, for TCP; or the path of a folder, for a socket of this machine in it.
        ports: For TCP, those of which the first that is free is taken; any from 49152 on where there are none.

    Raises:
        UsageError: None of the ports is free.
    """
    if address.startswith("/"):
        endpoint = f"ipc://{address}/{secrets.token_hex(8)}"
        socket.bind(endpoint)
        return endpoint
    socket.setsockopt(zmq.IPV6, ":" in address)
    host = f"[{address}]" if ":" in address else address
    if not ports:
        return f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"
    for port in ports:
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
        else:
            return f"tcp://{host}:{port}"
    raise UsageError(f"no port from {min(ports)} to {max(ports)} is free at {address}; each worker needs two")


def send(socket: zmq.Socket[bytes], frames: Frames, flags: int = 0, *, copy: bool = True) -> None:
    """Send a message, in parts of at most :data:`PART_BYTES`.

    Args:
        socket: Where to.
        frames: Header and elements.
        flags: ``zmq.NOBLOCK``, or none.
        copy: Whether the elements may be written to as soon as this returns.

    Raises:
        zmq.Again: There is no room, or nobody at the other end.
    """
    socket.send_multipart(cut(frames), flags, copy=copy)


def receive(socket: zmq.Socket[bytes]) -> list[Any]:
    """Receive a message and return its frames, put together from their parts.

    Raises:
        zmq.Again: There is none within the socket's limit of time.
        WireError: It ends in the middle of a frame.
    """
    parts: list[Any] = [socket.recv()]  # in most messages the only one, and short: cheaper to copy than to hold
    while socket.getsockopt(zmq.RCVMORE):
        parts.append(socket.recv(copy=False).buffer)
    return join(parts)


def cut(frames: Frames) -> list[Any]:
    """Return the parts that frames travel in."""
    parts: list[Any] = []
    for frame in frames:
        if len(frame) < PART_BYTES:
            parts.append(frame)
        else:
            whole = memoryview(frame)
            parts += [whole[start : start + PART_BYTES] for start in range(0, len(whole) + 1, PART_BYTES)]
    return parts


def join(parts: list[Any]) -> list[Any]:
    """Return the frames that came in parts; the list is emptied, so that memory is not held twice.

    Raises:
        WireError: The last one has no end, or a part is too long.
    """
    if all(len(part) < PART_BYTES for part in parts):
        return parts
    ends = [number for number, part in enumerate(parts) if len(part) < PART_BYTES]
    if not ends or ends[-1] != len(parts) - 1 or any(len(part) > PART_BYTES for part in parts):
        raise WireError(f"a message of {len(parts)} parts of up to {PART_BYTES} bytes that ends within a frame")
    counts = [end - start for start, end in zip([-1, *ends], ends, strict=False)]
    parts.reverse()
    return [_joined(parts, count) for count in counts]


def _joined(parts: list[Any], count: int) -> Any:
    """Take as many parts from the end of a list and return them as one frame."""
    if count == 1:
        return parts.pop()
    whole = memoryview(np.empty(sum(len(part) for part in parts[-count:]), dtype=np.uint8))  # type: ignore[arg-type]
    start = 0
    for _ in range(count):
        part = parts.pop()
        whole[start : start + len(part)] = part
        start += len(part)
    return whole
