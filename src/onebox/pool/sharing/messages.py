"""Messages between a process that shares its pool and its child processes, beside the workers' own."""

from __future__ import annotations

import msgspec

from onebox import errors
from onebox.errors import OneboxError, PoolError
from onebox.pool.devices import DeviceInfo
from onebox.wire.program import Message
from onebox.wire.protocol.requests import Instruction
from onebox.wire.protocol.responses import Reply


class Claim(Message, frozen=True, tag="claim"):
    """Child to parent, as the one instruction for a worker: reserve it for collectives of this child, or end that."""

    held: bool


class ChildEnvelope(Message, frozen=True):
    """Child to parent: an :class:`~onebox.wire.protocol.requests.Envelope` for a worker."""

    number: int
    answer: bool
    instructions: tuple[Instruction | Claim, ...]


class Welcome(Message, frozen=True, tag="welcome"):
    """Parent to child, the first message.

    Args:
        devices: The devices of the pool.
        first: First number of the child's buffers, definitions and groups.
        round_trip_s: See :attr:`onebox.pool.Pool.round_trip_s`.
        plain_links: See :attr:`onebox.pool.Pool.plain_links`.
        synchronous: Whether every operator is waited for.
    """

    devices: tuple[DeviceInfo, ...]
    first: int
    round_trip_s: float
    plain_links: bool
    synchronous: bool


class Moved(Message, frozen=True, tag="moved"):
    """Parent to child: the devices of the pool after a recovery.

    Args:
        devices: All of them.
    """

    devices: tuple[DeviceInfo, ...]


class Failed(Message, frozen=True, tag="failed"):
    """Parent to child, in place of a reply, or of the welcome: an error, by class, text and attributes."""

    number: int
    kind: str
    text: str
    about: dict[str, str | bool | int | float | tuple[int, ...] | None]


ENVELOPES = msgspec.msgpack.Decoder(ChildEnvelope)
WELCOMES = msgspec.msgpack.Decoder(Welcome | Failed)
REPLIES = msgspec.msgpack.Decoder(Reply | Failed | Moved)


def failed(number: int, error: BaseException) -> Failed:
    """Return the message about an error."""
    about = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | tuple | None)}
    return Failed(number, type(error).__name__, str(error), about)


def to_error(message: Failed) -> OneboxError:
    """Return the error that a message is about."""
    found = getattr(errors, message.kind, None)
    error = (found if isinstance(found, type) and issubclass(found, OneboxError) else PoolError)(message.text)
    for name in message.about.keys() & vars(error).keys():
        setattr(error, name, message.about[name])
    return error
