"""Direct bindings: they are used where they call the same operator with the same arguments, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onebox.wire import overload
from onebox.worker.programs import bindings
from onebox.worker.programs.bindings import TENSOR, fastest, spreads

X = torch.arange(12, dtype=torch.float64).view(3, 4)


class Seen(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "aten.mm.default": ([X, X.t()], {}),
    "aten.addmm.default": ([X[:, 0], X, X.t()], {"beta": 2.0}),
    "aten.view.default": ([X, [2, 6]], {}),
    "aten.add.Tensor": ([X, X], {"alpha": 3}),
    "aten.add.Scalar": ([X, 2.5], {}),
    "aten.mul.Tensor": ([X, torch.tensor(2)], {}),
    "aten.mul.Scalar": ([X, 2.5], {}),
    "aten.pow.Tensor_Scalar": ([X, 2], {}),
    "aten.pow.Tensor_Tensor": ([X, torch.tensor(2)], {}),
    "aten.sum.dim_IntList": ([X, [0], True], {}),
    "aten.sum.default": ([X], {"dtype": torch.float32}),
    "aten.split.Tensor": ([X, 2, 1], {}),
    "aten.max.dim": ([X, 1], {}),
    "aten.where.self": ([X > 3, X, -X], {}),
    "aten.cat.default": ([[X, X], 1], {}),
    "aten.index.Tensor": ([X, [None, torch.tensor([1, 0])]], {}),
    "aten.native_layer_norm.default": ([X, [4], None, X[0], 1e-5], {}),
    "aten.gelu.default": ([X], {"approximate": "tanh"}),
    "aten._to_copy.default": ([X], {"dtype": torch.float32}),
    "aten.clone.default": ([X], {"memory_format": torch.contiguous_format}),
    "aten.full_like.default": ([X, 3], {"pin_memory": False}),
    "aten.scalar_tensor.default": ([2.5], {"dtype": torch.float32, "device": torch.device("cpu")}),
    "aten.full.default": ([[2, 3], 1.5], {"device": torch.device("cpu"), "pin_memory": False}),
    "aten.arange.start": ([2, 5], {"device": torch.device("cpu")}),
}


def shown(args: list[Any]) -> list[Any]:
    """Return arguments as a compiled program describes them."""
    return [shown(one) if isinstance(one, list) else TENSOR if isinstance(one, Tensor) else one for one in args]


@pytest.mark.parametrize("name", CALLS)
def test_a_binding_calls_its_overload(name: str) -> None:
    args, keywords = CALLS[name]
    call = overload(name)
    with torch.inference_mode():
        quick = fastest(call, shown(args), keywords)
        with Seen() as seen:
            made = quick(*args, **keywords)
        expected = call(*args, **keywords)
    assert seen.names == [name]
    pairs = zip(made, expected, strict=True) if isinstance(expected, tuple | list) else [(made, expected)]
    for left, right in pairs:
        assert left.stride() == right.stride()
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_the_operators_of_most_programs_have_one() -> None:
    for name in (
        "aten.mm.default", "aten.view.default", "aten.add.Tensor", "aten.cat.default", "aten.gelu.default",
        "aten.scalar_tensor.default", "aten.full.default", "aten.arange.start",
    ):  # fmt: skip
        args, keywords = CALLS[name]
        call = overload(name)
        assert fastest(call, shown(args), keywords) is not call._op


@pytest.mark.parametrize(
    ("name", "args", "wrong"),
    [
        ("aten.where.self", [TENSOR, TENSOR, TENSOR], torch._C.TensorBase.where),
        ("aten.add.Scalar", [TENSOR, 2], torch._C._VariableFunctions.mul),
        ("aten.mul.Tensor", [TENSOR, TENSOR], lambda x, y: x.mul(2)),
        ("aten.view.default", [TENSOR, [4]], lambda x, shape: x),
        ("aten.sum.dim_IntList", [TENSOR, [0], True], lambda x, dims, keep: x.sum(dims)),
    ],
    ids=["order of arguments", "another operator", "another overload", "no operator", "other arguments"],
)
def test_a_function_that_does_something_else_is_not_used(name: str, args: list[Any], wrong: Callable[..., Any]) -> None:
    assert not bindings._agrees(wrong, overload(name), args, {})
    assert bindings._agrees(overload(name)._op, overload(name), args, {})


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.view.default", torch._C.TensorBase.view),
        ("aten.permute.default", torch._C.TensorBase.permute),
        ("aten.expand.default", torch._C.TensorBase.expand),
    ],
)
def test_numbers_one_by_one(name: str, function: Callable[..., Any]) -> None:
    numbers = {"aten.view.default": [2, 6], "aten.permute.default": [1, 0], "aten.expand.default": [2, 3, 4]}[name]
    assert spreads(function, overload(name), [TENSOR, numbers])
    with torch.inference_mode(), Seen() as seen:
        made = function(X, *numbers)
    assert seen.names == [name]
    assert torch.equal(made, overload(name)(X, numbers))


@pytest.mark.parametrize(
    ("name", "args", "function"),
    [
        ("aten.view.default", [TENSOR, []], torch._C.TensorBase.view),
        ("aten.cat.default", [[TENSOR, TENSOR]], torch._C._VariableFunctions.cat),
        ("aten.flip.default", [TENSOR, [0, 1]], torch._C._VariableFunctions.flip),
        ("aten.sum.dim_IntList", [TENSOR, [0, 1]], torch._C.TensorBase.sum),
        ("aten.view.default", [TENSOR, [2, 6]], torch._C.TensorBase.permute),
        ("aten.index.Tensor", [TENSOR, [None, TENSOR]], overload("aten.index.Tensor")._op),
    ],
    ids=["no numbers", "tensors", "a function with a list alone", "another meaning", "another operator", "a tensor"],
)
def test_lists_that_stay_lists(name: str, args: list[Any], function: Callable[..., Any]) -> None:
    assert not spreads(function, overload(name), args)


def test_no_binding_for_what_torch_decomposes_nor_for_other_factories() -> None:
    """Nor for a factory without a device, which would be given the default one."""
    for name, args in (
        ("aten.contiguous.default", [TENSOR]),
        ("aten.range.step", [0, 4, 2]),
        ("aten.zeros.default", [[2]]),
    ):
        assert fastest(overload(name), args, {}) is overload(name)._op


def test_arguments_that_the_operator_refuses() -> None:
    call = overload("aten.mm.default")
    assert fastest(call, [TENSOR, "text"], {}) is call._op
