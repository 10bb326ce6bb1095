"""Emulated latency of the channel: how long things are held back, and that their order is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import PoolError, UsageError
from onebox.pool.client.loop import DelayQueue
from onebox.wire import TensorSpec, from_frame, to_frame
from onebox.wire.protocol.instructions import Free, Get
from onebox.wire.protocol.requests import Put
from tests.unit.house import OpenPool, threads_for_processes

LATENCY_S = 0.05
SPEC = TensorSpec("int64", (1,))


@given(
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=20),
    latency_s=st.floats(0.01, 3),
    ticks=st.lists(st.floats(0, 2), max_size=40),
)
def test_everything_comes_out_in_order_and_not_too_soon(
    gaps: list[float], latency_s: float, ticks: list[float]
) -> None:
    line: DelayQueue[tuple[int, float]] = DelayQueue(latency_s)
    now_s = 0.0
    for number, gap in enumerate(gaps):
        now_s += gap
        line.put((number, now_s), now_s)
    out: list[int] = []
    at_s = 0.0
    for tick in [*ticks, now_s + latency_s]:
        at_s += tick
        for number, put_s in line.take(at_s):
            assert at_s >= put_s + latency_s
            out.append(number)
        assert len(out) == len(gaps) or line.wait_s(at_s) > 0
    assert out == list(range(len(gaps)))
    assert line.wait_s(at_s) == math.inf


def test_without_latency_it_is_a_plain_queue() -> None:
    line: DelayQueue[int] = DelayQueue()
    line.put(1, 100.0)
    line.put(2, 0.0)
    assert line.take(0.0) == [1, 2]


def test_what_is_not_due_can_be_taken_at_the_end() -> None:
    line: DelayQueue[int] = DelayQueue(10.0)
    line.put(1, 0.0)
    line.put(2, 0.0)
    assert line.take(9.0) == []
    assert line.wait_s(9.0) == pytest.approx(1.0)
    assert line.take_all() == [1, 2]


# ---- in a pool


@pytest.fixture
def open_pool() -> Iterator[OpenPool]:
    with threads_for_processes() as opening:
        yield opening


def put(value: int) -> tuple[Put, Any]:
    return Put((1,), (SPEC,)), to_frame(torch.tensor([value]))


def value_of(future: Future[Any]) -> int:
    return int(from_frame(SPEC, future.result(20).frames[0]).item())


def test_messages_are_held_back_both_ways_in_their_order(open_pool: OpenPool) -> None:
    pool = open_pool(2, channel_latency_s=LATENCY_S)
    assert pool.channel_latency_s == LATENCY_S
    assert 2 * LATENCY_S <= pool.round_trip_s < 2 * LATENCY_S + 10.0
    asked = []
    for value in range(5):
        instruction, frame = put(value)
        pool.post(0, [instruction], [frame])
        asked.append(pool.post(0, [Get((1,))], answer=True))
    instruction, frame = put(7)
    asked.append(pool.post(1, [instruction, Get((1,))], [frame], answer=True))
    assert [value_of(future) for future in asked] == [0, 1, 2, 3, 4, 7]


def test_groups_form_over_a_slow_channel(open_pool: OpenPool) -> None:
    pool = open_pool(2, channel_latency_s=LATENCY_S)
    assert pool.form_group((0, 1), "workers") > 0
    assert pool.form_group((0, 1), "client") > 0


def test_closing_does_not_wait_for_what_is_held_back(open_pool: OpenPool) -> None:
    pool = open_pool(1, channel_latency_s=0.5)
    waiting = pool.post(0, [Free((1,))], answer=True)
    pool.close()
    assert isinstance(waiting.exception(0), PoolError)


@pytest.mark.parametrize("latency_s", [-0.1, math.inf, math.nan])
def test_a_latency_that_cannot_be(open_pool: OpenPool, latency_s: float) -> None:
    with pytest.raises(UsageError, match="0 s or more and finite"):
        open_pool(1, channel_latency_s=latency_s)


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=20), gaps=st.lists(st.floats(0, 2), min_size=20))
def test_bytes_wait_for_those_before_them(sizes: list[int], gaps: list[float]) -> None:
    line: DelayQueue[int] = DelayQueue(0.5, bandwidth_bps=500.0)
    now_s, free_s = 0.0, 0.0
    due_s = []
    for number, (size, gap) in enumerate(zip(sizes, gaps, strict=False)):
        now_s += gap
        line.put(number, now_s, size)
        free_s = max(free_s, now_s) + size / 500
        due_s.append(free_s + 0.5)
    out: list[int] = []
    for step in range(int(due_s[-1] * 10) + 2):
        at_s = step / 10
        out += line.take(at_s)
        assert all(due_s[number] <= at_s + 1e-9 for number in out)
        assert all(due_s[number] > at_s - 1e-9 for number in range(len(out), len(due_s)))
    assert out == list(range(len(due_s)))
