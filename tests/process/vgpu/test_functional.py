"""``torch.func`` and graphs that are recorded work on virtual devices as on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.process.vgpu.beside import Case, beside, fails_beside, fill, listed, normal

WORKING: list[Case] = []
FAILING: list[Case] = []
works, fails = listed(WORKING), listed(FAILING)

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # which PyTorch calls for forward mode
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # func.linearize's own, on any device
]


def waves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x * 2


@works
def gradients(device: str) -> Any:
    x = normal(3, device=device)
    return [
        func.grad(lambda x: (x**3).sum())(x),
        func.grad_and_value(lambda x, y: (x * y).sum().sin(), argnums=(0, 1))(x, x * 2),
        func.grad(func.grad(lambda x: x**3))(x[0]),
        func.jvp(lambda x: x.sin() * x, (x,), (x * 2,)),
        func.vjp(waves, x)[1]((x, x)),
        func.jvp(func.grad(lambda x: (x**4).sum()), (x,), (x * 2,)),  # type: ignore[misc]
    ]


@works
def jacobians(device: str) -> Any:
    x = normal(3, device=device)
    each = (func.jacrev, func.jacfwd, func.hessian)
    return [kind(lambda x: (x**2) * x.sum())(x) for kind in each]


@works
def linear_maps(device: str) -> Any:
    x = normal(3, device=device)
    value, push = func.linearize(lambda x: x.sin() * x, x)
    return value, push(x), push(x * 2)


@works
def graphs(device: str) -> Any:
    x = normal(3, device=device)
    factor = x.cos()
    graph = make_fx(lambda x: x * factor + 1)(x)
    return graph(x), graph(x * 3)


@works
def maps_over_batches(device: str) -> Any:
    x, y = normal(4, 3, device=device), normal(3, 5, device=device)
    places = torch.tensor([0, 1, 2, 0], device=device)
    squares = normal(4, 3, 3, device=device)

    def in_place(row: Tensor) -> Tensor:
        made = row.clone()
        made.add_(1)
        made[0] = 3
        return made

    return [
        func.vmap(torch.dot)(x, x * 2),
        func.vmap(lambda row, y: (row @ y).relu(), in_dims=(0, None), out_dims=-1)(x, y),
        func.vmap(lambda row: row.sin(), chunk_size=3)(x),
        func.vmap(func.vmap(lambda a, b: a * b + 1, (0, None)), (None, 0))(x[0], x[:, 0]),
        func.vmap(in_place)(x),
        func.vmap(lambda row, place: row[place])(x, places),
        func.vmap(torch.linalg.inv)(squares),
        func.vmap(lambda row: torch.where(row > 0, row, 0.0).cumsum(0) * y[:, 0])(x),
        func.vmap(lambda row: torch.rand_like(row) * 0 + row, randomness="different")(x),
    ]


@works
def gradients_of_each_sample(device: str) -> Any:
    layers = [nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)]
    model = fill(nn.Sequential(*layers)).to(device)
    leaves = {name: each.detach() for name, each in model.named_parameters()}

    def loss(leaves: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(func.functional_call(model, leaves, (row[None],)), target[None])

    targets = torch.tensor([0, 1, 2, 0], device=device)
    return func.vmap(func.grad(loss), (None, 0, 0))(leaves, normal(4, 1, 6, 6, device=device), targets)


@works
def ensembles(device: str) -> Any:
    models = [fill(nn.Linear(3, 2)).to(device) for _ in range(3)]
    leaves, buffers = func.stack_module_state(models)
    shape = copy.deepcopy(models[0]).to("meta")

    def run(leaves: Any, buffers: Any, rows: Tensor) -> Tensor:
        made: Tensor = func.functional_call(shape, (leaves, buffers), (rows,))
        return made

    return func.vmap(run, (0, 0, None))(leaves, buffers, normal(4, 3, device=device))


@works
def learning_to_learn(device: str) -> Any:
    rows = normal(4, 3, device=device)

    def outer(weight: Tensor) -> Tensor:
        slope = func.grad(lambda weight: ((rows @ weight) ** 2).mean())(weight)
        return ((rows @ (weight - 0.1 * slope) - 1) ** 2).mean()

    return func.grad(outer)(normal(3, device=device))


@works
def modules_with_other_parameters(device: str) -> Any:
    model = fill(nn.Linear(4, 3)).to(device)
    rows = normal(2, 4, device=device)
    doubled = {name: each * 2 for name, each in model.named_parameters()}
    return func.functional_call(model, doubled, (rows,)), model(rows)


@fails
def numbers_within_a_map(device: str) -> Any:
    return func.vmap(lambda x: x.item())(normal(3, device=device))


@fails
def branches_within_a_map(device: str) -> Any:
    return func.vmap(lambda x: x if x > 0 else -x)(normal(3, device=device))


@pytest.mark.feature("Virtual devices: Use hooks, higher derivatives and torch.func")
@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_functions_of_functions_are_those_of_the_cpu(case: Case) -> None:
    beside(case)


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.__name__)
def test_mistakes_are_told_as_on_the_cpu(case: Case) -> None:
    fails_beside(case)
