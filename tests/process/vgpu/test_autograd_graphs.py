"""Hooks, graphs and derivatives on a virtual device are what they are on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad, functional, gradcheck, gradgradcheck
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.process.vgpu.beside import Case, beside, fails_beside, fill, listed, normal

WORKING: list[Case] = []
FAILING: list[Case] = []
works, fails = listed(WORKING), listed(FAILING)


pytestmark = pytest.mark.usefixtures("pool")


def leaf(*shape: int, device: str) -> Tensor:
    return normal(*shape, device=device, requires_grad=True)


# ---- hooks


@works
def hooks_of_tensors(device: str) -> Any:
    x = leaf(3, device=device)
    seen: list[Tensor] = []
    hook = x.register_hook(lambda grad: grad * 2)
    y = x * 3
    y.register_hook(lambda grad: seen.append(grad.clone()))
    y.retain_grad()
    (y**2).sum().backward()
    first, x.grad = x.grad, None
    hook.remove()
    (x * 3).sum().backward()
    return first, x.grad, y.grad, seen


@works
def hooks_of_nodes_and_of_several_tensors(device: str) -> Any:
    x, y = leaf(3, device=device), leaf(3, device=device)
    seen: list[Any] = []
    register_multi_grad_hook([x, y], lambda grads: seen.extend(grad.clone() for grad in grads if grad is not None))
    z = x * y
    assert z.grad_fn is not None
    z.grad_fn.register_hook(lambda inputs, _: (inputs[0] * 3, inputs[1]))
    z.grad_fn.register_prehook(lambda outputs: (outputs[0] * 5,))
    z.sum().backward()
    return x.grad, y.grad, seen, z.grad_fn.name()


@works
def steps_from_within_backward(device: str) -> Any:
    model = fill(nn.Linear(3, 2)).to(device)
    optimizers = {each: torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in model.parameters()}

    def step(each: Tensor) -> None:
        optimizers[each].step()
        optimizers[each].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(normal(4, 3, device=device)).pow(2).sum().backward()
    return model.state_dict()


@works
def hooks_of_modules(device: str) -> Any:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).to(device)
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, given, made: made * 2)
    model[1].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    model[1].register_full_backward_hook(lambda module, inputs, outputs: seen.extend([*inputs, *outputs]))
    model[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    x = leaf(5, 3, device=device)
    model(x).sum().backward()
    return seen, x.grad, [each.grad for each in model.parameters()]


# ---- graphs


@works
def gradient_penalty(device: str) -> Any:
    critic = fill(nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    critic = critic.to(device)
    optimizer = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.0, 0.9))
    losses = []
    for step in range(4):
        real, fake = normal(6, 3, device=device) + step, normal(6, 3, device=device) * 2 - step
        share = normal(6, 1, device=device).sigmoid()
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, critic.state_dict()


@works
def graphs_kept_and_gradients_given(device: str) -> Any:
    x, y, unused = leaf(3, device=device), leaf(3, device=device), leaf(2, device=device)
    x.grad = torch.ones(3, dtype=torch.float64, device=device)
    given = x.grad
    z = (x**3 * y).sum()
    z.backward(retain_graph=True)
    z.backward(inputs=[x])
    some = torch.autograd.grad((x * x).sum(), [x, unused], allow_unused=True)
    zeros = torch.autograd.grad((x * x).sum(), [x, unused], allow_unused=True, materialize_grads=True)
    many = torch.autograd.grad(x**3, x, torch.eye(3, dtype=torch.float64, device=device), is_grads_batched=True)
    return x.grad, given is x.grad, y.grad, some, zeros, many


@works
def gradients_kept_as_zeros(device: str) -> Any:
    model = fill(nn.Linear(3, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(normal(4, 3, device=device)).pow(2).sum().backward()
        optimizer.step()
    model.zero_grad(set_to_none=False)
    return [each.grad for each in model.parameters()], model.state_dict()


@fails
def graph_used_twice(device: str) -> Any:
    y = (leaf(3, device=device) ** 3).sum()
    y.backward()
    y.backward()


@fails
def gradient_of_another_shape(device: str) -> Any:
    leaf(3, device=device).grad = torch.ones(2, dtype=torch.float64, device=device)


@fails
def gradient_of_an_unused_tensor(device: str) -> Any:
    x, y = leaf(4, device=device), leaf(4, device=device)
    torch.autograd.grad((x * x).sum(), [x, y])


@fails
def whole_numbers_with_gradients(device: str) -> Any:
    torch.ones(2, dtype=torch.int64, device=device).requires_grad_()


class Square(Function):
    """Twice differentiable, with an output that is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        place = x.argmax()
        ctx.mark_non_differentiable(place)
        return x * x * factor, place

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * grad * ctx.factor, None


