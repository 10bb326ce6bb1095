"""Layouts: one instance for each, as PyTorch has them, there and back over the wire."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.errors import WireError
from onebox.vgpu.core.metadata import contiguous_strides, dense, dense_order, from_wire, metadata, metadata_of
from onebox.wire import DTYPES

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Return a view of some tensor: permuted, cut, with steps, expanded."""
    dtype = draw(st.sampled_from([torch.float32, torch.int8, torch.complex64, torch.bool]))
    made = torch.zeros(draw(shapes), dtype=dtype)
    made = made.permute(draw(st.permutations(range(made.dim()))))
    for dimension in range(made.dim()):
        if made.size(dimension) > 1 and draw(st.booleans()):
            begin = draw(st.integers(0, made.size(dimension) - 1))
            made = made[(slice(None),) * dimension + (slice(begin, None, draw(st.integers(1, 2))),)]
    if draw(st.booleans()):
        made = made.unsqueeze(0).expand(draw(st.integers(1, 3)), *made.shape)
    if dtype == torch.complex64 and draw(st.booleans()):
        made = made.conj()
        made = made.imag if draw(st.booleans()) else made
    return made


@given(view=views())
def test_a_layout_is_that_of_its_tensor(view: Tensor) -> None:
    layout = metadata_of(view)
    for twin in (layout.on_meta(), view):
        assert metadata_of(twin) is layout
    assert (layout.dtype, layout.shape, layout.strides) == (view.dtype, tuple(view.shape), view.stride())
    assert layout.contiguous == (view.stride() == contiguous_strides(tuple(view.shape)))
    assert layout.plain == (not view.is_conj() and not view.is_neg())
    assert layout.size_bytes == view.nbytes


@given(view=views())
def test_a_layout_travels(view: Tensor) -> None:
    layout = metadata_of(view)
    assert from_wire(layout.strided()) is layout


@given(shape=shapes)
def test_strides_are_those_of_a_new_tensor(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert dense(torch.float16, shape) is metadata_of(torch.empty(shape, dtype=torch.float16))


@given(view=views())
def test_the_order_of_a_dense_tensor_makes_it_contiguous(view: Tensor) -> None:
    order = dense_order(tuple(view.shape), view.stride())
    if order is not None:
        assert sorted(order) == list(range(view.dim()))
        assert view.permute(order).is_contiguous()
    elif view.numel():
        assert not view.is_contiguous()


@given(shape=shapes, data=st.data())
def test_a_permuted_tensor_is_dense(shape: tuple[int, ...], data: st.DataObject) -> None:
    view = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
    assert dense_order(tuple(view.shape), view.stride()) is not None


@pytest.mark.parametrize(
    "view",
    [torch.empty(4, 4)[:, ::2], torch.empty(4, 4)[:, 1:], torch.empty(3).expand(2, 3), torch.empty(9)[::3]],
    ids=["steps", "cut", "expanded", "strided"],
)
def test_a_tensor_with_gaps_or_overlaps_is_not_dense(view: Tensor) -> None:
    assert dense_order(tuple(view.shape), view.stride()) is None


def test_layouts_that_differ_are_different_instances() -> None:
    base = metadata(torch.float32, (2, 2), (2, 1), 0, 16)
    others = [
        metadata(torch.int32, (2, 2), (2, 1), 0, 16),
        metadata(torch.float32, (4,), (1,), 0, 16),
        metadata(torch.float32, (2, 2), (1, 2), 0, 16),
        metadata(torch.float32, (2, 2), (2, 1), 1, 32),
        metadata(torch.float32, (2, 2), (2, 1), 0, 32),
        metadata(torch.float32, (2, 2), (2, 1), 0, 16, negative=True),
        metadata(torch.float32, (2, 2), (2, 1), 0, 16, conjugate=True),
    ]
    assert len({id(each) for each in [base, *others]}) == 1 + len(others)


def test_a_layout_that_nobody_has_is_forgotten() -> None:
    from onebox.vgpu.core.metadata import _known

    key = (torch.float32, (12345,), (1,), 0, 4 * 12345, False, False)
    kept = metadata(*key)
    assert _known[key] is kept
    del kept
    gc.collect()
    assert key not in _known


def test_a_type_that_does_not_travel() -> None:
    assert "quint8" not in DTYPES
    with pytest.raises(WireError, match="quint8"):
        metadata(torch.quint8, (1,), (1,), 0, 1).strided()
