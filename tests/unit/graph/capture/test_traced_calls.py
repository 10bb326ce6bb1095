"""What a user's forward may call: gradients and hooks of their own are in the graph, what leaves it is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from onebox.errors import CaptureError
from onebox.graph import Port, TracedModel
from onebox.graph.capture.export import capture
from onebox.graph.capture.traced_calls import FailedCall
from tests.unit.graph.staged import order_of, run, trace

SHARE = 0.375
X, Y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)


class Line(nn.Module):
    """Two linear layers, and what a test computes between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor] = lambda self, h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Linear(4, 5), nn.Linear(5, 2), between
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1]))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return whatever the test computes."""
        return self.second(self.between(self, self.first(x)))


def assert_equal(model: nn.Module, loss: Any = mse_loss) -> None:
    """Compare the gradients of a traced model with those of PyTorch."""
    found = gradients(model, loss)
    model.zero_grad()
    (loss(model(X), Y) * SHARE).backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        got = found.get(f"model.{name}", torch.zeros_like(parameter))
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12), name


def gradients(model: nn.Module, loss: Any = mse_loss) -> dict[str, Tensor]:
    """Return the gradients of a traced model, of a micro-batch that is some share of its batch."""
    traced = trace(model, loss, (X, Y), halves=False)
    programs = traced.model.divide()
    given = {**traced.given, Port("weight", 0): torch.tensor(SHARE, dtype=torch.float64)}
    made = run(programs, given, order_of(programs, halves=False)).made
    return {str(port.name): value for port, value in made.items() if port.kind == "gradient"}


class Sign(torch.autograd.Function):
    """A step with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def hooked(self: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 0.5 * self.mask)
    return h


def inferred(self: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        frozen = torch.tanh(h)
    return h + frozen.clone()


def through_data(self: Any, h: Tensor) -> Tensor:
    return h * h.data


def differentiated(self: Any, h: Tensor) -> Tensor:
    x = h.detach().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)
    return h + slope


def mapped(self: Any, h: Tensor) -> Tensor:
    return h * torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(h)


@pytest.mark.parametrize(
    "between",
    [
        lambda self, h: Sign.apply(h),
        hooked,
        inferred,
        through_data,
        differentiated,
        mapped,
        lambda self, h: checkpoint(torch.tanh, h, use_reentrant=False),
        lambda self, h: checkpoint(torch.tanh, h, use_reentrant=True),
    ],
)
def test_gradients_are_pytorchs(between: Any) -> None:
    assert_equal(Line(between))


def test_hooks_of_parameters_are_called_with_their_whole_gradient() -> None:
    model = Line(lambda self, h: h + self.first.bias)  # the bias is read twice
    model.first.bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.second.weight.register_hook(lambda gradient: gradient * 2)
    assert_equal(model)


def test_a_hook_that_changes_a_gradient_in_place_counts() -> None:
    model = Line()

    def halve(gradient: Tensor) -> None:
        gradient.mul_(0.5)

    model.first.weight.register_hook(halve)
    whole = gradients(Line())["model.first.weight"]
    assert torch.allclose(gradients(model)["model.first.weight"], whole * 0.5, rtol=1e-12)


def test_hooks_of_modules_are_in_the_graph() -> None:
    model = Line(lambda self, h: torch.tanh(h))
    model.second.register_full_backward_hook(lambda module, given, made: (given[0] * 2,))
    model.second.register_forward_hook(lambda module, given, made: made * 3)
    model.first.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    assert_equal(model)


def test_a_weight_in_the_closure_of_the_loss_gets_its_gradient() -> None:
    model = Line()
    weight = model.first.weight
    assert_equal(model, lambda outputs, targets: mse_loss(outputs, targets) + weight.square().sum())


# ---- what is refused


def observed(self: Any, h: Tensor) -> Tensor:
    norms: list[Tensor] = []
    h.register_hook(lambda gradient: norms.append(gradient.norm()))  # here
    return h


def listed(self: Any, h: Tensor) -> Tensor:
    return h * sum(h.tolist()[0])  # here


def written_data(self: Any, h: Tensor) -> Tensor:
    h.data.mul_(2)  # here
    return h


def called_back(self: Any, h: Tensor) -> Tensor:
    h.sum().backward()  # here
    return h


CONSTANT = torch.zeros(5, dtype=torch.float64)


def written_global(self: Any, h: Tensor) -> Tensor:
    CONSTANT.add_(1)  # here
    return h + CONSTANT


@pytest.mark.parametrize(
    ("between", "reason", "advice"),
    [
        (observed, "a hook looks at a gradient and leaves it as it is", "Return the gradient"),
        (listed, ".tolist() takes values out of PyTorch", "in the data set"),
        (written_data, "writes through .data", "clone"),
        (called_back, "calls backward", "torch.autograd.grad"),
        (written_global, "writes to a tensor that is neither a buffer", "register_buffer"),
    ],
)
def test_a_refusal_names_the_line_and_the_way_out(between: Any, reason: str, advice: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Line(between), mse_loss, (X, Y))
    message = str(caught.value)
    assert reason in message
    assert advice in message
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i in range(between.__code__.co_firstlineno, len(lines)) if "# here" in lines[i]) + 1
    assert f"{__file__}:{number}: {lines[number - 1].strip()}" in message
    assert torch.equal(CONSTANT, torch.zeros(5, dtype=torch.float64))


def test_a_refusal_names_the_layer() -> None:
    class Deciding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.Linear(4, 2), Deciding()).double()
    with pytest.raises(CaptureError, match=r"\(layer model\.1, Deciding\)"):
        capture(model, mse_loss, (X, Y))


