"""Forward-mode differentiation, functional hooks, checkpoints and flexible attention work as on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from tests.process.vgpu.beside import Case, beside, fails_beside, fill, listed, normal

WORKING: list[Case] = []
works = listed(WORKING)

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),  # is deprecated, and PyTorch calls it
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile"),
]


def net(device: str) -> nn.Module:
    made: nn.Module = fill(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))).to(device)
    return made


@works
def dual_numbers(device: str) -> Any:
    x, tangent = normal(3, 4, device=device), normal(4, 3, device=device).t()
    with forward.dual_level():
        y = forward.make_dual(x, tangent)
        found = forward.unpack_dual((y.sin() * y).sum(1))
        zero = forward.make_dual(x, torch._efficientzerotensor(3, 4, dtype=x.dtype, device=device))  # type: ignore[call-overload]
        return list(found), list(forward.unpack_dual(zero * 2 + zero.sin())), found.tangent.stride()


@works
def dual_numbers_written_to(device: str) -> Any:
    with forward.dual_level():
        y = forward.make_dual(normal(3, 4, device=device), normal(4, 3, device=device).t()).clone()
        y.mul_(2)
        y[0] = y[1]
        y.t().add_(1)
        y[1:].mul_(3)
        return list(forward.unpack_dual(y.copy_(y.exp())))


@works
def dual_numbers_through_a_network(device: str) -> Any:
    layers = fill(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)))
    model, x = layers.to(device), normal(2, 1, 5, 5, device=device)

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(func.functional_call(model, leaves, (x,)), torch.tensor([0, 1], device=device))

    leaves = {name: leaf.detach() for name, leaf in model.named_parameters()}
    with forward.dual_level():
        dual = {name: forward.make_dual(leaf, torch.ones_like(leaf)) for name, leaf in leaves.items()}
        return list(forward.unpack_dual(loss(dual)))


@works
def dual_numbers_over_a_backward_pass(device: str) -> Any:
    x = normal(3, device=device, requires_grad=True)
    with forward.dual_level():
        y = forward.make_dual(x, torch.ones_like(x))
        (gradient,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return list(forward.unpack_dual(gradient))


@works
def dual_numbers_of_attention_and_of_a_checkpoint(device: str) -> Any:
    q = normal(1, 2, 4, 8, device=device)
    with sdpa_kernel(SDPBackend.MATH), forward.dual_level():
        made = F.scaled_dot_product_attention(forward.make_dual(q, q * 2), q, q)
        again = checkpoint(torch.sin, forward.make_dual(q, q), use_reentrant=False)
        return list(forward.unpack_dual(made)), list(forward.unpack_dual(again))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_forward(x)
        return x * x

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * tangent


@works
def functions_of_ones_own(device: str) -> Any:
    with forward.dual_level():
        return list(
            forward.unpack_dual(Square.apply(forward.make_dual(normal(3, device=device), normal(3, device=device))))
        )


@works
def forward_derivatives_of_functions(device: str) -> Any:
    x, matrix = normal(3, device=device), normal(3, 3, device=device)
    model = net(device)
    leaves = dict(model.named_parameters())

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        return func.functional_call(model, leaves, (matrix,)).pow(2).mean()

    gradient = func.grad(loss)(leaves)
    return [
        func.jacfwd(func.jacfwd(lambda x: x.sin().sum()))(x),
        func.hessian(lambda x: (x**3).sum() * x[0])(x),
        func.jvp(torch.linalg.solve, (matrix, x), (matrix * 2, x)),
        func.jvp(func.grad(loss), (leaves,), (gradient,)),  # type: ignore[misc]
        func.jacfwd(lambda leaves: func.functional_call(model, leaves, (matrix,)))(leaves),
        torch.autograd.functional.jacobian(torch.sin, x, strategy="forward-mode", vectorize=True),
    ]


@works
def derivatives_that_are_checked(device: str) -> Any:
    x = normal(3, device=device, requires_grad=True)
    kinds = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    return [
        torch.autograd.gradcheck(lambda x: x.sin() * x, (x,), **kinds),
        torch.autograd.gradgradcheck(lambda x: x.sin() * x, (x,), check_fwd_over_rev=True),
    ]


@works
def hooks_within_a_function_that_is_differentiated(device: str) -> Any:
    def loss(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda gradient: gradient * 2)
        return y.sum()

    return func.grad(loss)(normal(3, device=device))


@pytest.mark.parametrize("keeps_state", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_both_kinds_give_the_gradients_of_the_cpu(reentrant: bool, keeps_state: bool) -> None:
    def run(device: str) -> Any:
        model, x = net(device), normal(5, 3, device=device, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant, preserve_rng_state=keeps_state)
        z = checkpoint(lambda a, b, k: (a * b).sin() + k, y, x, 3, use_reentrant=reentrant)
        w = checkpoint_sequential([model, nn.ReLU(), model], 2, z, use_reentrant=reentrant)
        w.sum().backward()
        return [w, x.grad, [leaf.grad for leaf in model.parameters()]]

    beside(run)


@works
def nested_checkpoints_and_their_second_derivative(device: str) -> Any:
    x = normal(5, device=device, requires_grad=True)
    inner = functools.partial(checkpoint, lambda x: x.sin() * x, use_reentrant=False)
    y = checkpoint(lambda x: inner(inner(x)).exp(), x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    gradient.sum().backward()
    return [x.grad, y, gradient]


@works
def selective_checkpoints(device: str) -> Any:
    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    x = normal(4, 4, device=device, requires_grad=True)
    contexts = functools.partial(selective_contexts, policy)
    y = checkpoint(lambda x: (x @ x).sin() @ x, x, use_reentrant=False, context_fn=contexts)
    y.sum().backward()
    return [x.grad, y]


@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_and_derivatives_are_those_of_the_cpu(case: Case) -> None:
    if case is dual_numbers_of_attention_and_of_a_checkpoint and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no forward derivative of a checkpoint")
    beside(case)


def test_what_has_no_forward_derivative_on_the_cpu_is_refused_alike() -> None:
    def attention(device: str) -> Tensor:
        q = normal(1, 2, 4, 8, device=device)
        with forward.dual_level():
            return F.scaled_dot_product_attention(forward.make_dual(q, q), q, q)

    fails_beside(attention)


# ---- flexible attention


def attend(
    device: str, score: str, masked: bool, attention: Any = flex_attention, *, requires_grad: bool = False
) -> list[Tensor]:
    q, k, v = (normal(2, 2, 128, 16 + at, device=device)[..., :16].float().detach() for at in range(3))
    q.requires_grad_(requires_grad)
    slopes = torch.tensor([0.5, 2.0], device=device)
    scores = {
        "plain": None,
        "relative": lambda score, b, h, q, k: score + (q - k) * 0.01,
        "with a tensor": lambda score, b, h, q, k: score * slopes[h],
    }
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device=device) if masked else None
    made: Tensor = attention(q, k, v, score_mod=scores[score], block_mask=mask)
    if not requires_grad:
        return [made.cpu()]
    made.sin().sum().backward()
    assert q.grad is not None
    return [made.detach().cpu(), q.grad.cpu()]


@pytest.mark.feature("Virtual devices: Use flex_attention, eager and compiled")
@pytest.mark.usefixtures("aliased")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", ["plain", "relative", "with a tensor"])
def test_flexible_attention_gives_the_bits_of_the_cpu(score: str, masked: bool) -> None:
    (mine,), (plain,) = attend("cuda:1", score, masked), attend("cpu", score, masked)
    assert torch.equal(mine, plain)


def attention_of_operators(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any) -> Tensor:
    scores = q @ k.mT / 4
    at = torch.arange(128)
    heads = [[score_mod(scores[b, h], b, h, at[:, None], at[None]) for h in range(2)] for b in range(2)]
    scores = torch.stack([torch.stack(each) for each in heads])
    return scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1) @ v  # type: ignore[no-any-return]


@pytest.mark.usefixtures("aliased")
@pytest.mark.parametrize("compiled", [False, True])
def test_flexible_attention_has_gradients_though_the_cpu_has_none(compiled: bool) -> None:
    attention = torch.compile(flex_attention) if compiled else flex_attention
    mine = attend("cuda:1", "with a tensor", True, attention, requires_grad=True)
    plain = attend("cpu", "with a tensor", True, attention_of_operators, requires_grad=True)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
