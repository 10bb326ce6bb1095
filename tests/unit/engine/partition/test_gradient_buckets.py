"""Buckets: in the order of the gradients, full, each of one element type."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.partition.gradient_buckets import fill_buckets
from onebox.wire import TensorSpec

SPECS = {name: TensorSpec("float32", (size,)) for name, size in zip("abcd", (10, 30, 5, 100), strict=True)}


def test_buckets_are_in_the_order_of_the_gradients_and_full() -> None:
    assert fill_buckets("abcd", SPECS, 100) == [["a", "b"], ["c", "d"]]
    assert fill_buckets("dcba", SPECS, 100) == [["d"], ["c", "b"], ["a"]]
    assert fill_buckets("abcd", SPECS, 1) == [["a"], ["b"], ["c"], ["d"]]
    assert fill_buckets("abcd", SPECS, 10_000) == [["a", "b", "c", "d"]]
    assert fill_buckets("", SPECS) == []


def test_a_bucket_has_one_type() -> None:
    types = {"a": "float32", "b": "float64", "c": "float64", "d": "float32"}
    specs = {name: TensorSpec(dtype, (1,)) for name, dtype in types.items()}
    assert fill_buckets("abcd", specs, 1000) == [["a"], ["b", "c"], ["d"]]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["float32", "float64", "bfloat16"])), max_size=12),
    st.integers(1, 300),
)
def test_everything_travels_once_and_buckets_are_as_full_as_asked(made: list[tuple[int, str]], size_bytes: int) -> None:
    names = [str(number) for number in range(len(made))]
    specs = {name: TensorSpec(dtype, (size,)) for name, (size, dtype) in zip(names, made, strict=True)}
    buckets = fill_buckets(names, specs, size_bytes)
    assert [name for bucket in buckets for name in bucket] == names
    for bucket, following in zip(buckets, [*buckets, None][1:], strict=True):
        assert len({specs[name].dtype for name in bucket}) == 1
        filled = sum(specs[name].size_bytes for name in bucket)
        ends_type = following is None or specs[following[0]].dtype != specs[bucket[0]].dtype
        assert filled >= size_bytes or ends_type
        assert sum(specs[name].size_bytes for name in bucket[:-1]) < size_bytes, "full buckets are not filled on"
