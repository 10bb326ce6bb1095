"""Snapshots of the training state: how a worker keeps its part, lets others have it, and takes it back.

A snapshot lies in a numbered slot, in the memory of the worker's host: the elements of its tensors one behind the
other, where :func:`layout` says. So a part of it is a run of bytes, whatever is in it, and the client alone knows
which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onebox.wire.program import TensorSpec, WireStruct

_ALIGN_BYTES = 64

PIECE_BYTES = 4 << 20
"""What travels at once from slot to slot: 30 ms of a network of 1 Gbit/s, which is what a step may have to wait."""

Number = bool | int | float | None
Extent = tuple[int, int]
"""Bytes of a slot: the first, and how many."""


class StateEntry(WireStruct, frozen=True):
    """One entry of an optimizer's state: of which parameter, under which key, and its tensor or number."""

    parameter: int
    key: str
    value: TensorSpec | Number


class Snapshot(WireStruct, frozen=True, tag="snapshot"):
    """Copy buffers, and what an optimizer remembers, to a slot, as they are at this point of the stream.

    Args:
        slot: The slot, a new one.
        buffers: Which buffers.
        optimizer: Which optimizer; 0 for none. Its entries come behind the buffers.
    """

    slot: int
    buffers: tuple[int, ...]
    optimizer: int = 0


class Give(WireStruct, frozen=True, tag="give"):
    """Send parts of a slot to a rank of a group, in the background.

    Args:
        slot: The slot.
        runs: Which bytes of it.
        group: The group, formed for this, of two.
        peer: The rank, which takes.
        over_s: Over how many seconds to spread it at least, so that steps have the network for themselves in between.
    """

    slot: int
    runs: tuple[Extent, ...]
    group: int
    peer: int
    over_s: float = 0.0


class Take(WireStruct, frozen=True, tag="take"):
    """Fill a new slot with what a rank of a group gives, in the background; one run lies behind the other.

    Args:
        slot: The slot.
        sizes: Bytes of each run.
        group: The group.
        peer: The rank, which gives.
    """

    slot: int
    sizes: tuple[int, ...]
    group: int
    peer: int


class Read(WireStruct, frozen=True, tag="read"):
    """Answer with bytes of a slot, in one frame."""

    slot: int
    start: int
    size_bytes: int


class Write(WireStruct, frozen=True, tag="write"):
    """Write the elements of one frame to a slot.

    Args:
        slot: The slot.
        start: The first byte that is written.
        size_bytes: Bytes of the whole slot, which is made where it is not there.
    """

    slot: int
    start: int
    size_bytes: int


class Fill(WireStruct, frozen=True, tag="fill"):
    """Fill buffers with what lies in slots.

    Args:
        buffers: Which.
        specs: What each becomes.
        places: For each the slot and the first byte.
    """

    buffers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    places: tuple[Extent, ...]


class Recall(WireStruct, frozen=True, tag="recall"):
    """Let an optimizer remember something of parameters that it has not stepped.

    Args:
        optimizer: Its number.
        entries: What.
        places: For each of those that are tensors the slot and the first byte.
        buffers: Instead of places for each of those a buffer that holds it, or will, and ends.
    """

    optimizer: int
    entries: tuple[StateEntry, ...]
    places: tuple[Extent, ...] = ()
    buffers: tuple[int, ...] = ()


class Lay(WireStruct, frozen=True, tag="lay"):
    """Let what an optimizer remembers of some parameters be buffers, too; answered with the entries.

    Args:
        optimizer: Its number.
        parameters: Positions of the parameters, each once, in ascending order; empty to ask for all entries only.
        buffers: One for each of their entries that is a tensor, in the order of the entries.
    """

    optimizer: int
    parameters: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()


class Remembered(WireStruct, frozen=True, tag="remembered"):
    """Answer with a tensor that an optimizer remembers of a parameter.

    Args:
        optimizer: Its number.
        parameter: The position of the parameter.
        key: Of the entry.
        first: The first row (index of the first dimension) that is wanted.
        rows: How many rows; 0 for the whole.
    """

    optimizer: int
    parameter: int
    key: str
    first: int = 0
    rows: int = 0


class Drop(WireStruct, frozen=True, tag="drop"):
    """Forget slots; those that are not there are passed over.

    Args:
        slots: Which.
        again: Whether there will be more like them, so that their memory is kept for these.
    """

    slots: tuple[int, ...]
    again: bool = False


SlotInstruction = Snapshot | Give | Take | Read | Write | Fill | Recall | Lay | Remembered | Drop


def layout(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Return where in a slot each of some tensors begins, in bytes, and how many bytes they take together."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += -(-spec.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return starts, end


def pieces(runs: Iterable[Extent]) -> Iterator[Extent]:
    """Cut runs into what travels at once."""
    for start, size in runs:
        for offset in range(0, size, PIECE_BYTES):
            yield start + offset, min(PIECE_BYTES, size - offset)


def end_to_end(sizes: Iterable[int]) -> Iterator[Extent]:
    """Return runs of some sizes that lie one behind the other."""
    end = 0
    for size in sizes:
        yield end, size
        end += size
