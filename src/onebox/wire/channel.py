"""The channel: ZeroMQ sockets with CURVE encryption, and the parts in which frames are sent.

A worker is the server: it binds, and accepts one client key. The contents of frames are decoded by
:mod:`onebox.wire.protocol.codec`.

ZeroMQ buffers data of unauthenticated peers up to the frame limit, so frames are small: a longer one is sent in parts
of :data:`PART_BYTES`, of which the last is shorter and may be empty. Between processes of one machine other users
cannot connect: their sockets are in a folder that only their user can access.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq
import zmq.utils.garbage  # frees what is sent uncopied, and ends at the exit: after pools, which register theirs later
from msgspec import Struct

from onebox.errors import UsageError, WireError
from onebox.wire.receive_watch import ReceiveWatch, connection_of
from onebox.wire.reliable import Frames, Reliable

PART_BYTES = 1 << 20
"""Most bytes of one part, which also bounds the memory that an unauthenticated connection can occupy on a worker. Small
parts are fast, too: encryption overlaps with sending (64 MiB over loopback: 1.7 GB/s, in one piece 0.6).
"""

PARTS = 1 << 17
"""Most parts of a message: twice the most frames."""

_CURVE_BYTES = 1024
"""More than CURVE's overhead on a part (RFC 26: 33 bytes)."""

_MORE = int(zmq.SNDMORE)  # as a number: pyzmq's own loop over parts spends most of its time on flags that are an enum

HANDSHAKE_MS = 3_000
"""Time limit of the CURVE handshake; the client tries again."""

RECONNECT_MS = 50
RECONNECT_MOST_MS = 200
CONNECT_MS = 500
"""Delay before a broken connection is retried, and time limit of one attempt: an interruption ends without notice."""

TCP_LOST_MS = 2_000
"""Time without an acknowledgement after which a TCP connection counts as dead. By default, the kernel would retry only
two seconds after an interruption of two seconds (RFC 6298), and give up after a quarter of an hour.
"""


