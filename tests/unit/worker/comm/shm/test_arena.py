"""Blocks of a span: never two at the same place, used again, and pages given back when much less is in use."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.worker.comm.shm.arena import Arena, MemoryBlock
from onebox.worker.memory.shared import SharedMemoryQuota

KB, MB = 1 << 10, 1 << 20


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=200))
@settings(max_examples=60)
def test_blocks_that_are_taken_do_not_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(4096, 1 << 40, lambda offset, size: None)
    taken: list[tuple[MemoryBlock, int]] = []
    for give, size in steps:
        if give and taken:
            arena.give(taken.pop(size % len(taken))[0])
        else:
            block = arena.take(size)
            assert block.offset >= 4096
            assert block.offset % 64 == 0
            assert size <= block.size <= max(64, 1.25 * size + 64)
            taken.append((block, size))
        spans = sorted((block.offset, block.offset + block.size) for block, _ in taken)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert arena.used_bytes == sum(block.size for block, _ in taken)


def test_the_block_that_came_back_last_is_the_next_of_its_size() -> None:
    arena = Arena(0, MB, lambda offset, size: None)
    blocks = [arena.take(1000) for _ in range(3)]
    arena.give(blocks[0])
    arena.give(blocks[2])
    assert arena.take(990) is blocks[2]
    assert arena.take(1000) is blocks[0]


def test_a_full_span_says_what_waits() -> None:
    arena = Arena(0, MB, lambda offset, size: None)
    arena.take(600 * KB)
    with pytest.raises(MemoryError, match="wait to be read by other workers"):
        arena.take(600 * KB)


def test_after_a_burst_pages_are_given_back() -> None:
    discarded: list[tuple[int, int]] = []
    arena = Arena(0, 1 << 40, lambda offset, size: discarded.append((offset, size)))
    for block in [arena.take(4 * MB) for _ in range(100)]:
        arena.give(block)
    assert arena.backed_bytes == 400 * MB
    assert not discarded, "the next burst may come soon"
    for _ in range(5000):
        arena.give(arena.take(4 * MB))
    assert 0 < arena.backed_bytes <= 64 * MB
    assert sum(size for _, size in discarded) == 400 * MB - arena.backed_bytes
    assert len(set(discarded)) == len(discarded)
    for _ in range(100):
        arena.take(4 * MB)
    assert arena.backed_bytes == 400 * MB


def test_pages_of_free_blocks_go_at_the_end() -> None:
    discarded: list[tuple[int, int]] = []
    arena = Arena(0, 1 << 40, lambda offset, size: discarded.append((offset, size)))
    held, free = arena.take(4 * MB), arena.take(5 * MB)
    arena.give(free)
    arena.empty()
    arena.empty()
    assert discarded == [(free.offset, free.size)]
    assert arena.backed_bytes == held.size
    assert arena.take(5 * MB) is free
    assert arena.backed_bytes == held.size + free.size


def test_a_block_that_a_finalizer_gives_back_meanwhile_is_counted_once() -> None:
    arena: Arena

    class Finalizing(SharedMemoryQuota):
        def charge(self, more_bytes: int, *, forced: bool = False) -> None:
            super().charge(more_bytes, forced=forced)
            if held and more_bytes > 0:
                arena.give(held.pop())

    held: list[MemoryBlock] = []
    quota = Finalizing()
    arena = Arena(0, 1 << 40, lambda offset, size: None, quota=quota)
    first = arena.take(4 * MB)
    held.append(first)
    assert arena.take(4 * MB) is first
    assert quota.used_bytes == arena.backed_bytes == arena.used_bytes == first.size
