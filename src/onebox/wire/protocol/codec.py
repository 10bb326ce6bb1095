"""Encoding and decoding of messages: a header in msgpack, strictly decoded, and any number of element frames.

The header is bounded before it is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from onebox.errors import WireError
from onebox.wire.clean_text import clean
from onebox.wire.program import Message
from onebox.wire.protocol.requests import Envelope
from onebox.wire.protocol.responses import WorkerMessage

HEADER_BYTES = 64 << 20
"""Most bytes of a header: a program of 100,000 operators takes about 10 MB."""

FRAME_BYTES = 8 << 30
"""Most bytes of one frame: one tensor."""

FRAMES = 65536
"""Most frames of one message."""

_envelopes = msgspec.msgpack.Decoder(Envelope)
_messages = msgspec.msgpack.Decoder(WorkerMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
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


def check_frames(frames: Sequence[Any]) -> int:
    """Require that element frames are within the limits, before they are sent: a worker drops larger ones; return their
    bytes.

    Raises:
        WireError: They are not.
    """
    if len(frames) >= FRAMES:
        raise WireError(f"a message of {len(frames)} tensors; allowed are {FRAMES - 1}: send several messages")
    sizes = [len(frame) for frame in frames]
    if sizes and max(sizes) > FRAME_BYTES:
        raise WireError(f"a tensor of {max(sizes)} bytes; allowed are {FRAME_BYTES}: cut it into smaller ones")
    return sum(sizes)


def decode(decoder: msgspec.msgpack.Decoder[Any], parts: Sequence[Any], what: str) -> Any:
    """Decode a message's header.

    Args:
        decoder: The decoder of its types.
        parts: The header, and its frames.
        what: What it should be, for the error.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    if not parts or len(parts) > FRAMES:
        raise WireError(f"{what} of {len(parts)} frames; allowed are 1 to {FRAMES}")
    header = memoryview(parts[0])
    if len(header) > HEADER_BYTES:
        raise WireError(f"{what} with a header of {len(header)} bytes; allowed are {HEADER_BYTES}")
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what} that is not of this protocol: {error}") from None


def decode_envelope(parts: Sequence[Any]) -> tuple[Envelope, Sequence[Any]]:
    """Decode a client's message; return it with its element frames.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    envelope: Envelope = decode(_envelopes, parts, "an envelope")
    return envelope, parts[1:]


def decode_worker_message(parts: Sequence[Any]) -> tuple[WorkerMessage, Sequence[Any]]:
    """Decode a worker's message, with its texts cleaned; return it with its element frames.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    message: WorkerMessage = decode(_messages, parts, "a worker's message")
    return clean(message), parts[1:]
