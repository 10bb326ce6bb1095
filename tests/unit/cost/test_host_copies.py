"""Memory of a host for an optimizer there: its sizes are those that the worker takes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from onebox.cost.host_copies import aligned_starts, host_copy_bytes, runs, staging_bytes

SIZES = st.lists(st.integers(0, 160), max_size=12)


@given(sizes=SIZES, most=st.integers(1, 800))
def test_runs_are_all_tensors_in_order_and_no_longer_than_they_may_be(sizes: list[int], most: int) -> None:
    found = runs(sizes, most)
    assert [index for run in found for index in run] == list(range(len(sizes)))
    for run in found:
        assert len(run) == 1 or sum(sizes[index] for index in run) <= most
    for run, following in itertools.pairwise(found):
        assert sum(sizes[index] for index in run) + sizes[following[0]] > most


@given(sizes=SIZES, most=st.integers(1, 800))
def test_each_run_fits_into_a_buffer_beside_which_another_one_is(sizes: list[int], most: int) -> None:
    divided, buffers = runs(sizes, most), staging_bytes(sizes, most)
    assert len(buffers) == min(2, len(divided))
    for run in divided:
        starts, end = aligned_starts([sizes[index] for index in run])
        assert all(start % 64 == 0 for start in starts)
        assert end <= buffers[0] == buffers[-1]


def test_copies_and_the_buffers_of_two_runs_are_counted() -> None:
    assert host_copy_bytes([]) == 0
    assert host_copy_bytes([100]) == 2 * 128, "a copy, and one buffer"
    assert host_copy_bytes([40 << 20, 100]) == (40 << 20) + 128 + 2 * (40 << 20)
