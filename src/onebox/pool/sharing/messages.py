"""Messages between a process that shares its pool and its child processes."""

from __future__ import annotations

from typing import Any

import msgspec

from onebox import errors
from onebox.errors import OneboxError, PoolError, WireError
from onebox.pool.devices import DeviceInfo
from onebox.wire.program import Message
from onebox.wire.protocol.responses import LinkTraffic, Result

SPAN = 1 << 44
"""Numbers of buffers and definitions of a process: child ``k`` has those from ``k * SPAN``, the parent lower ones."""

Fact = str | bool | int | float | None | tuple[int, int]


class Post(Message, frozen=True, tag="post"):
    """Child to parent: instructions for a worker, with frames.

    Args:
        number: Number of the request; the reply repeats it.
        worker: The worker.
        answer: Whether the worker is to reply.
        frees: Whether they only free buffers, which a child may also do on a device that is another one's by now.
        instructions: Encoded instructions, which the parent forwards as they are.
    """

    number: int
    worker: int
    answer: bool
    frees: bool
    instructions: msgspec.Raw


class Form(Message, frozen=True, tag="form"):
    """Child to parent: form a group of workers, for transfers from worker to worker."""

    number: int
    workers: tuple[int, ...]


class Leave(Message, frozen=True, tag="leave"):
    """Child to parent: dissolve a group."""

    number: int
    group: int
    workers: tuple[int, ...]


class Claim(Message, frozen=True, tag="claim"):
    """Child to parent: reserve a device for this child, or end that.

    Args:
        number: Number of the request.
        worker: The device.
        held: Whether to reserve it.
    """

    number: int
    worker: int
    held: bool


class Memory(Message, frozen=True, tag="memory"):
    """Child to parent: return the memory of a device, without waiting for collectives of another child there."""

    number: int
    worker: int


class Detach(Message, frozen=True, tag="detach"):
    """Child to parent: the orderly end, after all requests."""


Request = Post | Form | Leave | Claim | Memory | Detach


class Attached(Message, frozen=True, tag="attached"):
    """Parent to child, the first message.

    Args:
        devices: The devices of the pool.
        first: First number of the child's buffers and definitions.
        round_trip_s: See :attr:`onebox.pool.Pool.round_trip_s`.
        plain_links: See :attr:`onebox.pool.Pool.plain_links`.
        synchronous: Whether every operator is waited for.
    """

    devices: tuple[DeviceInfo, ...]
    first: int
    round_trip_s: float
    plain_links: bool
    synchronous: bool


class Replied(Message, frozen=True, tag="replied"):
    """Parent to child: a worker's reply, with the frames of its tensors; or the number of a group in ``group``."""

    number: int
    results: tuple[Result, ...] = ()
    times_ns: tuple[int, ...] = ()
    used_bytes: tuple[int, ...] = ()
    traffic: tuple[LinkTraffic, ...] = ()
    clock_ns: int = 0
    group: int = 0


class Failed(Message, frozen=True, tag="failed"):
    """Parent to child: a request has failed.

    Args:
        number: The request.
        kind: Class of the error, one of :mod:`onebox.errors`.
        message: Its text.
        about: Its attributes.
    """

    number: int
    kind: str
    message: str
    about: dict[str, Fact]


Response = Attached | Replied | Failed

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_responses = msgspec.msgpack.Decoder(Response)


def encode_message(message: Request | Response) -> bytes:
    """Encode a message.

    Raises:
        WireError: It contains an unsupported number or text.
    """
    try:
        return _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"a message that cannot be encoded: {error}") from None


def decode_request(header: Any) -> Request:
    """Decode a child's message.

    Raises:
        msgspec.DecodeError: It is none.
    """
    request: Request = _requests.decode(header)
    return request


def decode_response(header: Any) -> Response:
    """Decode the parent's message.

    Raises:
        msgspec.DecodeError: It is none.
    """
    response: Response = _responses.decode(header)
    return response


def failed(number: int, error: BaseException) -> Failed:
    """Return the message about an error."""
    if not isinstance(error, OneboxError):
        return Failed(number, "PoolError", f"{type(error).__name__}: {error}", {})
    about = {name: value for name, value in vars(error).items() if _is_fact(value)}
    return Failed(number, type(error).__name__, str(error.args[0] if error.args else error), about)


def _is_fact(value: object) -> bool:
    try:
        msgspec.convert(value, Fact)
    except msgspec.ValidationError:
        return False
    return True


def to_error(message: Failed) -> OneboxError:
    """Return the error that a message is about."""
    found = getattr(errors, message.kind, None)
    kind = found if isinstance(found, type) and issubclass(found, OneboxError) else PoolError
    error = kind(message.message)
    for name, value in message.about.items():
        if name in vars(error):
            setattr(error, name, value)
    return error