class KeyPair(Struct, frozen=True):
    """A CURVE key pair in Z85 text; ``repr`` never shows the secret."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def new_keys() -> KeyPair:
    """Create a CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def configure(socket: zmq.Socket[bytes], keys: KeyPair, *, server_key: str | None, queue: int = 1000) -> None:
    """Set a socket's security, limits and queues, before it binds or connects.

    Args:
        socket: The socket.
        keys: Its own keys.
        server_key: The server's public key on a client; ``None`` on a server.
        queue: Most messages queued in each direction.
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


def detect_dead_peers(socket: zmq.Socket[bytes]) -> None:
    """Make a dead TCP connection be detected and re-established soon; before the socket binds or connects.

    The kernel does it, which wakes no thread; ZeroMQ's own heartbeats would, and are delayed behind large tensors.

    Args:
        socket: The socket, configured.
    """
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)  # for systems without the next one
    socket.setsockopt(zmq.TCP_MAXRT, TCP_LOST_MS)


def listen(socket: zmq.Socket[bytes], address: str, ports: Sequence[int] = ()) -> str:
    """Bind a socket and return the endpoint to connect to.

    Args:
        socket: A server's socket, configured.
        address: An IP address of this host, for TCP; or the path of a folder, for a socket of this machine in it.
        ports: For TCP, candidates, of which the first free one is used; any from 49152 on if empty.

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
        socket: The socket.
        frames: Header and elements.
        flags: ``zmq.NOBLOCK``, or none.
        copy: Whether the elements may be overwritten as soon as this returns.

    Raises:
        zmq.Again: The queue is full, or there is no connection.
    """
    *parts, last = cut(frames)
    for part in parts:
        socket.send(part, _MORE | int(flags), copy=copy)
    socket.send(last, flags, copy=copy)


def send_tracked(socket: zmq.Socket[bytes], frames: Frames) -> zmq.MessageTracker:
    """Send a message, and return a tracker that is done once ZeroMQ has handed it to the kernel.

    Between processes of one machine that is as soon as the peer's ZeroMQ has read what was sent before, but for what
    the kernel's buffers hold. Each frame costs some microseconds more than by :func:`send`.

    Args:
        socket: The socket.
        frames: Header and elements; must not be modified until then.
    """
    parts = [zmq.Frame(part, track=True, copy=False, copy_threshold=0) for part in cut(frames)]
    socket.send_multipart(parts, copy=False)
    return zmq.MessageTracker(*(part.tracker for part in parts))  # of all: an empty part is done at once


def receive(socket: zmq.Socket[bytes], watch: ReceiveWatch | None = None) -> list[Any]:
    """Receive a message and return its frames, joined from their parts.

    Args:
        socket: The socket.
        watch: The watch of its connections, if any.

    Raises:
        zmq.Again: There is none within the socket's timeout.
        WireError: It ends in the middle of a frame, or has too many parts.
    """
    part = socket.recv(copy=False)
    if watch is not None:
        watch.delivered(connection_of(part) if watch.several else None)
    parts: list[Any] = [part.bytes]  # usually the only one, and short: cheaper to copy than to hold
    while part.more:
        part = socket.recv(copy=False)
        if len(parts) <= PARTS:
            parts.append(part.buffer)
    if len(parts) > PARTS:
        raise WireError(f"a message of more than {PARTS} parts")
    return join(parts) if len(parts) > 1 or len(parts[0]) >= PART_BYTES else parts


def cut(frames: Frames, part_bytes: int = PART_BYTES) -> list[Any]:
    """Split frames into parts for sending."""
    parts: list[Any] = []
    for frame in frames:
        if len(frame) < part_bytes:
            parts.append(frame)
        else:
            whole = memoryview(frame)
            parts += [whole[start : start + part_bytes] for start in range(0, len(whole) + 1, part_bytes)]
    return parts


def join(parts: list[Any], part_bytes: int = PART_BYTES) -> list[Any]:
    """Join parts into frames; the list is emptied, so that memory is not held twice.

    Raises:
        WireError: The last frame is incomplete, or a part is too long.
    """
    if all(len(part) < part_bytes for part in parts):
        return parts
    ends = [number for number, part in enumerate(parts) if len(part) < part_bytes]
    if not ends or ends[-1] != len(parts) - 1 or any(len(part) > part_bytes for part in parts):
        raise WireError(f"a message of {len(parts)} parts of up to {part_bytes} bytes that ends within a frame")
    counts = [end - start for start, end in zip([-1, *ends], ends, strict=False)]
    parts.reverse()
    return [_joined(parts, count) for count in counts]


def _joined(parts: list[Any], count: int) -> Any:
    """Take a number of parts from the end of a list and return them as one frame."""
    if count == 1:
        return parts.pop()
    whole = memoryview(np.empty(sum(len(part) for part in parts[-count:]), dtype=np.uint8))  # type: ignore[arg-type]
    start = 0
    for _ in range(count):
        part = parts.pop()
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


class Connection:
    """One end of the command channel: sends and receives messages over a socket owned by the caller.

    Between processes of one machine nothing is lost, and messages are sent unchanged; over TCP, lost ones are sent
    again. Both ends derive the mode from the worker's address.

    Args:
        socket: The socket.
        transmit: Sends frames through it.
        endpoint: The worker's address: a TCP connection may break.
        own: Whether frames may change as soon as :meth:`send` returns, and are copied.
        watch: The watch of the socket's connections, which learns of received messages.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        transmit: Callable[[list[Any]], None],
        endpoint: str,
        *,
        own: bool = False,
        watch: ReceiveWatch | None = None,
    ) -> None:
        self._watch = watch
        self._socket = socket
        self._transmit = transmit
        self._own = own
        self._reliable = Reliable(secrets.randbits(64)) if endpoint.startswith("tcp://") else None

    @property
    def due_s(self) -> float:
        """Time at which :meth:`flush` is due, on the monotonic clock; infinite if not before the next receipt."""
        return math.inf if self._reliable is None else self._reliable.due_s

    @property
    def keeps(self) -> bool:
        """True if frames are kept until they have arrived: they must not change, and need no other copy."""
        return self._reliable is not None

    @property
    def full(self) -> bool:
        """True if messages wait for acknowledgements of others."""
        return self._reliable is not None and self._reliable.full

    @property
    def progress(self) -> tuple[int, int]:
        """Messages that were sent until now, and how many of them have arrived; 0 between processes of one machine."""
        return (0, 0) if self._reliable is None else self._reliable.sender.progress

    def send(self, frames: list[Any]) -> None:
        """Send a message, now or as soon as the window allows."""
        if self._reliable is None:
            self._transmit(frames)
            return
        if self._own:
            frames = [frame if isinstance(frame, bytes) else bytes(frame) for frame in frames]
        self._reliable.post(frames)
        self._flush(time.monotonic())

    def connected(self) -> None:
        """Record that a new connection has been established."""
        if self._reliable is not None:
            self._reliable.connected()

    def flush(self, now_s: float) -> None:
        """Send due messages."""
        if self.due_s <= now_s:
            self._flush(now_s)

    def receive(self) -> list[Frames]:
        """Receive from the socket and return the messages that are next in order, if any.

        Raises:
            zmq.Again: There is nothing to receive within the socket's timeout.
            Restarted: The peer has restarted.
            WireError: The received data breaks the protocol.
        """
        frames = receive(self._socket, self._watch)
        return [frames] if self._reliable is None else self._reliable.take(frames, time.monotonic())

    def _flush(self, now_s: float) -> None:
        assert self._reliable is not None
        for frames in self._reliable.outgoing(now_s):
            self._transmit(frames)
