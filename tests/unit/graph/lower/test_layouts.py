"""Programs compute the same however their inputs lie, and take no more memory than is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onebox.cost import footprint
from onebox.errors import CaptureError
from onebox.graph import NamedProgram, Port
from onebox.graph.lower.layouts import splits_only
from onebox.wire import Many, MemoryFormat, SlotArgument
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.graph.staged import Traced, trace
from tests.unit.programs import CPU, Meter

B, T, C = 2, 6, 4


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((6, 4), (2, 3, 4), True),
        ((6, 4), (6, 1, 2, 2), True),
        ((1, 6, 1, 4), (6, 4), True),
        ((), (1, 1), True),
        ((0, 3), (3, 0), True),
        ((6, 4), (24,), False),
        ((6, 4), (4, 6), False),
        ((6, 4), (3, 8), False),
        ((2, 6, 4), (12, 4), False),
        ((2, 6, 4), (2, 24), False),
    ],
)
def test_views_that_exist_for_all_strides(old: tuple[int, ...], new: tuple[int, ...], expected: bool) -> None:
    assert splits_only(old, new) == expected
    if expected:
        assert ends_to_begin(torch.zeros(old)).view(new).shape == new


class Net(nn.Module):
    """A line, and a function of what it makes of [B, T, C]."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line = nn.Linear(C, C, dtype=torch.float64)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.line(x))


