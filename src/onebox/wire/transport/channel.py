"""The channel: ZeroMQ sockets with CURVE encryption, and the encoding of messages.

A worker is the server: it binds, and accepts one client key. A message is one header frame (msgpack, strictly decoded)
and any number of element frames. The header is bounded before it is decoded.

ZeroMQ buffers data of unauthenticated peers up to the frame limit, so frames are small: a longer one is sent in parts
of :data:`PART_BYTES`, of which the last is shorter and may be empty. Between processes of one machine other users
cannot connect: their sockets are in a folder that only their user can access.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from onebox.errors import UsageError, WireError
from onebox.wire.protocol.requests import Envelope
from onebox.wire.protocol.responses import WorkerMessage

HEADER_BYTES = 64 << 20
"""Most bytes of a header: a program of 100,000 operators takes about 10 MB."""

FRAME_BYTES = 8 << 30
"""Most bytes of one frame: one tensor."""

PART_BYTES = 1 << 20
"""Most bytes of one part, which also bounds the memory that an unauthenticated connection can occupy on a worker. Small
parts are fast, too: encryption overlaps with sending (64 MiB over loopback: 1.7 GB/s, in one piece 0.6).
"""

_CURVE_BYTES = 1024
"""More than CURVE's overhead on a part (RFC 26: 33 bytes)."""

FRAMES = 65536
"""Most frames of one message."""

HANDSHAKE_MS = 3_000
"""Time limit of the CURVE handshake; the client tries again."""

_envelopes = msgspec.msgpack.Decoder(Envelope)
_sayings = msgspec.msgpack.Decoder(WorkerMessage)
_encoder = msgspec.msgpack.Encoder()

RECONNECT_MS = 50
RECONNECT_MOST_MS = 200
CONNECT_MS = 500
"""Delay before a broken connection is retried, and time limit of one attempt: an interruption ends without notice."""

HEARTBEAT_LOST_MS = 1_500
"""Silence after which a connection for heartbeats counts as broken."""

TCP_LOST_MS = 2_000
"""Time without an acknowledgement after which a TCP connection counts as dead. By default, the kernel would retry only
two seconds after an interruption of two seconds (RFC 6298), and give up after a quarter of an hour.
"""

Frames = Sequence[Any]


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


def detect_dead_peers(socket: zmq.Socket[bytes], *, beats: bool = False) -> None:
    """Make a dead TCP connection be detected and re-established soon; before the socket binds or connects.

    Args:
        socket: The socket, configured.
        beats: Whether only heartbeats use it, so that ZeroMQ can add its own; behind large tensors these would be
            delayed and look like silence.
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
    socket.send_multipart(cut(frames), flags, copy=copy)


def receive(socket: zmq.Socket[bytes]) -> list[Any]:
    """Receive a message and return its frames, joined from their parts.

    Raises:
        zmq.Again: There is none within the socket's timeout.
        WireError: It ends in the middle of a frame.
    """
    parts: list[Any] = [socket.recv()]  # usually the only one, and short: cheaper to copy than to hold
    while socket.getsockopt(zmq.RCVMORE):
        parts.append(socket.recv(copy=False).buffer)
    return join(parts)


def cut(frames: Frames) -> list[Any]:
    """Split frames into parts for sending."""
    parts: list[Any] = []
    for frame in frames:
        if len(frame) < PART_BYTES:
            parts.append(frame)
        else:
            whole = memoryview(frame)
            parts += [whole[start : start + PART_BYTES] for start in range(0, len(whole) + 1, PART_BYTES)]
    return parts


def join(parts: list[Any]) -> list[Any]:
    """Join parts into frames; the list is emptied, so that memory is not held twice.

    Raises:
        WireError: The last frame is incomplete, or a part is too long.
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


def encode(message: Envelope | WorkerMessage) -> bytes:
    """Encode a message as a header frame.

    Raises:
        WireError: It exceeds the header limit, or contains an unsupported number or text.
    """
    try:
        header = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"a message that cannot be encoded: {error}") from None
    if len(header) > HEADER_BYTES:
        raise WireError(f"a header of {len(header)} bytes is over the limit of {HEADER_BYTES}")
    return header


def check_frames(frames: Frames) -> None:
    """Require that element frames are within the limits, before they are sent: a worker drops larger ones.

    Raises:
        WireError: They are not.
    """
    if len(frames) >= FRAMES:
        raise WireError(f"a message of {len(frames)} tensors; allowed are {FRAMES - 1}: send several messages")
    largest = max((len(frame) for frame in frames), default=0)
    if largest > FRAME_BYTES:
        raise WireError(f"a tensor of {largest} bytes; allowed are {FRAME_BYTES}: cut it into smaller ones")


def _decode(decoder: msgspec.msgpack.Decoder[Any], parts: Frames, what: str) -> Any:
    if not parts or len(parts) > FRAMES:
        raise WireError(f"{what} of {len(parts)} frames; allowed are 1 to {FRAMES}")
    header = memoryview(parts[0])
    if len(header) > HEADER_BYTES:
        raise WireError(f"{what} with a header of {len(header)} bytes; allowed are {HEADER_BYTES}")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what} that is not of this protocol: {error}") from None


def decode_envelope(parts: Frames) -> tuple[Envelope, Frames]:
    """Decode a client's message; return it with its element frames.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    envelope: Envelope = _decode(_envelopes, parts, "an envelope")
    return envelope, parts[1:]


def decode_worker_message(parts: Frames) -> tuple[WorkerMessage, Frames]:
    """Decode a worker's message; return it with its element frames.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    saying: WorkerMessage = _decode(_sayings, parts, "a worker's message")
    return saying, parts[1:]
