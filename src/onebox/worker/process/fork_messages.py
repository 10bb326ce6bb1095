"""Messages between a client and its fork server, over a private socket; see :mod:`onebox.worker.process.fork_server`.

:class:`SpawnRequest` is sent with :data:`DESCRIPTORS` file descriptors, :class:`Spawned` with one: that of the new
process.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

DESCRIPTORS = 4
"""Standard input, output and error of the new worker, and a pipe for its exit status."""

LONGEST = 1 << 16
"""Longest message in bytes, mostly the core numbers of a big host."""

STATUS_BYTES = 4
"""Length of the result of :func:`pack_status`."""


class SpawnRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="birth"):
    """Request for a worker.

    Args:
        number: Number of the request, repeated in the reply.
        cores: Cores that it may use, those of the requesting thread.
    """

    number: int
    cores: tuple[int, ...]


class ForkServerReady(Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The fork server has completed its imports and accepts requests."""


class Spawned(Struct, frozen=True, forbid_unknown_fields=True, tag="born"):
    """Reply: a worker has been started, with this process id."""

    number: int
    process: int


class SpawnRefused(Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """Reply: no worker has been started, with the reason."""

    number: int
    why: str


ForkServerReply = ForkServerReady | Spawned | SpawnRefused

_encode = msgspec.json.encode
_births = msgspec.json.Decoder(SpawnRequest)
_answers = msgspec.json.Decoder(ForkServerReply)


def encode(message: SpawnRequest | ForkServerReply) -> bytes:
    """Return the packet for a message."""
    return _encode(message)


def decode_spawn_request(packet: bytes) -> SpawnRequest:
    """Return the request in a packet.

    Raises:
        msgspec.DecodeError: It contains no request.
    """
    return _births.decode(packet)


def decode_fork_reply(packet: bytes) -> ForkServerReply:
    """Return the reply in a packet.

    Raises:
        msgspec.DecodeError: It contains no reply.
    """
    return _answers.decode(packet)


def pack_status(status: int) -> bytes:
    """Return an exit status as bytes; negative numbers are signals.

    Example:
        >>> read_status(pack_status(-9))
        -9
    """
    return status.to_bytes(STATUS_BYTES, "little", signed=True)


def read_status(packed: bytes) -> int | None:
    """Return the status packed by :func:`pack_status`; ``None`` for empty input, which means that the fork server has
    ended.
    """
    return int.from_bytes(packed, "little", signed=True) if len(packed) == STATUS_BYTES else None
