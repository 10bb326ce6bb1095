"""Checks of values and of memory within a script, where plain PyTorch raises an error; and weights overwritten between
forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.pools import Pools
from tests.process.plain.case import EQUAL, TORCH_2_11, Case, case, check, refused
from tests.process.plain.data import FEATURES, SAMPLES, Between, integers, labelled, mlp, randn, sgd
from tests.process.plain.ways import Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


def train(way: Way, model: nn.Module) -> None:
    way.train(model, F.cross_entropy, sgd, labelled(2), micro_batch=8)


# ---- assertions


def asserting(limit: float, *words: str) -> nn.Module:
    def between(module: Any, h: Tensor) -> Tensor:
        torch._assert_async((h.abs() < limit).all(), *words)
        return h.relu()

    return Between(between)


SAID = "words of the script"


@case()
def assertion_that_holds(way: Way) -> None:
    train(way, asserting(1e9, SAID))


@case(trainer=refused(SAID), vgpu=refused(SAID))
def assertion_that_fails(way: Way) -> None:
    train(way, asserting(0.0, SAID))


@case(trainer=refused("single nonzero value"), vgpu=refused("single nonzero value"))
def assertion_without_words(way: Way) -> None:
    train(way, asserting(0.0))


@case(trainer=refused(SAID), vgpu=refused(SAID))
def assertion_that_fails_in_a_later_step(way: Way) -> None:
    model = asserting(30.0, SAID)
    batches = labelled(3)
    batches[2] = (batches[2][0] * 100, batches[2][1])
    way.train(model, F.cross_entropy, sgd, batches)


class Watched(torch.autograd.Function):
    """The identity, whose gradient has to be below a limit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch._assert_async((grad.abs() < ctx.limit).all(), SAID)
        return grad, None


@case()
def assertion_in_backward_that_holds(way: Way) -> None:
    train(way, Between(lambda module, h: Watched.apply(h, 1e9)))


@case(trainer=refused(SAID), vgpu=refused(SAID))
def assertion_in_backward_that_fails(way: Way) -> None:
    train(way, Between(lambda module, h: Watched.apply(h, 0.0)))


class Layer(nn.Module):
    """A linear layer that checks its output.

    Args:
        limit: Below which it has to be.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.linear, self.limit = nn.Linear(FEATURES, FEATURES), limit

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._assert_async((x.abs() < self.limit).all(), SAID)
        return x.tanh()


@case(trainer=refused(SAID), vgpu=refused(SAID))
def assertion_in_the_last_of_equal_layers(way: Way) -> None:
    train(way, nn.Sequential(*(Layer(1e9) for _ in range(4)), Layer(0.0)))


@case()
def assertions_in_equal_layers_that_hold(way: Way) -> None:
    train(way, nn.Sequential(*(Layer(1e9) for _ in range(5))))


# ---- one_hot


class OneHot(nn.Module):
    """A linear layer of one-hot rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B] to [B, 4]."""
        return self.linear(F.one_hot(x, FEATURES).to(self.linear.weight.dtype))


def with_classes(*changed: int) -> list[tuple[Any, Tensor]]:
    numbers = integers(0, FEATURES, SAMPLES)
    for place, number in enumerate(changed):
        numbers[place] = number
    return [(numbers, integers(0, 4, SAMPLES))]


@case()
def one_hot_of_classes(way: Way) -> None:
    way.train(OneHot(), F.cross_entropy, sgd, with_classes())


@case(trainer=None if TORCH_2_11 else refused("non-negative"), vgpu=refused("non-negative"))
def one_hot_of_a_negative_class(way: Way) -> None:
    way.train(OneHot(), F.cross_entropy, sgd, with_classes(-1))


@case(
    trainer=None if TORCH_2_11 else refused("smaller than num_classes"),
    vgpu=refused("smaller than num_classes"),
)
def one_hot_of_a_large_class(way: Way) -> None:
    way.train(OneHot(), F.cross_entropy, sgd, with_classes(FEATURES))


# ---- double backward


class Once(torch.autograd.Function):
    """A product whose backward says that it cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Slope(nn.Module):
    """A model whose output is the gradient of another one.

    Args:
        create_graph: Whether that gradient has one, too.
    """

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.linear, self.last, self.create_graph = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 4), create_graph

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        inner = Once.apply(self.linear(x)).sin().sum()
        return self.last(torch.autograd.grad(inner, x, create_graph=self.create_graph)[0])


