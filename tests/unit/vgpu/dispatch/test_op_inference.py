"""Recipes: what a worker is told of an operator, and what is known here of its results without asking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.vgpu import install, native
from onebox.vgpu.core.metadata import Metadata, dense, metadata_of
from onebox.vgpu.core.tensor import key_of
from onebox.vgpu.dispatch.op_inference import UnknownResult, changed, describe, flatten, infer_op
from onebox.wire import Complex, DType, Hole, Many, MemoryFormat, OwnDevice, SlotArgument

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def installed() -> None:
    install()


def virtual(*shape: int, dtype: torch.dtype = torch.float32, like: Tensor | None = None) -> Tensor:
    """Return a virtual tensor of no pool."""
    layout = dense(dtype, shape) if like is None else metadata_of(like)
    made: Tensor = native.load().Queue(0, 1000, 100).make(7, key_of(layout))
    return made


def test_an_operator_that_makes_one_tensor() -> None:
    made = infer_op(aten.mm.default, (virtual(2, 3), virtual(3, 5)), {})
    layout = dense(torch.float32, (2, 5))
    assert made.returns == (layout,)
    assert (made.kernel.name, made.kernel.args, made.inputs, made.keeps) == (
        "aten.mm.default",
        (SlotArgument(0), SlotArgument(1)),
        2,
        1,
    )
    assert made.kernel.outs == (layout.strided(),)


def test_floating_point_numbers_are_left_open_and_others_are_not() -> None:
    x = virtual(2)
    made = infer_op(aten.add.Tensor, (x, 0.5), {"alpha": 2})
    assert made.kernel.args == (SlotArgument(0), Hole(0))
    assert made.kernel.kwargs == {"alpha": 2}
    assert made.kernel.floats == 1
    foreach = infer_op(aten._foreach_mul.ScalarList, ([x, x], [0.5, 0.25]), {})
    assert foreach.kernel.args == (Many((SlotArgument(0), SlotArgument(1))), Many((Hole(0), Hole(1))))


def test_a_number_that_says_how_much_there_is_stays() -> None:
    made = infer_op(aten.arange.start_step, (0.0, 1.0, 0.25), {"device": torch.device("vgpu", 0)})
    assert made.kernel.args == (0.0, 1.0, 0.25)
    assert made.kernel.kwargs == {"device": OwnDevice()}
    assert made.returns == (dense(torch.float32, (4,)),)


def test_other_arguments_as_they_travel() -> None:
    options = {"dtype": torch.float64, "memory_format": torch.contiguous_format}
    made = describe(aten._to_copy.default, (virtual(2),), options)
    assert made.kwargs == {"dtype": DType("float64"), "memory_format": MemoryFormat("contiguous_format")}
    assert describe(aten.mul.Scalar, (virtual(1), 1 + 2j), {}).args == (SlotArgument(0), Complex(1.0, 2.0))


def test_an_operator_in_place_returns_its_argument() -> None:
    x, y = virtual(2, 3), virtual(3)
    made = infer_op(aten.add_.Tensor, (x, y), {})
    assert (made.returns, made.keeps, made.changes) == ((0,), 0, ())
    assert made.kernel.outs == (None,)
    assert infer_op(aten.mul.out, (y, y), {"out": y}).returns == (2,)


def test_an_operator_that_changes_how_its_argument_looks() -> None:
    made = infer_op(aten.t_.default, (virtual(2, 3),), {})
    (position, now), *more = made.changes
    assert (position, more, now.shape, now.strides) == (0, [], (3, 2), (1, 3))


def test_views_keep_offset_and_storage() -> None:
    x = virtual(4, 6)
    made = infer_op(aten.select.int, (x, 1, 2), {})
    assert (made.returns, made.shared) == ((metadata_of(torch.empty(4, 6).select(1, 2)),), (0,))
    again = infer_op(aten.slice.Tensor, (virtual(like=torch.empty(4, 6)[:, 2]), 0, 1, 3), {})
    assert (again.returns, again.shared) == ((metadata_of(torch.empty(4, 6)[1:3, 2]),), (0,))


def test_lists_and_tuples_are_put_together_again() -> None:
    x = virtual(6, 2)
    halves = infer_op(aten.split.Tensor, (x, 4), {})
    assert [layout.shape for layout in halves.returns if isinstance(layout, Metadata)] == [(4, 2), (2, 2)]
    assert halves.lengths == [2]
    assert halves.rebuild is not None
    assert halves.rebuild(["a", "b"]) == ["a", "b"]
    top = infer_op(aten.topk.default, (x, 1), {})
    assert top.rebuild is not None
    assert top.rebuild(["values", "indices"]) == ("values", "indices")
    assert flatten(aten.split.Tensor, [1, 2])[0] == [1, 2]


def test_an_output_that_is_not_asked_for_is_none() -> None:
    x, w = virtual(1, 2, 5, 5), virtual(3, 2, 3, 3)
    gradient = virtual(1, 3, 3, 3)
    sizes = ([3], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    made = infer_op(aten.convolution_backward.default, (gradient, x, w, *sizes), {})
    assert made.returns == (None, dense(torch.float32, (3, 2, 3, 3)), None)
    assert made.keeps == 1


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.nonzero.default, (4,)),
        (aten.masked_select.default, (4, "bool")),
        (aten._local_scalar_dense.default, (1,)),
        (aten.equal.default, (4, 4)),
    ],
    ids=str,
)
def test_what_depends_on_values_is_asked_for(func: Any, args: tuple[Any, ...]) -> None:
    tensors = tuple(virtual(4, dtype=torch.bool) if size == "bool" else virtual(size) for size in args)
    with pytest.raises(UnknownResult):
        infer_op(func, tensors, {})


def test_a_check_that_returns_nothing_is_waited_for() -> None:
    with pytest.raises(UnknownResult, match="_linalg_check_errors"):
        infer_op(aten._linalg_check_errors.default, (virtual(dtype=torch.int32), "inv"), {"is_matrix": True})


def test_wrong_shapes_are_the_worker_s_to_explain() -> None:
    with pytest.raises(UnknownResult):
        infer_op(aten.mm.default, (virtual(2, 3), virtual(2, 3)), {})


def test_what_workers_do_not_run_is_refused_by_name() -> None:
    with pytest.raises(WireError, match=r"aten\.set_\.source_Storage is not supported"):
        describe(aten.set_.source_Storage, (virtual(1), None), {})
    with pytest.raises(WireError, match="sparse"):
        describe(aten._sparse_coo_tensor_with_dims.default, (1, 1, [2]), {})


def test_a_recipe_holds_no_tensor() -> None:
    x = virtual(3)
    queue = native.load().queue(x)
    kept = infer_op(aten.cat.default, ([x, x],), {})
    assert not queue.dead
    del x
    assert queue.dead, "at once, and not when the garbage collector comes"
    assert queue.take()[3] == [7]
    assert kept.returns == (dense(torch.float32, (6,)),)


def test_arguments_change_within_lists() -> None:
    assert changed(([1, 2], (3, None), "x"), lambda value: value * 2 if isinstance(value, int) else value) == (
        [2, 4],
        (6, None),
        "x",
    )
