"""The key-value store that the ranks of one process share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import PeerLost
from onebox.vgpu.distributed.thread_store import ThreadStore

SOON = timedelta(milliseconds=20)


def test_values_through_prefixes_as_torch_distributed_asks() -> None:
    keys = ThreadStore()
    one, other = dist.PrefixStore("one", keys), dist.PrefixStore("other", keys)
    one.set("a", "1")
    other.set("a", b"2")
    assert (one.get("a"), other.get("a")) == (b"1", b"2")
    assert (one.add("count", 2), one.add("count", -5)) == (2, -3)
    assert one.check(["a", "count"])
    assert not other.check(["a", "count"])
    assert one.delete_key("a")
    assert not one.delete_key("a")
    one.multi_set(["b", "c"], ["x", "y"])
    assert one.multi_get(["c", "b"]) == [b"y", b"x"]
    one.append("b", "z")
    assert one.get("b") == b"xz"


def test_values_are_set_if_they_are_as_expected() -> None:
    keys = ThreadStore()
    assert keys.compare_set("a", "", "1") == b"1"
    assert keys.compare_set("a", "0", "2") == b"1"
    assert keys.compare_set("a", "1", "2") == b"2"
    assert keys.compare_set("b", "0", "2") == b"0"
    assert keys.num_keys() == 1


def test_who_waits_is_told() -> None:
    keys = ThreadStore()
    with ThreadPoolExecutor(2) as threads:
        got = threads.submit(keys.get, "a")
        waited = threads.submit(keys.wait, ["a", "b"])
        keys.set("a", "1")
        assert got.result(30) == b"1"
        keys.set("b", "1")
        assert waited.result(30) is None
        lost = threads.submit(keys.get, "never")
        keys.give_up("rank 3 has failed")
        with pytest.raises(PeerLost, match="rank 3 has failed"):
            lost.result(30)
    assert keys.get("a") == b"1", "what is there is there"
    with pytest.raises(PeerLost, match="rank 3 has failed"):
        keys.get("never")


def test_waits_have_a_bound() -> None:
    keys = ThreadStore()
    with pytest.raises(dist.DistStoreError, match="nobody has set b, c"):
        keys.set("a", "1")
        keys.wait(["a", "b", "c"], SOON)
    keys.set_timeout(SOON)
    with pytest.raises(dist.DistStoreError, match="nobody has set b"):
        keys.get("b")


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=6))
def test_threads_that_count_together_lose_nothing(amounts: list[int]) -> None:
    keys = ThreadStore()
    start = threading.Barrier(len(amounts), timeout=30)

    def count(amount: int) -> None:
        start.wait()
        keys.add("total", amount)

    with ThreadPoolExecutor(len(amounts)) as threads:
        list(threads.map(count, amounts))
    assert keys.add("total", 0) == sum(amounts)
