"""Shared-memory layout of messages between ranks on one host: the writer owns the memory, the readers map it.

The memory of a rank holds a page of control words, a lane to each rank, and an arena for everything else. A message is
a block with its elements, and for each reader a cell with its header. The cells of a lane are a linked list: each names
the cell of the next message, so that cells can be reused in any order. When a reader is done with a message, it appends
the cell to the lane's list of returned cells in the same way; the writer walks that list to reclaim cells and blocks.
The last returned cell stays in the list until another one follows.

One word counts the messages of a lane, another the returned ones; each is written by one side only, after the data that
it announces. So sending never blocks, for any number of unread messages, and there are no locks.
"""

from __future__ import annotations

import mmap
from struct import Struct
from typing import NamedTuple

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec

LEFT, FREE = 0, 8
"""Words of the control page, each in its own cache line: the rank has left; the words from here on are free for the
user."""

TYPE_NAMES = list(DTYPES)
TYPE_CODES = {name: code for code, name in enumerate(TYPE_NAMES)}

_LANE_BYTES = 1024
SENT, RETURNED, CLOSED = 0, 8, 9  # words of a lane; the last two are written by the reader
FIRST_CELLS = 128  # offset in a lane: its first two cells
CELL_BYTES = 256
CHUNK_CELLS = 64
NEXT_RETURNED = 8  # offset in a cell
_FIELDS = 10
DIMENSIONS = CELL_BYTES // 8 - _FIELDS
"""Most dimensions of a tensor."""

HEADERS = [Struct(f"={_FIELDS + dimensions}q") for dimensions in range(DIMENSIONS + 1)]
HEADER = HEADERS[DIMENSIONS]
NUMBER = Struct("=q")
"""Layouts of a cell's header by the number of dimensions, of the longest header, and of a number."""


class ShmMessage(NamedTuple):
    """A received message.

    Args:
        cell: Offset of its header in the writer's memory.
        code: Purpose code; free for the user.
        offset: Offset of its elements; -1 for a message from a device without values.
        at_ns: Time since which it is available, on the monotonic clock.
        spec: Spec of the tensor.
    """

    cell: int
    code: int
    offset: int
    at_ns: int
    spec: TensorSpec


def check_dimensions(spec: TensorSpec) -> None:
    """Require that a tensor can be sent.

    Raises:
        WireError: It has too many dimensions.
    """
    if len(spec.shape) > DIMENSIONS:
        raise WireError(f"a tensor of {len(spec.shape)} dimensions cannot travel; at most {DIMENSIONS} are allowed")


def lane_start(peer: int) -> int:
    """Return the offset in a rank's memory of its lane to a peer."""
    return mmap.PAGESIZE + peer * _LANE_BYTES