@case(trainer=refused("once_differentiable"), vgpu=refused("once_differentiable"))
def once_differentiable_differentiated_twice(way: Way) -> None:
    train(way, Slope(create_graph=True))


@case()
def once_differentiable_differentiated_once(way: Way) -> None:
    train(way, Between(lambda module, h: Once.apply(h)))


@case(trainer=None if TORCH_2_11 else EQUAL)
def once_differentiable_in_a_gradient_without_graph(way: Way) -> None:
    train(way, Slope(create_graph=False))


# ---- weights overwritten between forward and backward; a trainer's steps are whole


def second_backward(way: Way, optimizer: Any) -> None:
    """Go backward a second time, through weights that a step has changed meanwhile."""
    model = mlp().to(way.device or "cpu")
    made = optimizer(model.parameters())
    x = randn(SAMPLES, FEATURES).to(way.device or "cpu")
    first, second = model(x).sum(), model(x * 2).square().sum()
    first.backward()
    made.step()
    second.backward()
    way.note(gradient=model[0].weight.grad)


INPLACE = refused("modified by an inplace operation")


@case(trainer=None, vgpu=INPLACE)
def second_backward_after_adam(way: Way) -> None:
    second_backward(way, torch.optim.Adam)


@case(trainer=None, vgpu=INPLACE)
def second_backward_after_momentum(way: Way) -> None:
    second_backward(way, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


@case(trainer=None, vgpu=INPLACE)
def second_backward_after_adamw_by_lists(way: Way) -> None:
    second_backward(way, lambda parameters: torch.optim.AdamW(parameters, foreach=True))


@case(trainer=None, vgpu=INPLACE)
def second_backward_after_clipping_by_lists(way: Way) -> None:
    def optimizer(parameters: Any) -> Any:
        listed = list(parameters)

        class Shrink:
            def step(self) -> None:
                with torch.no_grad():
                    torch._foreach_mul_(listed, 0.5)

        return Shrink()

    second_backward(way, optimizer)


@case(trainer=None)
def second_backward_after_a_fused_step(way: Way) -> None:
    """Kernels of fused optimizers raise no version, on the CPU either."""
    second_backward(way, lambda parameters: torch.optim.AdamW(parameters, fused=True))


@case(trainer=None)
def second_backward_before_the_step(way: Way) -> None:
    device = way.device or "cpu"
    model = mlp().to(device)
    made = torch.optim.AdamW(model.parameters())
    loss = model(randn(SAMPLES, FEATURES).to(device)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    made.step()
    way.note(weight=model[0].weight)


# ---- overlaps


def overlapping(way: Way, write: Any) -> None:
    x = torch.arange(6.0, device=way.device or "cpu")
    write(x)
    way.note(x=x)


OVERLAP = refused("single memory location")


@case(trainer=None, vgpu=OVERLAP)
def out_over_its_argument(way: Way) -> None:
    overlapping(way, lambda x: torch.add(x[1:], 1, out=x[:-1]))


@case(trainer=None, vgpu=OVERLAP)
def copy_over_its_source(way: Way) -> None:
    overlapping(way, lambda x: x[1:].copy_(x[:-1]))


@case(trainer=None, vgpu=OVERLAP)
def shift_of_a_buffer_in_place(way: Way) -> None:
    def shift(x: Tensor) -> None:
        x[1:] = x[:-1]

    overlapping(way, shift)


@case(trainer=None, vgpu=OVERLAP)
def in_place_on_an_expanded_tensor(way: Way) -> None:
    overlapping(way, lambda x: x[:1].expand(4).add_(1))


@case(trainer=None)
def shift_of_a_copy(way: Way) -> None:
    overlapping(way, lambda x: x[1:].copy_(x[:-1].clone()))


@case(trainer=None)
def out_of_the_same_view(way: Way) -> None:
    overlapping(way, lambda x: torch.add(x[1:], 1, out=x[1:]))
