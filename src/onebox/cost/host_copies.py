"""The memory of a host that an optimizer takes there for a GPU's parameters: copies of them, and runs of gradients."""

from __future__ import annotations

from collections.abc import Sequence

RUN_BYTES = 32 << 20
"""Size of a run that is transferred or scaled at once: 1 to 3 ms of a PCIe link, so that the few kernels of a run cost
nothing."""

_ALIGN_BYTES = 64

_RUNS = 2  # in memory at a time: one is updated while the next one comes


def runs(sizes: Sequence[int], most_bytes: int = RUN_BYTES) -> list[range]:
    """Divide tensors of some sizes into runs of at most the given bytes; a larger tensor is a run of its own.

    Example:
        >>> runs([8, 8, 36, 4], 16)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    found: list[range] = []
    start, size_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and size_bytes + size > most_bytes:
            found.append(range(start, index))
            start, size_bytes = index, 0
        size_bytes += size
    return [*found, range(start, len(sizes))] if sizes else found


def aligned_starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each tensor in memory for all of them, and its size."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return starts, end


def staging_bytes(sizes: Sequence[int], most_bytes: int = RUN_BYTES) -> list[int]:
    """Return the bytes of each buffer through which the gradients of parameters of some sizes pass."""
    divided = runs(sizes, most_bytes)
    longest = max((aligned_starts([sizes[index] for index in run])[1] for run in divided), default=0)
    return [longest for _ in divided[:_RUNS]]


def host_copy_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the host for copies of parameters of some sizes, and for the buffers of their gradients.

    Example:
        >>> host_copy_bytes([100, 40])
        384
    """
    return aligned_starts(sizes)[1] + sum(staging_bytes(sizes))
