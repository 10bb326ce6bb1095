"""The channel: ZeroMQ sockets with CURVE encryption, and the coding of messages on them.

A worker is the server: it binds, and lets in one client key. A message is one header frame (msgpack, strictly decoded)
and any number of element frames. The header is bounded before it is decoded, the frames before they are received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from onebox.errors import WireError
from onebox.wire.messages import Envelope, Saying

HEADER_BYTES = 64 << 20
"""The most bytes of a header: a program of 100,000 operators takes about 10 MB."""

FRAME_BYTES = 8 << 30
"""The most bytes of one frame: one tensor."""

FRAMES = 65536
"""The most frames of one message."""

HANDSHAKE_MS = 10_000
"""How long a peer may take for the CURVE handshake."""

_envelopes = msgspec.msgpack.Decoder(Envelope)
_sayings = msgspec.msgpack.Decoder(Saying)
_encoder = msgspec.msgpack.Encoder()

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
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)


def encode(message: Envelope | Saying) -> bytes:
    """Return the header frame of a message.

    Raises:
        WireError: It is larger than a header may be, or holds a number or text that does not travel.
    """
    try:
        header = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"a message that cannot be encoded: {error}") from None
    if len(header) > HEADER_BYTES:
        raise WireError(f"a header of {len(header)} bytes is over the limit of {HEADER_BYTES}")
    return header


def check_frames(frames: Frames) -> None:
    """Require that element frames are within the limits, before they are sent: a worker drops what is over them.

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
    """Return a client's message and its element frames.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    envelope: Envelope = _decode(_envelopes, parts, "an envelope")
    return envelope, parts[1:]


def decode_saying(parts: Frames) -> tuple[Saying, Frames]:
    """Return a worker's message and its element frames.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    saying: Saying = _decode(_sayings, parts, "a worker's message")
    return saying, parts[1:]
