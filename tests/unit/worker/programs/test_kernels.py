"""Kernels made ready: how arguments are picked, what is written to, and how results are laid out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import (
    Complex,
    DType,
    GeneratorArgument,
    Hole,
    KernelSpec,
    LayoutArgument,
    Many,
    MemoryFormat,
    OwnDevice,
    SlotArgument,
    Strided,
    overload,
)
from onebox.worker.programs.kernels import CompiledKernel, flatten, strided_of, written_inputs
from onebox.worker.sandbox.allow_list import EAGER, pinned_names

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(2, 3)
GENERATOR = torch.Generator()


def compiled(
    name: str, *args: Any, inputs: int = 1, floats: int = 0, outs: tuple[Strided | None, ...] = (), **kwargs: Any
) -> CompiledKernel:
    return CompiledKernel(KernelSpec(name, args, kwargs, inputs, floats, outs), CPU, lambda number: GENERATOR)


def call(kernel: CompiledKernel, *tensors: Tensor, floats: tuple[float, ...] = ()) -> Any:
    return kernel.run(*kernel.pick([*tensors, *floats, *kernel.constants]))


# ---- arguments


def test_tensors_numbers_and_constants_go_where_they_belong() -> None:
    kernel = compiled("aten.add.Tensor", SlotArgument(1), SlotArgument(0), alpha=Hole(0), inputs=2, floats=1)
    assert torch.equal(call(kernel, X, X * 10, floats=(2.0,)), X * 12)
    kernel = compiled("aten.clamp.default", SlotArgument(0), Hole(1), Hole(0), floats=2)
    assert torch.equal(call(kernel, X, floats=(4.0, 1.0)), X.clamp(1, 4))
    kernel = compiled("aten._softmax.default", SlotArgument(0), 1, False)
    assert torch.equal(call(kernel, X), X.softmax(1))
    kernel = compiled("aten.empty.memory_format", Many((2, 3)), inputs=0)
    assert call(kernel).shape == (2, 3)


def test_lists_hold_tensors_numbers_and_nothing() -> None:
    kernel = compiled("aten.cat.default", Many((SlotArgument(1), SlotArgument(0), SlotArgument(1))), 1, inputs=2)
    assert torch.equal(call(kernel, X, -X), torch.cat([-X, X, -X], 1))
    kernel = compiled("aten.index.Tensor", SlotArgument(0), Many((None, SlotArgument(1))), inputs=2)
    assert torch.equal(call(kernel, X, torch.tensor([2, 0])), X[:, [2, 0]])
    kernel = compiled(
        "aten._foreach_mul.ScalarList",
        Many((SlotArgument(0), SlotArgument(1))),
        Many((Hole(0), 3)),
        inputs=2,
        floats=1,
    )
    first, second = call(kernel, X, X, floats=(0.5,))
    assert torch.equal(first, X * 0.5)
    assert torch.equal(second, X * 3)
    kernel = compiled("aten._foreach_add.ScalarList", Many((SlotArgument(0),)), Many((Complex(1.0, 2.0),)))
    assert torch.equal(call(kernel, X)[0], X + (1 + 2j))


def test_arguments_by_keyword_may_be_tensors_or_lists_of_them() -> None:
    out = torch.empty(2, 3)
    kernel = compiled("aten.add.out", SlotArgument(0), SlotArgument(0), alpha=2, out=SlotArgument(1), inputs=2)
    assert call(kernel, X, out) is out
    assert torch.equal(out, X * 3)
    outs = [torch.empty(3), torch.empty(3)]
    kernel = compiled(
        "aten.unbind_copy.int_out", SlotArgument(0), 0, out=Many((SlotArgument(1), SlotArgument(2))), inputs=3
    )
    call(kernel, X, *outs)
    assert all(map(torch.equal, outs, X))


def test_what_is_not_a_number_has_a_name() -> None:
    kernel = compiled(
        "aten._to_copy.default", SlotArgument(0), dtype=DType("float64"), layout=LayoutArgument(), device=OwnDevice(),
        memory_format=MemoryFormat("contiguous_format"),
    )  # fmt: skip
    assert torch.equal(call(kernel, X.t()), X.t().double())
    kernel = compiled("aten.bernoulli.default", SlotArgument(0), generator=GeneratorArgument(3))
    GENERATOR.manual_seed(1)
    assert torch.equal(call(kernel, X / 5), torch.bernoulli(X / 5, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dtype": DType("float8_e5m2")}, {"dtype": DType("load")}, {"layout": LayoutArgument("sparse_coo")},
        {"memory_format": MemoryFormat("load")}, {"memory_format": MemoryFormat("")},
    ],
)  # fmt: skip
def test_names_that_are_not_allowed(kwargs: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="not allowed"):
        compiled("aten._to_copy.default", SlotArgument(0), **kwargs)


# ---- what is written to


@pytest.mark.parametrize(
    ("kernel", "writes", "resizes"),
    [
        (KernelSpec("aten.add_.Tensor", (SlotArgument(1), SlotArgument(0)), {}, 2, 0), (1,), ()),
        (KernelSpec("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, 2, 0), (), ()),
        (KernelSpec("aten.add.out", (SlotArgument(0), SlotArgument(1)), {"out": SlotArgument(2)}, 3, 0), (2,), (2,)),
        (KernelSpec("aten.resize_.default", (SlotArgument(0), Many((4,))), {}, 1, 0), (0,), (0,)),
        (KernelSpec("aten.set_.source_Tensor", (SlotArgument(0), SlotArgument(1)), {}, 2, 0), (0,), (0,)),
        (
            KernelSpec(
                "aten._foreach_add_.List",
                (Many((SlotArgument(0), SlotArgument(1))), Many((SlotArgument(2), SlotArgument(2)))),
                {},
                3,
                0,
            ),
            (0, 1),
            (),
        ),
        (KernelSpec("aten.native_batch_norm.default", tuple(map(SlotArgument, range(5))), {}, 5, 0), (3, 4), ()),
        (KernelSpec("aten._native_batch_norm_legit.default", tuple(map(SlotArgument, range(5))), {}, 5, 0), (3, 4), ()),
        (KernelSpec("aten.view.default", (SlotArgument(0), Many((6,))), {}, 1, 0), (), ()),
    ],
    ids=lambda value: value.name if isinstance(value, KernelSpec) else "",
)
def test_what_a_kernel_may_write_to(kernel: KernelSpec, writes: tuple[int, ...], resizes: tuple[int, ...]) -> None:
    found = written_inputs(kernel)
    assert tuple(found) == writes
    assert tuple(index for index, resized in found.items() if resized) == resizes


def test_an_operator_of_another_torch_may_write_to_anything() -> None:
    assert list(written_inputs(KernelSpec("aten.new_in_torch_9.default", (), {}, 3, 0))) == [0, 1, 2]


def test_every_operator_that_resizes_is_known() -> None:
    """Those with a fixed place for their results say so by ``out``; the names of the others are written down."""
    mutable = {
        name.split(".")[1] for name in pinned_names(EAGER) if (parts := _schema(name)) is not None and parts.is_mutable
    }
    assert {name for name in mutable if name.startswith(("resize", "set_"))} == {
        "resize_", "resize_as_", "set_",
    }  # fmt: skip


def _schema(name: str) -> torch.FunctionSchema | None:
    try:
        return overload(name)._schema
    except WireError:
        return None


# ---- results


@given(st.permutations(range(3)), st.permutations(range(3)), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_a_new_tensor_lies_as_is_told_whatever_the_operator_made(
    order: list[int], made: list[int], shape: list[int]
) -> None:
    told = torch.empty([shape[d] for d in order]).permute(sorted(range(3), key=lambda d: order[d]))
    source = torch.randn([shape[d] for d in made]).permute(sorted(range(3), key=lambda d: made[d]))
    kernel = compiled("aten.neg.default", SlotArgument(0), outs=(strided_of(told),))
    for _ in range(2):
        kept = kernel.keep(call(kernel, source))
        assert torch.equal(kept, -source)
        if kept.numel():
            told_strides = [s for s, size in zip(told.stride(), told.shape, strict=True) if size != 1]
            assert [s for s, size in zip(kept.stride(), kept.shape, strict=True) if size != 1] == told_strides


def test_a_tensor_that_lies_well_is_not_copied() -> None:
    for made, strides in (
        (torch.ones(2, 1, 3), (3, 17, 1)),
        (torch.ones(2, 0, 3), (5, 6, 7)),
        (torch.ones(1, 1), (9, 9)),
    ):
        kernel = compiled("aten.neg.default", SlotArgument(0), outs=(Strided("float32", tuple(made.shape), strides),))
        assert kernel.keep(made) is made
        assert kernel.keep(made) is made


def test_lazy_conjugates_are_as_is_told() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    plain, lazy = strided_of(z), strided_of(z.conj())
    assert (plain.conjugate, lazy.conjugate) == (False, True)
    for told in (plain, lazy):
        for made in (z, z.conj(), z.conj().clone()):
            kept = compiled("aten.mul.Scalar", SlotArgument(0), 1, outs=(told,)).keep(made)
            assert kept.is_conj() == told.conjugate
            assert torch.equal(kept, made)
        view = compiled("aten._conj.default", SlotArgument(0), outs=(told,))
        if told.conjugate:
            assert view.keep(z.conj()).is_conj()
        else:
            with pytest.raises(ValueError, match="conjugate"):
                view.keep(z.conj())
    negative = strided_of(z.conj().imag)
    assert negative.negative
    assert compiled("aten._neg_view.default", SlotArgument(0), outs=(negative,)).keep(z.conj().imag).is_neg()


def test_of_many_results_those_are_kept_that_are_told() -> None:
    three = Strided("float32", (2,), (1,))
    kernel = compiled("aten.max.dim", SlotArgument(0), 1, outs=(three, None))
    assert kernel.outputs == 1
    (values,) = kernel.keep(call(kernel, X))
    assert values.tolist() == [2.0, 5.0]
    kernel = compiled("aten.split.Tensor", SlotArgument(0), 1, 1, outs=(None, Strided("float32", (2, 1), (3, 1)), None))
    (middle,) = kernel.keep(call(kernel, X))
    assert middle.flatten().tolist() == [1.0, 4.0]
    with pytest.raises(ValueError, match="returned 2 tensors where 3"):
        kernel.keep([X, X])
    with pytest.raises(ValueError, match="NoneType where"):
        compiled("aten.max.dim", SlotArgument(0), 1, outs=(three, None)).keep((None, X))
    with pytest.raises(ValueError, match="NoneType where"):
        compiled("aten.neg.default", SlotArgument(0), outs=(three,)).keep(None)


def test_flattening() -> None:
    assert flatten(3) == [3]
    assert flatten((1, [2, None], 4)) == [1, 2, None, 4]
    assert flatten([]) == []


def test_where_elements_lie_is_told() -> None:
    base = torch.zeros(10, dtype=torch.int16)
    assert strided_of(base[2:8].view(2, 3).t()) == Strided("int16", (3, 2), (1, 3), 2, 20)
    with pytest.raises(WireError, match="cannot travel"):
        strided_of(torch.zeros(1, dtype=torch.float8_e5m2))


def test_operators_that_need_values_are_known() -> None:
    assert compiled("aten.equal.default", SlotArgument(0), SlotArgument(0)).needs_values
    assert compiled("aten.nonzero.default", SlotArgument(0)).needs_values
    assert not compiled("aten.neg.default", SlotArgument(0)).needs_values
    assert not compiled("aten.split.Tensor", SlotArgument(0), 1).needs_values
