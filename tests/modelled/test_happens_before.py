"""Order of accesses: vector clocks, ranges of bytes, races."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.accelerator.happens_before import Access, AccessCheck, byte_ranges, join


@pytest.fixture(autouse=True)
def accelerator() -> None:
    """No device: what is tested here is pure."""


def test_accesses_of_one_context_are_in_order() -> None:
    check, clock = AccessCheck(), {1: 2}
    assert check.write((0, 8), Access(1, 1, "a"), {1: 1}) == []
    assert check.read((0, 8), Access(1, 2, "b"), clock) == []
    assert check.write((0, 8), Access(1, 2, "c"), clock) == []


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("write", "read", "read after write"),
        ("read", "write", "write after read"),
        ("write", "write", "write after write"),
    ],
)
def test_accesses_without_an_order_are_a_race_where_they_overlap(first: str, second: str, kind: str) -> None:
    for start, races in ((0, 1), (7, 1), (8, 0)):
        check = AccessCheck()
        assert getattr(check, first)((0, 8), Access(1, 1, "a"), {1: 1}) == []
        found = getattr(check, second)((start, start + 8), Access(2, 1, "b"), {2: 1})
        assert [race.kind for race in found] == [kind] * races
        check = AccessCheck()
        getattr(check, first)((0, 8), Access(1, 1, "a"), {1: 1})
        assert getattr(check, second)((start, start + 8), Access(2, 1, "b"), {1: 1, 2: 1}) == []


def test_reads_need_no_order_and_each_of_them_counts_for_the_next_write() -> None:
    check = AccessCheck()
    for context in (1, 2, 3):
        assert check.read((0, 8), Access(context, 1, str(context)), {context: 1}) == []
    races = check.write((2, 4), Access(4, 1, "w"), {2: 1, 4: 1})
    assert sorted(race.first.label for race in races) == ["1", "3"]


def test_memory_that_is_given_back_is_forgotten() -> None:
    check = AccessCheck()
    check.write((0, 8), Access(1, 1, "a"), {1: 1})
    check.forget((0, 4))
    assert check.write((0, 4), Access(2, 1, "b"), {2: 1}) == []
    assert len(check.write((0, 8), Access(3, 1, "c"), {2: 1, 3: 1})) == 1


def test_clocks_join_to_the_later_step_of_each() -> None:
    clock = {1: 3, 2: 1}
    join(clock, {1: 2, 2: 5, 3: 1})
    assert clock == {1: 3, 2: 5, 3: 1}


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4), st.permutations(range(4)))
def test_ranges_are_the_bytes_of_the_elements(dimensions: list[tuple[int, bool]], order: list[int]) -> None:
    tensor = torch.empty([size + 1 for size, _ in dimensions], dtype=torch.int32)
    for index, (size, cut) in enumerate(dimensions):
        tensor = tensor.narrow(index, 0, size) if cut else tensor
    tensor = tensor.permute([index for index in order if index < tensor.dim()])
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for index, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        offsets += (torch.arange(size) * stride).view([-1 if at == index else 1 for at in range(tensor.dim())])
    elements = {int(offset) * 4 + byte for offset in offsets.flatten() for byte in range(4)}
    ranges = byte_ranges(0, tensor.shape, tensor.stride(), 4)
    assert {byte for start, end in ranges for byte in range(start, end)} == elements
