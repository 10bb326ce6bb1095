"""Sums through shared memory, the ranks being threads of this process: the same bits for everybody, in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.worker.shared import PeerLeft, SharedReducer, supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no futex or memfd")


class Keys:
    """A key-value store of threads.

    Args:
        delay: Called with each key that is asked for, before it is answered.
    """

    def __init__(self, delay: Callable[[str], None] = lambda key: None) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._delay = delay

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=30)
        self._delay(key)
        return self._values[key]


Rank = Callable[[int, SharedReducer], Any]


def run(size: int, rank: Rank, *, timeout_s: float = 30.0, stores: list[Keys] | None = None) -> list[Any]:
    """Run a function for each rank, in threads, and return what each returns."""
    keys = Keys()

    def one(number: int) -> Any:
        reducer = SharedReducer(stores[number] if stores else keys, number, size, timeout_s)
        try:
            return rank(number, reducer)
        finally:
            if reducer._control:
                reducer.leave()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, number) for number in range(size)]
        return [future.result(60) for future in futures]


def part(rank: int, order: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + order)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=5))
@settings(max_examples=40)
def test_every_rank_gets_the_same_sum(size: int, buckets: list[list[int]]) -> None:
    def rank(number: int, reducer: SharedReducer) -> list[Tensor]:
        waits = [
            reducer.reduce([part(number, order, count).view(1, -1) for count in counts])
            for order, counts in enumerate(buckets)
        ]
        return [wait() for wait in waits]

    results = run(size, rank)
    for order, counts in enumerate(buckets):
        expected = torch.cat([part(0, order, count) for count in counts])
        for number in range(1, size):
            expected = expected + torch.cat([part(number, order, count) for count in counts])
        assert all(torch.equal(result[order], expected) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_types(dtype: torch.dtype) -> None:
    values = torch.tensor([1, 2, 3]).to(dtype)
    for result in run(3, lambda number, reducer: reducer.reduce([values])()):
        assert result.dtype == dtype
        assert torch.equal(result, values * 3)


def test_many_steps_use_the_memory_again() -> None:
    def rank(number: int, reducer: SharedReducer) -> int:
        for step in range(50):
            waits = [reducer.reduce([torch.full((1000,), float(step + number))]) for _ in range(3)]
            for wait in reversed(waits):
                assert wait()[0] == 2 * step + 1
        return len(os.listdir("/proc/self/fd"))

    run(2, rank)


def test_memory_grows_while_buckets_are_open() -> None:
    sizes = [1000, 200_000, 500_000, 10, 1_000_000]  # doubles: each is too much for what is there

    def rank(number: int, reducer: SharedReducer) -> list[float]:
        waits = [reducer.reduce([torch.full((size,), number + size / 2, dtype=torch.float64)]) for size in sizes]
        return [float(wait().max()) for wait in reversed(waits)]

    expected = [size + 1.0 for size in reversed(sizes)]
    assert run(2, rank) == [expected, expected]


def test_a_slow_rank_still_finds_the_memory_of_a_fast_one() -> None:
    """The fast rank needs larger memory before the slow one has mapped its first."""

    def delay(key: str) -> None:
        if "arena0" in key:
            time.sleep(0.3)

    keys = Keys()
    slow = Keys(delay)
    slow._values, slow._changed = keys._values, keys._changed
    sizes = [1000, 300_000, 700_000]

    def rank(number: int, reducer: SharedReducer) -> list[float]:
        waits = [reducer.reduce([torch.full((size,), float(size), dtype=torch.float64)]) for size in sizes]
        return [float(wait().max()) for wait in waits]

    expected = [2.0 * size for size in sizes]
    assert run(2, rank, stores=[keys, slow]) == [expected, expected]


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Requires that as many descriptors are open afterwards as before."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("descriptors")
def test_nothing_stays_open() -> None:
    def rank(number: int, reducer: SharedReducer) -> None:
        for size in (10, 400_000, 900_000):
            reducer.reduce([torch.zeros(size)])()

    run(3, rank)


def test_who_waits_for_a_rank_that_leaves_hears_of_it_at_once() -> None:
    def rank(number: int, reducer: SharedReducer) -> float:
        if number == 1:
            reducer.reduce([torch.ones(1)])()
            return 0.0
        reducer.reduce([torch.ones(1)])()
        wait = reducer.reduce([torch.ones(1)])
        before_s = time.monotonic()
        with pytest.raises(PeerLeft, match="rank 1 has left"):
            wait()
        return time.monotonic() - before_s

    assert run(2, rank)[0] < 5


def test_what_a_rank_published_before_it_left_still_counts() -> None:
    mapped, left = threading.Event(), threading.Event()

    def rank(number: int, reducer: SharedReducer) -> float:
        wait = reducer.reduce([torch.ones(1)])
        if number == 1:
            mapped.wait(10)
            reducer.leave()
            left.set()
            return 0.0
        mapped.set()
        left.wait(10)
        return float(wait())

    assert run(2, rank)[0] == 2.0


def test_who_has_left_waits_for_nobody() -> None:
    def rank(number: int, reducer: SharedReducer) -> None:
        wait = reducer.reduce([torch.ones(1)])
        reducer.leave()
        with pytest.raises(PeerLeft, match="has been left"):
            wait()

    run(1, rank)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_allowed() -> None:
    done = threading.Event()

    def rank(number: int, reducer: SharedReducer) -> str:
        if number == 1:
            reducer.reduce([torch.ones(1)])()
            done.wait(20)
            return ""
        reducer.reduce([torch.ones(1)])()
        wait = reducer.reduce([torch.ones(1)])
        try:
            with pytest.raises(PeerLeft, match="did not come within 0 s") as caught:
                wait()
            return str(caught.value)
        finally:
            done.set()

    assert run(2, rank, timeout_s=0.3)[0]
