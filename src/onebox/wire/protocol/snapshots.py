"""Snapshots of the training state: instructions for storing, transferring and restoring a worker's part.

A snapshot is in a numbered slot in host memory of the worker: the elements of its tensors, concatenated according to
:func:`layout`. So a part of it is a range of bytes, whose meaning only the client tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onebox.wire.program import TensorSpec, WireStruct

_ALIGN_BYTES = 64

PIECE_BYTES = 4 << 20
"""Piece size of transfers between slots: 30 ms on a network of 1 Gbit/s, the longest delay of a step."""

Number = bool | int | float | None
Extent = tuple[int, int]
"""A range of bytes of a slot: offset and length."""


class StateEntry(WireStruct, frozen=True):
    """One entry of an optimizer's state: its parameter, its key, and its tensor or number."""

    parameter: int
    key: str
    value: TensorSpec | Number


class Snapshot(WireStruct, frozen=True, tag="snapshot"):
    """Copy buffers and optimizer state to a slot, as of this point of the stream.

    Args:
        slot: The slot, a new one.
        buffers: The buffers.
        optimizer: The optimizer; 0 for none. Its entries follow the buffers.
    """

    slot: int
    buffers: tuple[int, ...]
    optimizer: int = 0


class Give(WireStruct, frozen=True, tag="give"):
    """Send parts of a slot to a rank of a group, in the background.

    Args:
        slot: The slot.
        runs: Its byte ranges.
        group: The group of two, formed for this.
        peer: The receiving rank.
        over_s: Least number of seconds over which to spread it, so that steps can use the network in between.
    """

    slot: int
    runs: tuple[Extent, ...]
    group: int
    peer: int
    over_s: float = 0.0


class Take(WireStruct, frozen=True, tag="take"):
    """Fill a new slot with data from a rank of a group, in the background; ranges are concatenated.

    Args:
        slot: The slot.
        sizes: Bytes of each run.
        group: The group.
        peer: The sending rank.
    """

    slot: int
    sizes: tuple[int, ...]
    group: int
    peer: int


class Read(WireStruct, frozen=True, tag="read"):
    """Reply with bytes of a slot, in one frame."""

    slot: int
    start: int
    size_bytes: int


class Write(WireStruct, frozen=True, tag="write"):
    """Write the elements of one frame to a slot.

    Args:
        slot: The slot.
        start: Offset of the first byte.
        size_bytes: Bytes of the whole slot, which is created if missing.
    """

    slot: int
    start: int
    size_bytes: int


class Fill(WireStruct, frozen=True, tag="fill"):
    """Fill buffers from slots.

    Args:
        buffers: The buffers.
        specs: Their new specs.
        places: Slot and offset of each.
    """

    buffers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    places: tuple[Extent, ...]


class Recall(WireStruct, frozen=True, tag="recall"):
    """Set optimizer state of parameters that an optimizer has not updated yet.

    Args:
        optimizer: Its number.
        entries: The entries.
        places: Slot and offset of each tensor among them.
        buffers: In place of ``places``, a buffer for each tensor, present or in transit, which ends.
    """

    optimizer: int
    entries: tuple[StateEntry, ...]
    places: tuple[Extent, ...] = ()
    buffers: tuple[int, ...] = ()


class Lay(WireStruct, frozen=True, tag="lay"):
    """Turn optimizer state of some parameters into buffers; the reply is the entries.

    Args:
        optimizer: Its number.
        parameters: Positions of the parameters, each once, in ascending order; empty to return all entries only.
        buffers: One for each entry that is a tensor, in order.
    """

    optimizer: int
    parameters: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()


class Remembered(WireStruct, frozen=True, tag="remembered"):
    """Reply with a tensor of a parameter's optimizer state.

    Args:
        optimizer: Its number.
        parameter: The position of the parameter.
        key: Key of the entry.
        first: First requested row (index of the first dimension).
        rows: Number of rows; 0 for the whole.
    """

    optimizer: int
    parameter: int
    key: str
    first: int = 0
    rows: int = 0


class Drop(WireStruct, frozen=True, tag="drop"):
    """Drop slots; missing ones are ignored.

    Args:
        slots: The slots.
        again: Whether to keep their memory for similar ones.
    """

    slots: tuple[int, ...]
    again: bool = False


SlotInstruction = Snapshot | Give | Take | Read | Write | Fill | Recall | Lay | Remembered | Drop


def layout(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a slot, in bytes, and their total bytes."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += -(-spec.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return starts, end


def pieces(runs: Iterable[Extent]) -> Iterator[Extent]:
    """Split byte ranges into pieces for transfer."""
    for start, size in runs:
        for offset in range(0, size, PIECE_BYTES):
            yield start + offset, min(PIECE_BYTES, size - offset)


def end_to_end(sizes: Iterable[int]) -> Iterator[Extent]:
    """Return byte ranges of given sizes, concatenated."""
    end = 0
    for size in sizes:
        yield end, size
        end += size
