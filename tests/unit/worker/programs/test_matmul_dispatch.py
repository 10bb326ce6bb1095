"""Products of float32 matrices by oneDNN: the same but for rounding, whatever the matrices lie like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebox.wire import Many, Operator, Program, SlotArgument, TensorSpec, with_deaths
from onebox.worker.programs import matmul_dispatch
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.instruction_sets import used_instruction_sets

CPU = torch.device("cpu")
TOLERANCE = 3e-6
"""Of a product of float32 with up to some hundred terms, relative to its largest element."""


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN compute on every processor, and matrices of every size."""
    monkeypatch.setattr(matmul_dispatch, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(matmul_dispatch, "LEAST_WORK", 1)
    monkeypatch.setattr(matmul_dispatch, "LEAST_ROWS", 1)


def spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def ran(name: str, tensors: list[Tensor], rest: tuple[Any, ...] = (), made: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """Return what a tape of one operator over tensors makes."""
    first, count = len(tensors), len(made)
    operator = Operator(
        name, (*map(SlotArgument, range(first)), *rest), {}, tuple(range(first, first + count)), tuple(map(spec, made))
    )
    assert matmul_dispatch.faster_implementation(operator, dict(enumerate(map(spec, tensors))), CPU) is not None
    outputs = tuple(range(first, first + count))
    program = with_deaths(Program(tuple(map(spec, tensors)), (operator,), outputs, first + count))
    return CompiledProgram(program, CPU).run(list(tensors), lambda position: None, WorkerProgress())


def assert_near(made: Tensor, expected: Tensor) -> None:
    assert made.dtype == torch.float32
    assert made.shape == expected.shape
    assert float((made - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


def lying(tensor: Tensor, way: str) -> Tensor:
    """Return a matrix that lies in some way in memory."""
    if way == "rows":
        return tensor.contiguous()
    if way == "columns":
        return tensor.t().contiguous().t()
    if way == "part":
        return torch.zeros(tensor.shape[0] + 2, tensor.shape[1] + 3)[1:-1, 2:-1].copy_(tensor)
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


WAYS = st.sampled_from(["rows", "columns", "part", "sparse"])
SIZES = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, WAYS, WAYS, st.booleans())
def test_products_are_the_same_but_for_rounding(
    rows: int, inner: int, columns: int, left_way: str, right_way: str, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * 1600 + inner * 40 + columns)
    left, right = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
    added = torch.randn(columns, generator=generator)
    expected = left.double() @ right.double() + (added.double() if bias else 0)
    given_ = [*([added] if bias else []), lying(left, left_way), lying(right, right_way)]
    name = "aten.addmm.default" if bias else "aten.mm.default"
    (made,) = ran(name, given_, made=(expected.float(),))
    assert_near(made, expected)
    assert made.is_contiguous()


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_convolutions_of_one_by_one_are_products(
    monkeypatch: pytest.MonkeyPatch, channels_last: bool, biased: bool
) -> None:
    """Forward and both gradients, with maps in either layout; the layout of what is made is that of what is read."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(3, 8, 5, 4).to(memory_format=layout)
    weight, bias = torch.randn(6, 8, 1, 1), torch.randn(6)
    rest = (Many((1, 1)), Many((0, 0)), Many((1, 1)), False, Many((0, 0)), 1)
    exact = [value.double().requires_grad_() for value in (x, weight, bias)]
    expected = torch.nn.functional.conv2d(exact[0], exact[1], exact[2] if biased else None)
    tensors = [x, weight, *([bias] if biased else [])]
    (made,) = ran("aten.convolution.default", tensors, (*(() if biased else (None,)), *rest), (expected.float(),))
    assert_near(made, expected.detach())
    assert made.is_contiguous(memory_format=layout)

    gradient = torch.randn(3, 6, 5, 4).to(memory_format=layout)
    expected.backward(gradient.double())
    sizes = Many((6,)) if biased else None
    wanted = tuple(value.grad.float() for value in exact if value.grad is not None)
    found = ran("aten.convolution_backward.default", [gradient, x, weight], (sizes, *rest, Many((True, True, True))), (
        *wanted[:2], torch.zeros(6),
    ))  # fmt: skip
    for made, value in zip(found, exact, strict=False):
        if value.grad is not None:
            assert_near(made, value.grad)
    assert_near(found[2], gradient.double().sum((0, 2, 3)))


@pytest.mark.parametrize(
    ("name", "dtype", "rest"),
    [("aten.mm.default", "float64", ()), ("aten.bmm.default", "float32", ())],
)
def test_what_is_left_to_aten(name: str, dtype: str, rest: tuple[Any, ...]) -> None:
    shape = (4, 4) if "mm." in name and "bmm" not in name else (2, 4, 4)
    specs = {0: TensorSpec(dtype, shape), 1: TensorSpec(dtype, shape)}
    operator = Operator(name, (SlotArgument(0), SlotArgument(1), *rest), {}, (2,), (specs[0],))
    assert matmul_dispatch.faster_implementation(operator, specs, CPU) is None
    assert matmul_dispatch.faster_implementation(operator, specs, torch.device("meta")) is None


def test_who_computes_follows_from_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL on Intel's processors, and where oneDNN has no AVX-512."""
    monkeypatch.undo()
    used = used_instruction_sets()
    expected = used.maker != "GenuineIntel" and "AVX-512" in used.onednn and torch.backends.mkl.is_available()
    assert matmul_dispatch.onednn_is_faster() == expected
    small, large = TensorSpec("float32", (16, 16)), TensorSpec("float32", (256, 256))
    for each, chosen in ((small, False), (large, expected)):
        operator = Operator("aten.mm.default", (SlotArgument(0), SlotArgument(1)), {}, (2,), (each,))
        assert (matmul_dispatch.faster_implementation(operator, {0: each, 1: each}, CPU) is not None) == chosen
