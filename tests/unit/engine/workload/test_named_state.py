"""Names of parameters and buffers, and the description of an optimizer for the workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onebox.engine.workload.named_state import (
    PASSES,
    footprints,
    local_optimizer_state,
    named_state,
    optimizer_definition,
    state_entries,
    trained_names,
    update_bytes,
)
from onebox.engine.workload.parameter_groups import options_of
from onebox.errors import UsageError
from onebox.wire import TensorSpec
from onebox.wire.protocol.snapshots import StateEntry
from onebox.worker import OPTIMIZERS
from onebox.worker.optimizer.native import NativeOptimizer


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Tied(nn.Module):
    """One weight in two places, a frozen parameter, and a buffer that a state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("kept", torch.zeros(3), persistent=False)


def numbered(model: nn.Module, loss: Any = None) -> Any:
    return named_state(model, loss, itertools.count(10).__next__)


def test_each_tensor_has_one_name_and_one_number() -> None:
    state = numbered(Tied(), nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)))
    names = ["model.frozen", "model.a.weight", "model.a.bias", "model.b.bias", "model.kept", "loss.pos_weight"]
    assert list(state.tensors) == names
    assert state.parameters == set(names[:4])
    assert dict(state.numbers) == {name: 10 + index for index, name in enumerate(names)}
    assert state.spec("model.a.weight") == TensorSpec("float32", (2, 2))


def test_a_loss_that_shares_a_tensor_with_the_model_names_it_once() -> None:
    model = nn.Linear(2, 2)
    loss = nn.Module()
    loss.weight = model.weight
    assert list(numbered(model, loss).tensors) == ["model.weight", "model.bias"]


def test_a_loss_that_is_a_function_has_no_tensors() -> None:
    assert list(numbered(nn.Linear(1, 1, bias=False), nn.functional.mse_loss).tensors) == ["model.weight"]


def test_trained_parameters_are_those_of_the_groups_in_order() -> None:
    model = Tied()
    groups = [{"params": [model.b.bias, model.frozen]}, {"params": [model.a.weight]}]
    assert trained_names(numbered(model), torch.optim.SGD(groups, lr=0.1)) == ("model.b.bias", "model.a.weight")


class Own(torch.optim.SGD):
    """Somebody's own optimizer."""


Own.__name__ = "SGD"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: Own(m.parameters(), lr=0.1), "no optimizer that workers run"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "no optimizer that workers run"),
        (lambda m: torch.optim.SGD([torch.zeros(7, 7, requires_grad=True)], lr=0.1), r"\[7, 7\].*neither the model's"),
        (lambda m: torch.optim.SGD([m.frozen], lr=0.1), "no parameter that requires a gradient"),
        (lambda m: [], "no optimizer was given"),
        (lambda m: [torch.optim.SGD([m.a.bias], lr=0.1), torch.optim.LBFGS([m.b.bias])], "no optimizer that workers"),
        (lambda m: [torch.optim.SGD([m.a.bias], lr=0.1), m.b.bias], "the optimizer is a Parameter"),
        (lambda m: torch.optim.SGD, r"the class SGD; .*torch.optim.SGD\(model.parameters"),
        (
            lambda m: [torch.optim.Muon([m.a.weight]), torch.optim.AdamW(m.parameters())],
            r"model\.a\.weight of shape \[2, 2\] is in two optimizers, Muon and AdamW; allowed is one",
        ),
    ],
)
def test_optimizers_that_cannot_be_taken_over(make: Any, message: str) -> None:
    model = Tied()
    with pytest.raises(UsageError, match=message):
        trained_names(numbered(model), make(model))


def test_options_are_plain_numbers() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=torch.tensor(0.5), betas=(0.5, 0.25))
    (options,) = options_of(optimizer)
    assert options["lr"] == 0.5
    assert isinstance(options["lr"], float)
    assert options["betas"] == (0.5, 0.25)
    assert options["amsgrad"] is False
    assert options["fused"] is None
    assert "params" not in options
    optimizer.param_groups[0]["initial_lr"] = 3
    assert "initial_lr" not in options_of(optimizer)[0], "a scheduler's own business"


