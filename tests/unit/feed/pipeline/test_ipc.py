"""Values between processes: what comes is what was sent, in memory that is shared where it is large."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.feed.pipeline.ipc import SHARED_BYTES, receive, send
from tests.kit.leaks import mapped, nothing_left


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: int = 3

    def __post_init__(self) -> None:
        assert self.image != "refused"


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        other.settimeout(30)
        yield one, other


def round_trip(value: Any) -> Any:
    one, other = socket.socketpair()
    with one, other:
        send(one, value)
        return receive(other)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


dtypes = st.sampled_from(
    [torch.uint8, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
)
shapes = st.lists(st.integers(0, 4), max_size=4)
tensors = st.builds(lambda dtype, shape: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype), dtypes, shapes)
arrays = st.builds(lambda name, shape: np.ones(shape, name), st.sampled_from(["u1", "<f4", ">i8", "?", "<U3"]), shapes)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | tensors | arrays
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@given(values)
def test_what_comes_is_what_was_sent(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.int64(-3),
        bytearray(b"abc"),
        b"x" * 3_000_000,
        [bytes([number % 256]) * (number % 7) for number in range(2000)],
        1 << 63,
        -(1 << 200),
        float("inf"),
    ],
)
def test_what_else_may_go(value):
    assert same(round_trip(value), value)


def test_views_come_as_they_look():
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for view in (whole.t(), whole[1:3, ::2], whole[0, 0], whole.to(torch.complex64).conj()):
        assert torch.equal(round_trip(view), view)


def test_dataclasses_come_as_they_were_and_are_not_made_anew():
    sent = Sample(torch.ones(3), label=5)
    got = round_trip([sent])[0]
    assert type(got) is Sample
    assert torch.equal(got.image, sent.image)
    assert got.label == 5
    passed = object.__new__(Sample)
    object.__setattr__(passed, "image", "refused")
    assert round_trip(passed).image == "refused"


def test_large_ones_can_be_written_and_lie_in_shared_memory():
    sent = torch.arange(SHARED_BYTES, dtype=torch.int64)
    images, labels, array = round_trip((sent, torch.arange(10), np.ones(SHARED_BYTES)))
    images += 1
    labels += 1
    array += 1
    assert torch.equal(images, sent + 1)
    assert labels.tolist() == list(range(1, 11))
    assert array.sum() == 2 * SHARED_BYTES
    assert images.data_ptr() % 64 == 0


def test_the_memory_is_freed_with_the_last_that_lies_in_it():
    before = mapped("onebox-feed")
    with nothing_left():
        images, labels = round_trip((torch.zeros(SHARED_BYTES), torch.arange(10)))
        view = images[5:]
        assert mapped("onebox-feed") == before + 1
        del images
        assert mapped("onebox-feed") == before + 1
        del view
        assert mapped("onebox-feed") == before
    assert labels.tolist() == list(range(10))  # which was copied, and keeps nothing else


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        ({"a": [{1, 2}]}, "builtins.set"),
        (lambda: 1, "builtins.function"),
        (np.array([object()]), "numpy.ndarray"),
        (np.zeros(2, [("a", "<i4")]), "numpy.ndarray"),
        (torch.zeros(2, device="meta"), "a tensor on meta"),
        (torch.zeros(2, requires_grad=True), "a tensor with a gradient"),
        (torch.zeros(2, 2).to_sparse(), "torch.sparse_coo"),
        (dataclasses.make_dataclass("Local", ["a"])(1), "Local"),
    ],
)
def test_what_may_not_go_is_named_and_nothing_is_sent(ends, value, named):
    one, other = ends
    with pytest.raises(UsageError, match=rf"{named}.* cannot go between processes; allowed are None, numbers"):
        send(one, (1, value))
    send(one, "next")
    assert receive(other) == "next"


def test_the_end_of_the_other_side(ends):
    one, other = ends
    one.close()
    with pytest.raises(EOFError):
        receive(other)
    with pytest.raises(OSError):
        send(other, 1)
