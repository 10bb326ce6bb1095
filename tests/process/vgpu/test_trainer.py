"""``Trainer`` takes a model that lives on virtual devices, and gives the bits that the same model on the host gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import onebox
from onebox.vgpu.core.tensor import is_virtual
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.trainer_arguments import grouped

SEED = 4


pytestmark = pytest.mark.usefixtures("pool")


def moved(values: Any, device: str) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def trained(
    name: str, optimizer: str, device: str, pool: onebox.Pool, **options: Any
) -> tuple[list[float], float, dict[str, Tensor]]:
    """Train a model that lives on a device; return losses, the loss in eval mode, and the model afterwards."""
    case = CASES[name]
    model = case.model().to(device)
    before = list(model.parameters())
    made = OPTIMIZERS[optimizer](model)
    batches = [moved(batch, device) for batch in case.batches([6, 6, 4])]
    with onebox.Trainer(model, case.loss, made, **grouped(pool=pool, seed=SEED, **options)) as trainer:
        losses = [trainer.step(*batch) for batch in batches]
        loss = trainer.evaluate(batches[:1]).loss
        trainer.pull()
        values = [loss.item() for loss in losses]
    assert all(parameter is was for parameter, was in zip(model.parameters(), before, strict=True))
    assert all(is_virtual(p) == (device != "cpu") for p in model.parameters())
    return values, loss, state(model)


@pytest.mark.feature("Virtual devices: Hand a model on virtual devices to a trainer")
@pytest.mark.parametrize(
    ("name", "optimizer", "device"),
    [
        ("cnn", "sgd", "vgpu:0"),
        ("recurrent", "adamw", "vgpu:1"),
        ("branches", "adam-in-groups", "vgpu:1"),
        ("tied", "sgd", "vgpu:0"),
        ("dropping", "adamw", "vgpu:0"),
    ],
)
def test_a_model_on_a_virtual_device_trains_as_on_the_host(
    name: str, optimizer: str, device: str, pool: onebox.Pool
) -> None:
    options = {"micro_batch": 2}
    same(trained(name, optimizer, device, pool, **options), trained(name, optimizer, "cpu", pool, **options))


def test_on_the_devices_of_another_pool(pool: onebox.Pool) -> None:
    expected = trained("mlp", "sgd", "cpu", pool)
    case = CASES["mlp"]
    model = case.model().to("vgpu:1")
    with onebox.open("cpu*1", threads=1) as other:
        assert torch.vgpu.device_count() == 1  # type: ignore[attr-defined]
        with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, seed=SEED) as trainer:
            losses = [trainer.step(*moved(batch, "vgpu:0")).item() for batch in case.batches([6, 6, 4])]
            trainer.pull()
        assert len(other) == 1
    same((losses, state(model)), (expected[0], expected[2]))


class Stages(nn.Module):
    """Model parallelism as written by hand, with a constant that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.second = nn.Linear(8, 5)
        self.scale = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
        self.places = ("cpu", "cpu")

    def spread(self) -> Stages:
        self.places = ("vgpu:0", "vgpu:1")
        self.first.to(self.places[0])
        self.second.to(self.places[1])
        self.scale = self.scale.to(self.places[1])
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.to(self.places[0])))
        x = self.second(x.to(torch.device(self.places[1]))) * self.scale
        return x + torch.ones(5, dtype=x.dtype, device=self.places[1])


def test_a_model_over_two_devices(pool: onebox.Pool) -> None:
    torch.manual_seed(1)
    host = Stages().double()
    here = copy.deepcopy(host).spread()
    batches = CASES["mlp"].batches([6, 6])
    expected = nn.functional.cross_entropy(host(batches[0][0]), batches[0][1]).item()
    ends = []
    for model in (host, here):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, seed=SEED) as trainer:
            losses = [trainer.step(*batch).item() for batch in batches]
            trainer.pull()
        ends.append((losses, state(model)))
    same(ends[1], ends[0])
    assert ends[0][0][0] == pytest.approx(expected, abs=1e-12)
    assert here.first.weight.device == torch.device("vgpu:0")
    assert here.second.weight.device == here.scale.device == torch.device("vgpu:1")
    x = batches[0][0]
    torch.testing.assert_close(here(x).cpu(), host(x), rtol=0, atol=1e-12)


def test_between_steps_of_the_script_itself(pool: onebox.Pool) -> None:
    """Eager steps, steps of a trainer, eager steps: the trainer takes over what the optimizer remembers."""
    case = CASES["mlp"]
    ends = []
    for device in ("cpu", "vgpu:1"):
        model = case.model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = case.batches([6, 6, 6])
        for index, batch in enumerate(batches):
            inputs, targets = moved(batch, device)
            if index == 1:
                with onebox.Trainer(model, case.loss, optimizer, pool=pool, seed=SEED) as trainer:
                    trainer.step(inputs, targets)
                    trainer.pull()
                continue
            optimizer.zero_grad()
            case.loss(model(inputs), targets).backward()
            optimizer.step()
        ends.append(state(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-12)


def test_random_numbers_of_the_script_are_left_alone(pool: onebox.Pool) -> None:
    torch.manual_seed(8)
    expected = [torch.rand(3, device="vgpu:0").cpu(), torch.rand(3, device="vgpu:0").cpu()]
    torch.manual_seed(8)
    first = torch.rand(3, device="vgpu:0").cpu()
    trained("dropping", "sgd", "vgpu:0", pool)
    same([first, torch.rand(3, device="vgpu:0").cpu()], expected)


def test_checkpoints(pool: onebox.Pool, tmp_path: Path) -> None:
    case = CASES["mlp"]
    batches = case.batches([6, 6])
    ends = []
    for device in ("cpu", "vgpu:1"):
        model = case.model().to(device)
        with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, seed=SEED) as trainer:
            trainer.step(*batches[0])
            trainer.save(tmp_path / device.replace(":", ""))
        again = case.model().to(device)
        optimizer = OPTIMIZERS["adamw"](again)
        path = tmp_path / device.replace(":", "")
        with onebox.Trainer.resume(path, again, case.loss, optimizer, pool=pool) as trainer:
            loss = trainer.step(*batches[1]).item()
            trainer.pull()
        ends.append((loss, state(again)))
    same(ends[1], ends[0])
