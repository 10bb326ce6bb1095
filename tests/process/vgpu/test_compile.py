"""``torch.compile(model, backend="onebox")`` gives what eager operators on the device give, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kit.models import CASES
from tests.kit.reference import call
from tests.process.vgpu.compiling import EXACT, HERE, close, compiled, fresh, moved, programs

__all__ = ["fresh", "programs"]


def trained(name: str, device: Any, wrap: Callable[[nn.Module], Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train a model for three steps; the last batch has another shape."""
    case = CASES[name]
    model = case.model().to(device)
    function = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(3)
    losses = []
    for inputs, targets in case.batches([4, 4, 3]):
        optimizer.zero_grad()
        loss = case.loss(call(function, moved(inputs, device)), moved(targets, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    return [loss.cpu() for loss in losses], state


@pytest.mark.feature("Virtual devices: Compile a model with torch.compile")
@pytest.mark.parametrize("name", ["mlp", "cnn", "attention", "branches", "tied", "unet", "late", "prompted"])
def test_training_gives_what_eager_operators_give(name: str, programs: list[Any]) -> None:
    eager = trained(name, HERE, lambda model: model)
    assert not programs
    made = trained(name, HERE, compiled)
    assert len(programs) >= 6, "forward and backward of each step are programs"
    assert len(set(programs)) >= 4, "a batch of another size has programs of its own"
    torch.testing.assert_close(made, eager, rtol=0, atol=1e-15)
    torch.testing.assert_close(made, trained(name, "cpu", lambda model: model), **EXACT)


class Heads(nn.Module):
    """Attention of heads whose kernels lay out gradients otherwise than they are traced.

    Args:
        activation: Of queries, keys and values.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(3, 24), nn.Linear(8, 5)
        self.activation = activation

    def forward(self, x_BTF: Tensor) -> Tensor:
        """Map [B, T, 3] to [B, 5, T]."""
        q, k, v = (self.activation(t.unflatten(-1, (2, 4)).transpose(1, 2)) for t in self.qkv(x_BTF).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v) + q @ (k.transpose(-1, -2) @ v)
        return self.out(mixed.transpose(1, 2).flatten(2)).transpose(1, 2)


@pytest.mark.parametrize("name", ["elu", "hardtanh", "softplus", "hardswish", "logsigmoid"])
def test_values_that_lie_otherwise_than_traced(name: str, programs: list[Any]) -> None:
    activation = getattr(functional, name)

    def gradients(device: str, wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model, x, y = Heads(activation), torch.randn(4, 6, 3), torch.randn(4, 5, 6)
        loss = functional.huber_loss(wrap(model.to(device))(x.to(device)), y.to(device))
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    close(gradients(HERE, compiled), gradients("cpu", lambda model: model))
    assert programs


def test_dropout_draws_what_eager_operators_draw() -> None:
    eager = trained("dropping", HERE, lambda model: model)
    torch.testing.assert_close(trained("dropping", HERE, compiled), eager, rtol=0, atol=0)


def test_each_call_has_a_mask_of_its_own_and_backward_has_the_same() -> None:
    function = compiled(lambda x: functional.dropout(x, 0.3))
    x = torch.ones(4000, device=HERE, requires_grad=True)
    masks = []
    for _ in range(3):
        y = function(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient.cpu(), y.detach().cpu())
        masks.append(y.detach().cpu() > 0)
        assert 0.65 < masks[-1].double().mean().item() < 0.75
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_random_numbers_go_on_behind_a_compiled_call() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x + torch.rand_like(x), torch.randn(3, device=x.device), torch.randperm(5, device=x.device)

    x = torch.zeros(2, 3, device=HERE)
    torch.manual_seed(5)
    eager = [function(x), function(x), torch.rand(2, device=HERE)]
    torch.manual_seed(5)
    step = compiled(function)
    torch.testing.assert_close(moved([step(x), step(x), torch.rand(2, device=HERE)], "cpu"), moved(eager, "cpu"))


# ---- functions of every kind: the same results, and the same written to the arguments


def _writes(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y[0] = x.sum()
    return x * 2


def _writes_by_a_view(x: Tensor, y: Tensor) -> Tensor:
    part = x[1:]
    part.mul_(y[1:])
    return part + 1


def _views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x * y
    return x.view(-1), x, x.t(), x + 1, z, z.view(-1), z[1:]


def _several(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    values, places = x.max(0)
    low, high = x.split([1, 1])
    return values, places, low - high, torch.unbind(y)[1], y.topk(2), {"nested": [x.sum()]}


def _strides(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x.t() * 2).contiguous().t()
    return z.as_strided((3, 2), (1, 3)), x.as_strided((2, 2), (2, 1)), z, y.expand(4, 2, 3)


def _constants(x: Tensor, y: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0], device=x.device) * torch.tensor(2.0) + torch.arange(3, device=x.device)


def _host(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    there = (x * 2).cpu() + 1
    return there, there.to(x.device) * y


def _breaks(x: Tensor, y: Tensor) -> Tensor:
    z = x.sin()
    return (z * 2 if z.sum().item() > y.sum().item() else z.cos()) + 1


def _complex(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    spectrum = torch.fft.fft(x * 2) * torch.view_as_complex(torch.stack([y, x], -1)).conj()
    return spectrum.abs() + 1, spectrum, spectrum.imag * 2, torch.fft.ifft(spectrum).real


def _branches(x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() > y.sum(), lambda x: x.sin() + y, lambda x: x.cos() - y, (x,)) * 2


def _selects(x: Tensor, y: Tensor) -> Tensor:
    return x[x > 0] * 2


@pytest.mark.parametrize(
    "function",
    [_writes, _writes_by_a_view, _views, _several, _strides, _constants, _host, _breaks, _complex, _branches, _selects],
    ids=lambda function: function.__name__.strip("_"),
)
def test_a_function_does_what_it_does_on_the_host(function: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(2, 3, generator=generator) for _ in range(2)]
    here = moved(values)
    step = compiled(function)
    for _ in range(2):
        close(step(*here), function(*values))
        close(here, values)


def test_what_a_function_gives_out_may_be_written_to() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x.clone(), y, y.clone(), y.clone().view(-1), x.view(-1)

    host = torch.arange(6.0).view(2, 3)
    x = host.to(HERE)
    first, second, third, fourth, fifth = compiled(function)(x)
    first.add_(1)
    close([x, first], [host, host + 1])
    second.add_(1)
    close([second, third, fourth], [host * 2 + 1, host * 2, (host * 2).view(-1)])
    third.zero_()
    close(fourth, (host * 2).view(-1))
    fifth.mul_(3)
    close(x, host * 3)


def test_sizes_and_numbers_that_change() -> None:
    def function(x: Tensor, rows: int, factor: float) -> Tensor:
        return x.view(rows, -1).sum(1) * rows * factor

    step = compiled(function)
    for size, rows, factor in [(24, 2, 0.5), (24, 3, 0.25), (12, 4, 0.125), (24, 2, 0.75)]:
        x = torch.arange(float(size))
        close(step(x.to(HERE), rows, factor), function(x, rows, factor))


def test_a_size_that_is_marked_as_dynamic_runs_operator_by_operator() -> None:
    x = torch.randn(2, 3, device=HERE)
    torch._dynamo.mark_dynamic(x, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close(compiled(lambda x: x * 2)(x), x * 2)
    assert any("fixed shapes" in str(warning.message) for warning in caught)


def test_numbers_and_tensors_of_the_host_among_the_arguments() -> None:
    def function(x: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
        return (x * factor) @ weight.to(x.device)

    x, factor, weight = torch.randn(2, 3), torch.tensor(3.0), torch.randn(3, 2)
    close(compiled(function)(x.to(HERE), factor, weight), function(x, factor, weight))


def test_a_model_of_the_host_stays_there() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    made = compiled(model)(x)
    assert type(made) is Tensor
    close(made, model(x))