class Double(Function):
    """Works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@works
def functions_of_ones_own(device: str) -> Any:
    x = leaf(4, device=device)
    y, place = Square.apply(x, 3.0)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    slope.pow(2).sum().backward()
    z = x * 1
    doubled = Double.apply(z)
    return y, place, place.requires_grad, x.grad, doubled is z, z


@works
def checkpoints(device: str) -> Any:
    model = fill(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])).to(device)
    made = []
    for reentrant in (True, False):
        x = leaf(2, 4, device=device)
        model.zero_grad()
        checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum().backward()
        made += [x.grad, *[each.grad for each in model.parameters()]]
    x = leaf(2, 4, device=device)
    checkpoint(lambda a, b: (a * b).sin(), x, b=x * 2, use_reentrant=False).sum().backward()
    return made, x.grad


@works
def saved_tensors_elsewhere(device: str) -> Any:
    x, y = leaf(4, device=device), leaf(4, device=device)
    with saved_tensors_hooks(lambda saved: saved.cpu().numpy(), lambda kept: torch.from_numpy(kept).to(device)):
        made = (x * x.exp()).sum()
    made.backward()
    with save_on_cpu():
        made = (y * y.exp()).tanh().sum()
    made.backward()
    return x.grad, y.grad


@works
def derivatives_of_functions(device: str) -> Any:
    x, v = normal(3, device=device), normal(3, device=device)

    def vector(x: Tensor) -> Tensor:
        return (x**3) * x.sum()

    def number(x: Tensor) -> Tensor:
        return (x**3).sum() * x[0]

    made = [functional.vjp(vector, x, v), functional.jvp(vector, x, v)]
    made += [functional.hvp(number, x, v), functional.vhp(number, x, v)]
    for vectorize in (False, True):
        made += [
            functional.jacobian(vector, x, vectorize=vectorize),
            functional.hessian(number, x, vectorize=vectorize),
        ]
    made.append(functional.jacobian(vector, x, strategy="forward-mode", vectorize=True))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, v)
        made.append(forward_ad.unpack_dual(dual.sin() * dual).tangent)
    return made


@works
def numerical_derivatives(device: str) -> Any:
    a, b = leaf(3, 4, device=device), leaf(4, 2, device=device)
    image, kernel = leaf(1, 2, 4, 4, device=device), leaf(2, 2, 3, 3, device=device)
    return [
        gradcheck(lambda a, b: (a @ b).tanh().sum(0), (a, b)),
        gradgradcheck(lambda a: (a**3).sum(), (leaf(3, device=device),)),
        gradcheck(nn.functional.conv2d, (image, kernel), fast_mode=True),
        gradcheck(lambda a: a.sin() * 2, (leaf(3, device=device),), check_forward_ad=True, check_batched_grad=True),
    ]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in SqrtBackward0")
def test_anomalies_are_found() -> None:
    with torch.autograd.set_detect_anomaly(True):
        x = torch.tensor([-1.0, 1.0], device="vgpu:1", requires_grad=True)
        with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"):
            x.sqrt().sum().backward()


@pytest.mark.feature("Virtual devices: Use hooks, higher derivatives and torch.func")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which PyTorch calls for forward mode
@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_and_gradients_are_those_of_the_cpu(case: Case) -> None:
    beside(case)


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.__name__)
def test_mistakes_are_told_as_on_the_cpu(case: Case) -> None:
    fails_beside(case)
