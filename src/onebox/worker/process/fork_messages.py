"""What a client and its nursery say to each other, over a socket that only these two have; see
:mod:`onebox.worker.process.fork_server`.

With :class:`SpawnRequest` come :data:`DESCRIPTORS` file descriptors, with :class:`Spawned` one: that of the new
process.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

DESCRIPTORS = 4
"""Standard input, output and error of the new worker, and a pipe into which the nursery writes how it ended."""

LONGEST = 1 << 16
"""The most bytes of a message: the numbers of all cores of a big host are most of it."""

STATUS_BYTES = 4
"""How many bytes :func:`pack_status` makes."""


class SpawnRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="birth"):
    """A worker is wanted.

    Args:
        number: The number of this wish; the answer has it, too.
        cores: The cores that it may run on, as those that the asking thread may run on at the time.
    """

    number: int
    cores: tuple[int, ...]


class ForkServerReady(Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The nursery has imported all, and waits for wishes."""


class Spawned(Struct, frozen=True, forbid_unknown_fields=True, tag="born"):
    """A worker has been started as this process."""

    number: int
    process: int


class SpawnRefused(Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """No worker has been started; why."""

    number: int
    why: str


ForkServerReply = ForkServerReady | Spawned | SpawnRefused

_encode = msgspec.json.encode
_births = msgspec.json.Decoder(SpawnRequest)
_answers = msgspec.json.Decoder(ForkServerReply)


def encode(message: SpawnRequest | ForkServerReply) -> bytes:
    """Return the one packet that a message is."""
    return _encode(message)


def decode_spawn_request(packet: bytes) -> SpawnRequest:
    """Return a wish.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return _births.decode(packet)


def decode_fork_reply(packet: bytes) -> ForkServerReply:
    """Return an answer.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return _answers.decode(packet)


def pack_status(status: int) -> bytes:
    """Return an exit status as bytes; below 0 is the number of a signal.

    Example:
        >>> read_status(pack_status(-9))
        -9
    """
    return status.to_bytes(STATUS_BYTES, "little", signed=True)


def read_status(packed: bytes) -> int | None:
    """Return what :func:`pack_status` has packed; ``None`` of nothing, which is all that a nursery says that ended."""
    return int.from_bytes(packed, "little", signed=True) if len(packed) == STATUS_BYTES else None
