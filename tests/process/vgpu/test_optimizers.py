"""Optimizers, schedulers and averages on a virtual device take the steps that they take on the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler, swa_utils

from tests.process.vgpu.beside import Case, beside, fill, listed, normal, waits

WORKING: list[Case] = []
works = listed(WORKING)

Make = Callable[[nn.Module], optim.Optimizer]


pytestmark = pytest.mark.usefixtures("pool")


def net(device: str) -> nn.Module:
    made: nn.Module = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).to(device)
    return made


def loss_of(model: nn.Module, device: str) -> Tensor:
    made: Tensor = (model(normal(5, 3, device=device)) - 1).pow(2).mean()
    return made


def steps(device: str, make: Make, count: int = 4, closure: bool = False) -> Any:
    """Return the losses of some steps, and the parameters and the optimizer's state after them."""
    model = net(device)
    optimizer = make(model)

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, device)
        loss.backward()
        return loss

    losses = []
    for _ in range(count):
        if closure:
            losses.append(float(optimizer.step(backward).detach()))  # type: ignore[arg-type,attr-defined]
        else:
            losses.append(backward().item())
            optimizer.step()
    return losses, model.state_dict(), {} if closure else optimizer.state_dict()["state"]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Rprop": {}, "Adamax": {}, "Adadelta": {}, "RAdam": {}, "NAdam": {}, "Adagrad": {}, "Adafactor": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
}  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "as it likes": {},
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "maximize": {"maximize": True, "foreach": True},
    "fused": {"fused": True},
}
FUSED = ("SGD", "Adagrad", "Adam", "AdamW")
CASES = [
    (name, way)
    for name in OPTIMIZERS
    for way in WAYS
    if (name in FUSED or way != "fused") and (name != "Adafactor" or way == "one by one")
    if (name, way) != ("ASGD", "as it likes")  # which is foreach on any device but the CPU, and PyTorch's two differ
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_steps_are_those_of_the_cpu(name: str, way: str) -> None:
    kind, options = getattr(optim, name), OPTIMIZERS[name] | WAYS[way]
    beside(lambda device: steps(device, lambda model: kind(model.parameters(), **options)))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_steps_that_evaluate_the_loss_again(search: str | None) -> None:
    beside(lambda device: steps(device, lambda net: optim.LBFGS(net.parameters(), line_search_fn=search), closure=True))


@works
def muon(device: str) -> Any:
    return steps(device, lambda net: optim.Muon([each for each in net.parameters() if each.ndim == 2]))


@works
def groups(device: str) -> Any:
    def make(net: Any) -> optim.Optimizer:
        made = optim.SGD([{"params": net[0].parameters(), "lr": 0.5}], lr=0.01, momentum=0.5)
        made.add_param_group({"params": net[2].parameters(), "lr": 0.2})
        return made

    return steps(device, make)


@works
def rates_that_are_tensors(device: str) -> Any:
    return steps(device, lambda net: optim.Adam(net.parameters(), lr=torch.tensor(0.01, dtype=torch.float64)))


SCHEDULERS: list[Callable[[optim.Optimizer], lr_scheduler.LRScheduler]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
    lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)],
        [3],
    ),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
]


@works
def schedulers(device: str) -> Any:
    made: list[Any] = []
    for make in SCHEDULERS:
        model = net(device)
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = make(optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(model, device).backward()
            optimizer.step()
            scheduler.step()
        made += [model.state_dict(), scheduler.get_last_lr()]
    return made


@works
def a_scheduler_that_sees_the_loss(device: str) -> Any:
    model = net(device)
    optimizer = optim.SGD(model.parameters(), 0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for _ in range(6):
        scheduler.step(loss_of(model, device).detach() * 0 + 1)
    return optimizer.param_groups[0]["lr"]


@works
def moving_averages(device: str) -> Any:
    model: Any = nn.Sequential(net(device), nn.BatchNorm1d(2).double().to(device))
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    by_hand = copy.deepcopy(model).requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model, device).backward()
        optimizer.step()
        average.update_parameters(model)
        for mine, its in zip(by_hand.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(its.data, alpha=0.1)
    made = copy.deepcopy(average)
    swa_utils.update_bn([normal(5, 3, device="cpu"), normal(6, 3, device="cpu")], average, device=torch.device(device))
    return made.state_dict(), by_hand.state_dict(), average.state_dict()


@works
def a_model_copied_after_backward(device: str) -> Any:
    model = net(device)
    optimizer = optim.Adam(model.parameters())
    loss_of(model, device).backward()
    optimizer.step()
    twin, its = copy.deepcopy((model, optimizer))
    loss_of(twin, device).backward()
    its.step()
    return model.state_dict(), twin.state_dict(), [each.grad for each in twin.parameters()]


@works
def from_the_cpu_and_back(device: str) -> Any:
    file = io.BytesIO()
    for place in ("cpu", device, "cpu"):
        model = net(place)
        optimizer = optim.Adam(model.parameters(), 0.01)
        if file.tell():
            file.seek(0)
            loaded = torch.load(file, weights_only=True, map_location="cpu")
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, place).backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return model.state_dict()


@works
def gradients_scaled(device: str) -> Any:
    model, kind = net(device).float(), torch.device(device).type
    optimizer = optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(kind, init_scale=4.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = (model(normal(5, 3, device=device).float()) - 1).pow(2).mean() * (float("inf") if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`")
@pytest.mark.parametrize("case", WORKING, ids=lambda case: case.__name__)
def test_values_are_those_of_the_cpu(case: Case) -> None:
    beside(case)


def test_steps_wait_for_nothing() -> None:
    model = net("vgpu:0")
    optimizers = [getattr(optim, name)(model.parameters()) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")]
    for count in range(4):
        before = waits()
        loss_of(model, "vgpu:0").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if count > 1:  # steps with operators that are new wait for them, and the first asks workers how results lie
            assert waits() == before