@pytest.mark.parametrize("kind", ["Adafactor", "Rprop", "Muon", "ASGD", "NAdam"])
def test_options_of_every_kind_of_optimizer(kind: str) -> None:
    (options,) = options_of(getattr(torch.optim, kind)([torch.zeros(2, 2, requires_grad=True)]))
    values = [v for value in options.values() for v in (value if isinstance(value, tuple) else (value,))]
    assert all(value is None or isinstance(value, bool | int | float | str) for value in values)


def test_an_option_that_cannot_travel_is_named() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["momentum"] = torch.zeros(3)
    with pytest.raises(UsageError, match="'momentum'"):
        options_of(optimizer)


def test_a_definition_holds_what_is_trained_only() -> None:
    model = Tied()
    groups = [{"params": [model.a.bias, model.frozen]}, {"params": [model.b.bias, model.a.weight], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    state = numbered(model)
    trained = ("model.a.weight", "model.a.bias")  # the other has no gradient in the graph
    made = optimizer_definition(optimizer, state, trained, ())
    assert made.name == ("SGD", "SGD")
    assert [members for members, _ in made.groups] == [(1,), (0,)]
    assert [options["lr"] for _, options in made.groups] == [0.1, 0.5]
    assert made.parameters == (state.numbers["model.a.weight"], state.numbers["model.a.bias"])


def test_what_an_optimizer_remembers_becomes_entries_and_tensors() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    remembered = local_optimizer_state(optimizer, numbered(model))
    assert [(name, key) for name, key, _ in remembered] == [
        (f"model.{name}", key) for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    entries, tensors = state_entries([*remembered, ("model.bias", "count", 3)], ("model.bias",))
    assert entries == (
        StateEntry(0, "exp_avg", TensorSpec("float32", (1,))),
        StateEntry(0, "exp_avg_sq", TensorSpec("float32", (1,))),
        StateEntry(0, "step", TensorSpec("float32", ())),
        StateEntry(0, "count", 3),
    )
    assert len(tensors) == 3


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_the_state_of_every_optimizer_takes_is_known(kind: str) -> None:
    """Per parameter, as PyTorch's own makes it for a matrix of the size that is tried."""
    model = nn.Linear(64, 64, bias=False)
    matrix = model.weight
    optimizer = getattr(torch.optim, kind)([matrix])
    found = footprints(optimizer, numbered(model))["model.weight"]
    matrix.grad = torch.ones_like(matrix)
    optimizer.step()
    made = sum(value.nbytes for value in optimizer.state[matrix].values() if isinstance(value, torch.Tensor))
    assert found.size_bytes(matrix.nbytes) == made


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_the_state_takes_on_workers_is_known_where_the_default_type_is_float64(kind: str, stepped: bool) -> None:
    """Counters of fused kernels are float32, others have the default type; of an optimizer that has stepped, too."""
    model = nn.Linear(64, 64, bias=False)
    optimizer, state = getattr(torch.optim, kind)(model.parameters()), numbered(model)
    if stepped:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    names = ("model.weight",)
    entries, tensors = state_entries(local_optimizer_state(optimizer, state), names)
    native = NativeOptimizer(optimizer_definition(optimizer, state, names, entries), [model.weight.detach()], tensors)
    native.step([torch.ones_like(model.weight)], 0.0)
    assert footprints(optimizer, state)["model.weight"].size_bytes(model.weight.nbytes) == native.charged_bytes


def test_what_adafactor_remembers_depends_on_the_shape() -> None:
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.Linear(24, 12), nn.LayerNorm(12))
    optimizer = torch.optim.Adafactor(model.parameters())
    found = footprints(optimizer, numbered(model))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        tensors = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
        assert found[f"model.{name}"].size_bytes(parameter.nbytes) == sum(value.nbytes for value in tensors)


def test_an_update_costs_what_is_gone_through_and_multiplied() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    first, second = model.parameters()
    plain = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW([second])]
    costs = update_bytes(plain, numbered(model))
    assert costs == {"model.0.weight": 2 * first.nbytes, "model.1.weight": 4 * second.nbytes}
    muon = [torch.optim.Muon([first], ns_steps=3), torch.optim.AdamW([second])]
    dearer = update_bytes(muon, numbered(model))
    assert dearer["model.1.weight"] == 4 * second.nbytes
    flops = 3 * 6 * 256**3
    assert dearer["model.0.weight"] == pytest.approx(3 * first.nbytes + flops / 5 / PASSES)
