"""Letters between the ranks of a group on one host: tensors in memory that the writer owns and the readers map.

The memory of a rank holds a page of control words, a lane to each rank, and an arena with everything else. A letter is
a block with its elements, and for each reader a cell that says what it is. The cells of a lane are a linked list: each
names the cell that the next letter will have, so that a reader finds its way while cells are used again in any order. A
reader who is done with a letter appends its cell to the lane's list of returned cells in the same way; the writer walks
that list to get cells and blocks back. The last returned cell stays with the list until there is another one behind it.

One word counts the letters of a lane, another the returned ones; each is written by one side only, after what it
speaks of. So nobody ever waits to send, however many letters are unread, and there are no locks.
"""

from __future__ import annotations

import mmap
from struct import Struct
from typing import NamedTuple

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec

LEFT, FREE = 0, 8
"""Words of the control page, each in a cache line of its own: the rank has left; from here on they are free for the
user."""

TYPE_NAMES = list(DTYPES)
TYPE_CODES = {name: code for code, name in enumerate(TYPE_NAMES)}

_LANE_BYTES = 1024
SENT, RETURNED = 0, 8  # words of a lane
FIRST_CELLS = 128  # byte in a lane: its first two cells
CELL_BYTES = 256
CHUNK_CELLS = 64
NEXT_RETURNED = 8  # byte in a cell
_FIELDS = 10
DIMENSIONS = CELL_BYTES // 8 - _FIELDS
"""The most dimensions of a tensor that travels."""

HEADERS = [Struct(f"={_FIELDS + dimensions}q") for dimensions in range(DIMENSIONS + 1)]
HEADER = HEADERS[DIMENSIONS]
NUMBER = Struct("=q")
"""A cell's header by the number of its tensor's dimensions, the longest of them, and a number."""


class ShmMessage(NamedTuple):
    """What has come for a reader.

    Args:
        cell: Where its header is in the writer's memory.
        code: What it belongs to; free for the user.
        offset: Where its elements are; -1 where there are none because it comes from a device that does not compute.
        at_ns: When it is there, on the monotonic clock.
        spec: What it is.
    """

    cell: int
    code: int
    offset: int
    at_ns: int
    spec: TensorSpec


def check_dimensions(spec: TensorSpec) -> None:
    """Require that a tensor can travel.

    Raises:
        WireError: It has too many dimensions.
    """
    if len(spec.shape) > DIMENSIONS:
        raise WireError(f"a tensor of {len(spec.shape)} dimensions cannot travel; at most {DIMENSIONS} are allowed")


def lane_start(peer: int) -> int:
    """Return the byte in a rank's memory at which its lane to a peer begins."""
    return mmap.PAGESIZE + peer * _LANE_BYTES
