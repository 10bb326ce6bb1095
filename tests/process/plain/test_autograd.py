"""Custom backward functions, hooks, detached parts, checkpoints and gradients inside of forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.kit.pools import Pools
from tests.process.plain.case import Case, case, check, equal_or_refused, refused
from tests.process.plain.data import Between, labelled, mlp, sgd
from tests.process.plain.ways import Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


def train(way: Way, model: nn.Module, **options: Any) -> None:
    way.train(model, F.cross_entropy, sgd, labelled(), **{"micro_batch": 8, **options})


class Skewed(torch.autograd.Function):
    """A square whose backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3 * ctx.saved_tensors[0]


class StraightThrough(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversal(torch.autograd.Function):
    """The identity, with its gradient reversed and scaled by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


@case()
def function_with_another_backward(way: Way) -> None:
    train(way, Between(lambda module, h: Skewed.apply(h)))


@case()
def straight_through_sign(way: Way) -> None:
    train(way, Between(lambda module, h: StraightThrough.apply(h)))


@case()
def gradient_reversal(way: Way) -> None:
    train(way, Between(lambda module, h: Reversal.apply(h, 0.3)))


def hooked(way: Way, place: Callable[[nn.Sequential], object]) -> None:
    """Train an MLP on which a hook was placed after it came to its device."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        place(model)  # type: ignore[arg-type]
        return sgd(model)

    way.train(mlp(), F.cross_entropy, optimizer, labelled(), micro_batch=8)


@case()
def hook_on_a_parameter(way: Way) -> None:
    """With the whole batch at once: plain PyTorch calls it for each micro-batch, which is the same for a factor."""
    hooked(way, lambda model: model[0].weight.register_hook(lambda grad: grad * 0.1))


@case()
def hook_on_a_parameter_before_the_model_moves(way: Way) -> None:
    """As with a GPU, ``.to`` keeps the hooks."""
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 0.1)
    train(way, model)


@case()
def hook_on_a_parameter_that_masks(way: Way) -> None:
    def place(model: nn.Sequential) -> None:
        mask = (model[0].weight.detach() > 0).to(model[0].weight.dtype)
        model[0].weight.register_hook(lambda grad: grad * mask)

    hooked(way, place)


@case(trainer=refused("register_post_accumulate_grad_hook|post.accumulate"))
def post_accumulate_hook(way: Way) -> None:
    def shrink(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.1)

    hooked(way, lambda model: model[0].weight.register_post_accumulate_grad_hook(shrink))


@case(trainer=refused("looks at a gradient"))
def backward_hook_that_only_looks(way: Way) -> None:
    hooked(way, lambda model: model[2].register_full_backward_hook(lambda module, given, of: None))


@case()
def backward_hook_that_changes(way: Way) -> None:
    hooked(way, lambda model: model[2].register_full_backward_hook(lambda module, given, of: (given[0] * 0.5,)))


@case()
def backward_pre_hook(way: Way) -> None:
    hooked(way, lambda model: model[2].register_full_backward_pre_hook(lambda module, of: (of[0] * 0.5,)))


@case()
def forward_hook_that_changes(way: Way) -> None:
    hooked(way, lambda model: model[0].register_forward_hook(lambda module, given, output: output * 2))


@case()
def forward_pre_hook_that_changes(way: Way) -> None:
    hooked(way, lambda model: model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,)))


class Collecting(nn.Module):
    """A model that collects what its first layer returns by a hook, which it adds at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.ready = nn.Linear(8, 8), nn.Linear(8, 4), False
        self.collected: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.first.register_forward_hook(self.collect)
            self.ready = True
        self.collected = []
        h = self.first(x)
        (hidden,), self.collected = self.collected, None
        return self.last(h + hidden.tanh())

    def collect(self, module: Any, given: Any, output: Tensor) -> None:
        if self.collected is not None:
            self.collected.append(output)


@case()
def hook_that_forward_adds_once(way: Way) -> None:
    train(way, Collecting())


def with_another_hook(module: Any, h: Tensor) -> Tensor:
    module.first.register_forward_hook(lambda *_: None)
    return h


@case(trainer=refused(r"test_autograd\.py:\d+: module\.first\.register_forward_hook"), vgpu=None)
def hook_that_forward_adds_each_time(way: Way) -> None:
    train(way, Between(with_another_hook))


def halved(module: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 0.5)
    return h.relu()


@case()
def hook_on_an_activation(way: Way) -> None:
    train(way, Between(halved))


def without_grad(module: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        g = module.first(h).relu()
    return h + g


@case()
def no_grad(way: Way) -> None:
    train(way, Between(without_grad))


class Frozen(nn.Module):
    """A front without gradients by a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        return self.a(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.features(x)) + self.a(x)[:, :4]


@case()
def no_grad_as_a_decorator(way: Way) -> None:
    train(way, Frozen())


def inferred(module: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():
        g = module.first(h.detach()).relu()
    return g.clone()


@case()
def inference_mode(way: Way) -> None:
    train(way, Between(inferred))


@case()
def detach_for_a_straight_through_estimate(way: Way) -> None:
    train(way, Between(lambda module, h: h + (h.round() - h).detach()))


@case(trainer=equal_or_refused(r"\.data|detach"))
def data_attribute(way: Way) -> None:
    train(way, Between(lambda module, h: h + h.data * 2))


def rerun(module: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda t: module.first(t).relu(), h, use_reentrant=False)


@case()
def activation_checkpoint(way: Way) -> None:
    train(way, Between(rerun))


def rerun_reentrant(module: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda t: module.first(t).relu(), h, use_reentrant=True)


@case(trainer=equal_or_refused("use_reentrant"))
def reentrant_checkpoint(way: Way) -> None:
    train(way, Between(rerun_reentrant))


@case(trainer=equal_or_refused("use_reentrant"))
def reentrant_checkpoint_beside_another_path(way: Way) -> None:
    train(way, Between(lambda module, h: rerun_reentrant(module, h) + h))


class Sequence(nn.Module):
    """Layers in two checkpointed parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=False))


@case()
def checkpointed_sequence(way: Way) -> None:
    train(way, Sequence())


class Penalized(nn.Module):
    """Outputs and the gradient of their sum by the inputs."""

    def __init__(self, gradient: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.gradient = gradient

    def outputs(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.outputs(x), self.gradient(self.outputs, x)


def by_autograd(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]


def by_vmap(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda v: function(v).sum()))(x)


def penalty(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + outputs[1].pow(2).sum(1).mean()


@case(trainer=equal_or_refused(r"autograd\.grad"))
def gradient_penalty(way: Way) -> None:
    way.train(Penalized(by_autograd), penalty, sgd, labelled(), micro_batch=8)


@case(trainer=equal_or_refused(r"torch\.func|vmap"))
def gradient_penalty_by_vmap(way: Way) -> None:
    way.train(Penalized(by_vmap), penalty, sgd, labelled(), micro_batch=8)