def test_hooks_behind_accumulation_are_refused_by_name() -> None:
    model = Line()
    model.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(CaptureError, match=r"model\.second\.bias has a hook of register_post_accumulate_grad_hook"):
        capture(model, mse_loss, (X, Y))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: nn.Module = torch.jit.script(nn.Linear(4, 2))
    return module


def sparse(*, compressed: bool) -> nn.Module:
    module, weight = nn.Linear(4, 2), torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if compressed:
            module.weight = nn.Parameter(weight.to_sparse_csr())
        else:
            module.register_buffer("graph", weight.to_sparse())
    return module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            sparse(compressed=True),
            r"weight of the model \(Linear\) is a sparse tensor \(torch\.sparse_csr\).*\n.*Make it dense",
        ),
        (sparse(compressed=False), r"graph of the model \(Linear\) is a sparse tensor \(torch\.sparse_coo\)"),
        (nn.DataParallel(nn.Linear(4, 2)), r"\(DataParallel\) divides the work among devices itself.*\n.*\.module"),
        (scripted(), r"is scripted.*\n.*the module that it was scripted from"),
        (
            nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, momentum=None)),
            r"1 \(BatchNorm1d\) has momentum=None.*\n.*Give it a momentum",
        ),
    ],
)
def test_models_that_are_no_plain_modules_are_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=re.compile(message)):
        capture(model, mse_loss, (X.float(), Y.float()))


# ---- sizes that vary


class Attending(nn.Module):
    """A layer of attention over a sequence, with a mask of the length of that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attend = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Classify words [B, T]."""
        h = self.embed(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.attend(h, h, h, attn_mask=mask, need_weights=False)[0].mean(1))


def test_a_capture_with_symbols_makes_the_programs_of_each_length() -> None:
    model = Attending()

    def example(length: int) -> tuple[Tensor, Tensor]:
        return torch.ones(3, length, dtype=torch.long), torch.zeros(3, 2)

    symbolic = capture(model, mse_loss, example(6), varying={0: frozenset({1})})
    for length in (2, 7, 33):
        captured = symbolic.sized(list(example(length)))
        assert captured is not None
        found = TracedModel(captured, backward=True).divide()
        expected = TracedModel(capture(model, mse_loss, example(length)), backward=True).divide()
        assert {phase: named.program for phase, named in found.phases.items()} == {
            phase: named.program for phase, named in expected.phases.items()
        }
    assert symbolic.sized(list(example(1))) is None


def test_a_capture_with_symbols_is_not_for_sizes_that_it_has_decided_by() -> None:
    class Long(Attending):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return self.head(h.mean(1) if x.shape[1] > 8 else h.sum(1))

    symbolic = capture(
        Long(), mse_loss, (torch.ones(3, 12, dtype=torch.long), torch.zeros(3, 2)), varying={0: frozenset({1})}
    )
    assert symbolic.sized([torch.ones(3, 9, dtype=torch.long), torch.zeros(3, 2)]) is not None
    assert symbolic.sized([torch.ones(3, 8, dtype=torch.long), torch.zeros(3, 2)]) is None


def test_a_model_that_counts_by_a_size_has_captures_for_each() -> None:
    class Unrolled(Attending):
        def forward(self, x: Tensor) -> Tensor:
            steps = [self.head(self.embed(x[:, step])) for step in range(x.shape[1])]
            return torch.stack(steps).mean(0)

    def example(length: int) -> tuple[Tensor, Tensor]:
        return torch.ones(3, length, dtype=torch.long), torch.zeros(3, 2)

    symbolic = capture(Unrolled(), mse_loss, example(5), varying={0: frozenset({1})})
    assert symbolic.of_one_size
    assert symbolic.sized(list(example(5))) is not None
    assert symbolic.sized(list(example(6))) is None


def test_ctc_is_refused_with_the_way_out() -> None:
    lengths = torch.full((3,), 4), torch.tensor([1, 2, 1])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        scores = outputs.log_softmax(-1).expand(4, 3, 2)
        return torch.nn.functional.ctc_loss(scores, targets, *lengths)

    with pytest.raises(
        CaptureError, match=r"ctc_loss computes in a space.*lengths\n.*virtual device \(vgpu\)"
    ) as caught:
        capture(nn.Linear(4, 2), loss, (torch.ones(3, 4), torch.ones(3, 2, dtype=torch.long)))
    assert "torch.where" not in str(caught.value)


# ---- calls that fail


def test_a_failed_call_that_the_model_catches_leaves_sizes_open() -> None:
    class Trying(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return torch.mm(x, torch.ones(5, 2))
            except RuntimeError:
                return super().forward(x)

    def example(size: int) -> tuple[Tensor, Tensor]:
        return torch.ones(size, 4), torch.zeros(size, 2)

    symbolic = capture(Trying(4, 2), mse_loss, example(6), varying={0: frozenset({0}), 1: frozenset({0})})
    assert not symbolic.of_one_size
    assert symbolic.sized(list(example(9))) is not None


def again(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    error = RuntimeError("the trace's own")
    return FailedCall(error, func, args, kwargs).refused_by_pytorch(error)


def test_a_call_is_not_made_again_whose_result_is_too_large() -> None:
    assert again(torch.matmul, torch.empty(1 << 22, 1), torch.empty(1, 1 << 22)) is None
    assert again(torch.full, (1 << 45,), 1.0, device="cpu") is None
    assert "mat1 and mat2" in str(again(torch.matmul, torch.empty(2, 3), torch.empty(2, 3)))


def test_a_call_that_is_made_again_leaves_generators_alone() -> None:
    generator = torch.Generator()
    before = generator.get_state()
    assert again(torch.bernoulli, torch.empty(3), generator=generator) is None
    assert torch.equal(generator.get_state(), before)
