"""Batches are divided so that all devices end together, and the division that was fastest is kept."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from onebox.vgpu.distributed.batch_division import (
    ALIKE,
    MEASURED,
    WARM,
    BatchDivision,
    Trials,
    candidates,
    chunk_sizes,
    divided_by,
    outcome,
)

some_speeds = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(st.integers(1, 500), some_speeds, st.integers(1, 3))
def test_chunks_add_up_and_each_device_gets_the_least_where_the_batch_allows(
    total: int, speeds: list[float], least: int
) -> None:
    sizes = chunk_sizes(total, speeds, least)
    assert sum(sizes) == total
    assert all(not size or size >= min(least, total) for size in sizes)
    if total >= least * len(speeds):
        assert all(sizes)


@given(st.integers(1, 9), st.lists(st.floats(0.01, 100), min_size=1, max_size=3))
def test_no_other_chunks_end_earlier(total: int, speeds: list[float]) -> None:
    def longest(sizes: tuple[int, ...] | list[int]) -> float:
        return max(size / speed for size, speed in zip(sizes, speeds, strict=True))

    others = itertools.product(range(total + 1), repeat=len(speeds))
    enough = total >= len(speeds)
    best = min(longest(sizes) for sizes in others if sum(sizes) == total and (all(sizes) or not enough))
    if enough:
        assert longest(chunk_sizes(total, speeds)) <= best * (1 + 1e-9)


def test_equal_chunks_are_those_of_pytorch() -> None:
    assert BatchDivision((0, 1, 2)).chunks(10) == {0: 4, 1: 4, 2: 2}
    assert BatchDivision((0, 1, 2)).chunks(2) == {0: 1, 1: 1}
    assert BatchDivision((0, 2)).chunks(4) == {0: 2, 2: 2}
    assert BatchDivision((0, 2), (3.0, 1.0)).chunks(8) == {0: 6, 2: 2}
    assert BatchDivision((0, 2), (9.0, 1.0)).chunks(8, 2) == {0: 6, 2: 2}
    assert BatchDivision((0, 2), (9.0, 1.0)).chunks(3, 2) == {0: 3}


def test_speeds_that_are_alike_count_as_equal() -> None:
    assert divided_by({0: 1.0, 2: 1.1}) == BatchDivision((0, 2))
    assert divided_by({0: 1.0, 2: 2.0}) == BatchDivision((0, 2), (1.0, 2.0))


def test_candidates_leave_out_the_slowest_first() -> None:
    assert candidates([1.0, 4.0, 3.9, 0.2]) == [
        BatchDivision((0, 1, 2, 3), (1.0, 4.0, 3.9, 0.2)),
        BatchDivision((0, 1, 2), (1.0, 4.0, 3.9)),
        BatchDivision((1, 2)),
        BatchDivision((1,)),
    ]
    assert candidates([1.0, 1.1]) == [BatchDivision((0, 1)), BatchDivision((0,))], "the first one has the model"


def settled(speeds: list[float], samples: int, each_device_s: float = 0.0, *, few: float = 1.0) -> Trials:
    """Return a search over devices that take these times, with so many seconds more for each that takes part."""
    trials = Trials(len(speeds))
    for _ in range((WARM + MEASURED) * (len(speeds) + 3)):
        chunks = trials.current.chunks(samples)
        actual = {device: speeds[device] * (few if chunks[device] < samples / 4 else 1) for device in chunks}
        seconds = max(size / actual[device] for device, size in chunks.items())
        trials.note(trials.current, seconds + each_device_s * len(chunks), actual)
    return trials


@given(some_speeds, st.integers(2, 200), st.floats(0, 1))
def test_the_outcome_is_as_fast_as_equal_chunks_and_as_the_fastest_device(
    speeds: list[float], samples: int, each_device_s: float
) -> None:
    trials = settled(speeds, samples, each_device_s)
    assert trials.settled
    chunks = trials.current.chunks(samples)
    found_s = max(size / speeds[device] for device, size in chunks.items()) + each_device_s * len(chunks)
    equal = BatchDivision(tuple(range(len(speeds)))).chunks(samples)
    equal_s = max(size / speeds[device] for device, size in equal.items()) + each_device_s * len(equal)
    alone_s = samples / max(speeds) * ALIKE + each_device_s  # the one with the model is alike
    assert found_s <= 1.03 * min(equal_s, alone_s)


def test_a_device_that_is_slower_with_few_samples_gets_fewer() -> None:
    fast, slow = settled([4.0, 1.0], 40, few=0.5).current.speeds
    assert fast / slow == 8


def test_devices_that_do_not_pay_are_left_out_and_named() -> None:
    names = ["cuda:0", "cuda:1", "cuda:2"]
    trials = settled([1.0, 1.0, 0.02], 30, 0.5)
    assert trials.current == BatchDivision((0, 1))
    line = outcome(trials, names, batch_norm=True)
    assert "cuda:0 50 %, cuda:1 50 %; it leaves out cuda:2, as a step takes 1.6e+04 ms, and " in line
    assert "batch norm normalises these chunks" in line
    assert "--equal-shares" in line
    assert "faster" not in line
    assert outcome(settled([1.0, 1.0, 1.0], 30), names, batch_norm=True) == ""
    assert "with the model on cuda:1, and that first" in outcome(settled([1.0, 4.0], 20), names, batch_norm=False)
    assert "with the model on cuda:1, and that first" in outcome(settled([0.1, 4.0], 20, 2.0), names, batch_norm=False)
    assert "cuda:0 25 %, cuda:1 25 %, cuda:2 50 %; it may be faster" in outcome(
        settled([1.0, 1.0, 2.0], 32), names, batch_norm=False
    )


def test_a_late_reply_of_an_earlier_division_does_not_count() -> None:
    trials = Trials(2)
    for _ in range(WARM + MEASURED):
        trials.note(BatchDivision((0,)), 1.0, {0: 1.0})
    assert trials.current == BatchDivision((0, 1))
    assert not trials.settled
