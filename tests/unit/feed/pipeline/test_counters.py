"""What stages do is counted for each worker, also while it is at it; what results take is looked up in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from onebox.feed.pipeline.counters import StageCounters, StageTally, between, size_of


@dataclass(frozen=True)
class Batch:
    images: Any
    name: str = "a name"


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (None, 0),
        (17, 0),
        ("text", 0),
        (b"12345", 5),
        (bytearray(3), 3),
        (torch.zeros(2, 3), 24),
        (torch.zeros(0), 0),
        (np.zeros((2, 3)), 48),
        ([b"12", (b"3", {"a": torch.zeros(4, dtype=torch.uint8)})], 7),
        (Batch([b"12", Batch(torch.zeros(2))]), 10),
        (Batch, 0),
    ],
)
def test_sizes(value, size_bytes):
    assert size_of(value) == size_bytes


def test_times_of_several_workers_are_added_up():
    tally = StageTally("read", "processes")
    tally.switch("a", "waiting", 1.0)
    tally.switch("b", "busy", 1.5)
    tally.switch("a", "busy", 2.0)
    tally.finished(100)
    tally.switch("b", "blocked", 4.5)
    assert tally.counters(2, 5.0) == StageCounters(
        name="read", by="processes", concurrency=2, items=1, busy_s=6.0, waiting_s=1.0, blocked_s=0.5, bytes=100
    )
    tally.switch("a", None, 6.0)
    tally.switch("b", None, 6.0)
    assert tally.counters(0, 100.0).busy_s == 7.0
    assert tally.counters(0, 100.0).blocked_s == 1.5


def test_between_two_looks():
    tally = StageTally("read")
    tally.switch("a", "busy", 0.0)
    tally.finished(10)
    before = (tally.counters(1, 2.0),)
    tally.finished(5)
    (seen,) = between(before, (tally.counters(3, 6.0),))
    assert (seen.items, seen.bytes, seen.busy_s, seen.concurrency) == (1, 5, 4.0, 3)
