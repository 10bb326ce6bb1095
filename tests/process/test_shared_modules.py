"""Trainers that share modules, as those of a GAN do: each sees what the other has trained, as in plain PyTorch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from tests.kit.pools import Pools
from tests.kit.reference import AGREE
from tests.kit.trainer_arguments import grouped

STEPS = 5
SAMPLES = 8


def models() -> tuple[nn.Module, nn.Module]:
    """Return a generator with batch norm, and a discriminator."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    return generator.double(), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SAMPLES, 8, generator=made, dtype=torch.float64),
            torch.randn(SAMPLES, 4, generator=made, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]


class Judging(nn.Module):
    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.discriminator(x), self.discriminator(self.generator(z).detach())


class Fooling(nn.Module):
    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, z: Tensor) -> Tensor:
        found: Tensor = self.discriminator(self.generator(z))
        return found


def judged(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return bce(outputs[0], torch.ones_like(outputs[0])) + bce(outputs[1], torch.zeros_like(outputs[1]))


def fooled(outputs: Tensor, targets: Tensor) -> Tensor:
    return bce(outputs, torch.ones_like(outputs))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def clip(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def plain(parts: int, *, clipping: bool = False) -> dict[str, Tensor]:
    """Train both in this process, in micro-batches, one after the other."""
    generator, discriminator = models()
    judging, fooling = Judging(generator, discriminator), Fooling(generator, discriminator)
    of_generator, of_discriminator = adam(generator), adam(discriminator)
    for x, z in batches():
        of_discriminator.zero_grad()
        for a, b in zip(x.chunk(parts), z.chunk(parts), strict=True):
            (judged(judging(a, b), a) / parts).backward()
        of_discriminator.step()
        if clipping:
            clip(discriminator)
        of_generator.zero_grad()
        for b in z.chunk(parts):
            (fooled(fooling(b), b) / parts).backward()
        of_generator.step()
    return state(generator, discriminator)


def state(generator: nn.Module, discriminator: nn.Module) -> dict[str, Tensor]:
    both = nn.ModuleList([generator, discriminator])
    return {name: tensor.detach().clone() for name, tensor in both.state_dict().items()}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=AGREE, msg=lambda text, n=name: f"{n}: {text}")


OPTIONS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "shares of the state": {"shard_optimizer": True},
    "steps on the host": {"update": "host"},
    "steps that overlap": {"overlap": True},
    "recovery": {"recover": True, "snapshot_every": 2},
}


def two_stages(model: nn.Module, loss: Any, batch: tuple[Any, Any]) -> Plan:
    names = TracedModel(capture(model, loss, batch), backward=True).segments
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    stages = tuple(Stage(segments=own, replicas=((place,),), shares=(1.0,)) for place, own in enumerate(halves))
    return Plan(stages=stages, micro_batch=SAMPLES // 2, schedule="1f1b")


def test_stages_share_too(pools: Pools) -> None:
    generator, discriminator = models()
    judging, fooling = Judging(generator, discriminator), Fooling(generator, discriminator)
    x, z = (part[: SAMPLES // 2] for part in batches()[0])
    plans = two_stages(judging, judged, ((x, z), x)), two_stages(fooling, fooled, (z, z))
    with (
        onebox.Trainer(judging, judged, adam(discriminator), pool=pools(2), plan=plans[0]) as judge,
        onebox.Trainer(fooling, fooled, adam(generator), pool=pools(2), plan=plans[1]) as fool,
    ):
        for real, noise in batches():
            judge.step((real, noise), real)
            fool.step(noise, noise)
        judge.pull()
    assert_alike(state(generator, discriminator), plain(2))


@pytest.mark.feature("Trainer: Share modules between trainers")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("clipping", [False, True])
def test_the_result_is_that_of_one_process(
    options: str, clipping: bool, pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    generator, discriminator = models()
    arguments: dict[str, Any] = {"pool": pools(2), "micro_batch": SAMPLES // 2, **OPTIONS[options]}
    with (
        caplog.at_level(logging.WARNING, logger="onebox"),
        onebox.Trainer(Judging(generator, discriminator), judged, adam(discriminator), **grouped(**arguments)) as judge,
        onebox.Trainer(Fooling(generator, discriminator), fooled, adam(generator), **grouped(**arguments)) as fool,
    ):
        for x, z in batches():
            judge.step((x, z), x)
            if clipping:
                judge.pull()
                clip(discriminator)
            fool.step(z, z)
        judge.pull()
        fool.pull()
        for name, tensor in judge.tensors().items():
            assert torch.equal(tensor, fool.tensors()[name]), name
    assert_alike(state(generator, discriminator), plain(2, clipping=clipping))
    assert caplog.text.count("two open trainers share") == 2, "each says so once"


def test_one_that_is_closed_leaves_what_was_pulled(pools: Pools) -> None:
    generator, discriminator = models()
    arguments: dict[str, Any] = {"pool": pools(2), "micro_batch": SAMPLES // 2}
    x, z = batches()[0]
    with onebox.Trainer(Fooling(generator, discriminator), fooled, adam(generator), **grouped(**arguments)) as fool:
        with onebox.Trainer(
            Judging(generator, discriminator), judged, adam(discriminator), **grouped(**arguments)
        ) as judge:
            judge.step((x, z), x)
            judge.pull()
        expected = {name: tensor.clone() for name, tensor in discriminator.state_dict().items()}
        fool.step(z, z)
        fool.pull()
    found = discriminator.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_both_may_train_the_same_parameters(pools: Pools) -> None:
    """Two losses of one model, in turn."""
    inputs = batches()

    def model() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)).double()

    def first(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def second(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean()

    expected = model()
    one, other = adam(expected), torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, _ in inputs:
        for loss, optimizer in ((first, one), (second, other)):
            optimizer.zero_grad()
            loss(expected(x), x).backward()
            optimizer.step()
    found = model()
    arguments: dict[str, Any] = {"pool": pools(2), "micro_batch": SAMPLES // 2}
    with (
        onebox.Trainer(found, first, adam(found), **grouped(**arguments)) as a,
        onebox.Trainer(found, second, torch.optim.SGD(found.parameters(), lr=0.1), **grouped(**arguments)) as b,
    ):
        for x, _ in inputs:
            a.step(x, x)
            b.step(x, x)
        a.pull()
    assert_alike(dict(found.state_dict()), dict(expected.state_dict()))