def mean_square(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.square().mean()


def traced(then: Callable[[Tensor], Tensor]) -> tuple[Net, Tensor, Traced]:
    torch.manual_seed(0)
    model, x = Net(then), torch.randn(B, T, C, dtype=torch.float64)
    return model, x, trace(model, mean_square, (x, torch.zeros(B)), halves=False)


def ends_to_begin(x: Tensor) -> Tensor:
    """Return a tensor whose dimensions lie in the opposite order."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def within(x: Tensor) -> Tensor:
    """Return a tensor that is a part of a larger one."""
    made = x.new_full([size + 2 for size in x.shape], float("nan")) if x.is_floating_point() else None
    if made is None:
        return x
    made[tuple(slice(1, 1 + size) for size in x.shape)] = x
    return made[tuple(slice(1, 1 + size) for size in x.shape)]


def run(part: NamedProgram, inputs: Sequence[Tensor]) -> list[Tensor]:
    tape = CompiledProgram(part.program, CPU)
    with torch.inference_mode():
        return tape.run(list(inputs), lambda place: torch.manual_seed(place) and None, WorkerProgress())


WINDOWS = ((B, 3, C), (T * C, C, 1))
THEN: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(B, T * C),
    "copy of a slice": lambda h: h[:, ::2].clone().view(-1),
    "copy of an expanded tensor": lambda h: h[:, :1].expand(B, 3, C).clone().view(B, -1),
    "another type's view": lambda h: h.transpose(1, 2).contiguous().view(torch.int64).view(-1) * 0.0 + h.view(-1),
    "complex": lambda h: torch.view_as_complex(F.elu(h.transpose(1, 2)).transpose(1, 2).reshape(B, T, 2, 2)).abs(),
    "windows": lambda h: h.as_strided(*WINDOWS),
    "windows with an offset": lambda h: h.as_strided(*WINDOWS, h.storage_offset() + 5),
    "windows of transposed": lambda h: h.transpose(1, 2).contiguous().transpose(1, 2).as_strided(*WINDOWS, 2),
    "windows of a part": lambda h: h[:, 1:].as_strided((B, 2, C), (T * C, C, 1)),
    "windows of one of several": lambda h: h.split(3, 1)[1].as_strided((B, 2, C), (T * C, C, 1)),
    "windows that are written": lambda h: _doubled(h.clone()),
    "windows of transposed that are written": lambda h: _doubled(
        h.transpose(1, 2).contiguous().transpose(1, 2).clone()
    ),
    "transposed activations": lambda h: F.softplus(h.transpose(1, 2)).transpose(1, 2).reshape(-1),
}


def _doubled(h: Tensor) -> Tensor:
    h.as_strided((B, 3), (T * C, 4), 1).mul_(2)
    return h.reshape(-1)


@pytest.mark.parametrize("relay", [lambda x: x, ends_to_begin, within], ids=["as sent", "transposed", "a part"])
@pytest.mark.parametrize("name", THEN)
def test_programs_compute_the_same_however_their_inputs_lie(name: str, relay: Callable[[Tensor], Tensor]) -> None:
    model, x, made = traced(THEN[name])
    value = mean_square(model(x), x)
    expected = torch.autograd.grad(value, [model.line.weight, model.line.bias])
    given = {**made.given, Port("weight", 0): torch.ones((), dtype=torch.float64)}
    programs = made.model.divide()
    for part in (programs.forward, programs.backward):
        assert part is not None
        given |= dict(zip(part.outputs, run(part, [relay(given[port]) for port in part.inputs]), strict=True))
    torch.testing.assert_close(given[Port("result", 0)], value.detach())
    found = [given[Port("gradient", f"model.line.{name}")] for name in ("weight", "bias")]
    torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize(
    "then",
    [
        lambda h: h[:1].as_strided((T * C * B + 1,), (1,)),
        lambda h: h[1:].as_strided((T * C,), (1,), 0).as_strided((2,), (1,), B * T * C),
    ],
)
def test_memory_outside_of_a_tensor_is_refused_by_line(then: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"as_strided|storage") as caught:
        traced(lambda h: then(F.relu(h)))
    assert re.search(r"test_layouts\.py:\d+|outside", str(caught.value))


# ---- what is copied


CONTIGUOUS = MemoryFormat("contiguous_format")


def copies(part: NamedProgram | None) -> list[tuple[int, ...]]:
    """Return the shapes of what a program makes contiguous."""
    assert part is not None
    operators = part.program.operators
    made = [
        one for one in operators if one.name == "aten.clone.default" and one.kwargs == {"memory_format": CONTIGUOUS}
    ]
    return [spec.shape for one in made for spec in one.specs if spec is not None]


def test_a_gradient_that_may_lie_otherwise_is_made_contiguous_before_a_view_that_joins_dimensions() -> None:
    _, _, made = traced(lambda h: F.hardtanh(h.transpose(1, 2)))
    programs = made.model.divide()
    assert copies(programs.forward) == []
    assert copies(programs.backward) == [(B, T, C)]


@pytest.mark.parametrize(
    "then",
    [
        lambda h: F.gelu(h).view(-1),
        lambda h: F.gelu(h.transpose(1, 2)).transpose(1, 2).view(-1),
        F.hardtanh,
        lambda h: (h.transpose(1, 2) @ h).softmax(-1).view(-1),
    ],
)
def test_what_lies_as_traced_is_not_copied(then: Callable[[Tensor], Tensor]) -> None:
    _, _, made = traced(then)
    programs = made.model.divide()
    assert copies(programs.forward) == copies(programs.backward) == []


@pytest.mark.parametrize("name", ["copy of a slice", "transposed activations", "complex", "windows"])
def test_a_run_takes_no_more_memory_than_is_said(name: str) -> None:
    _, _, made = traced(THEN[name])
    given = dict(made.given)
    programs = made.model.divide()
    for part in (programs.forward, programs.backward):
        assert part is not None
        inputs = [given[port].clone() for port in part.inputs]
        tape = CompiledProgram(part.program, CPU)
        with Meter(inputs) as meter:
            values = tape.run(list(inputs), lambda _: None, WorkerProgress())
        assert meter.peak_bytes - meter.base_bytes <= footprint(part.program).peak_bytes
        assert meter.now() - meter.base_bytes == footprint(part.program).net_bytes, "afterwards it is exact"
        given |= dict(zip(part.outputs, values, strict=True))


def test_random_numbers_do_not_depend_on_how_a_tensor_lies() -> None:
    """The gradient of hard-tanh lies otherwise than traced; dropout behind it draws the same numbers wherever it is."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, h: Tensor) -> Tensor:
            return h * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return F.dropout(gradient, 0.5)

    _, _, made = traced(lambda h: F.hardtanh(Doubled.apply(h).transpose(1, 2)))
    backward = made.model.divide().backward
    assert copies(backward) == [(B, T, C)], "before it is drawn"
    operators = backward.program.operators
    drawing = next(place for place, one in enumerate(operators) if one.position >= 0)
    read = [one.index for one in operators[drawing].args if isinstance(one, SlotArgument)]
    maker = next(one for one in operators if one.name == "aten.clone.default" and one.kwargs)
    assert operators.index(maker) < drawing
    assert not read or read == list(maker.outs)
    assert not any(isinstance(one, Many) for one in maker.args)
