"""Plans for devices with too little memory: policies are chosen, the model trains within the budget, and is the
same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onebox
from onebox.engine.planning.make_plan import PlanningResult
from onebox.errors import PlanError
from onebox.plan import Plan
from onebox.pool import raise_first
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory
from tests.kit.pools import Pools
from tests.kit.reference import assert_same, train
from tests.kit.stages import tensors_of

SAMPLES, STEPS = 16, 3


def deep() -> nn.Module:
    """Return maps of one size, layer after layer, so that many of them are there at once."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh()]
    for _ in range(9):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SAMPLES, 3, 16, 16, generator=generator, dtype=torch.float64),
            torch.randint(4, (SAMPLES,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def planned(pool: onebox.Pool, **options: Any) -> PlanningResult:
    """Plan with the whole batch as one micro-batch, because of the batch norms."""
    model = deep()
    loss, (inputs, targets) = nn.functional.cross_entropy, batches()[0]
    return onebox.make_plan(
        model, loss, momentum(model), inputs, targets, pool=pool, micro_batches=[SAMPLES], **options
    )


def peak_bytes(plan: Plan) -> int:
    assert plan.predicted is not None
    (peak,) = plan.predicted.peak_bytes
    return peak


@pytest.fixture(scope="module")
def plain(pools: Pools) -> int:
    """The peak of the plain plan."""
    found = planned(pools(1)).plan
    assert {stage.policy for stage in found.stages} == {"keep"}
    return peak_bytes(found)


@pytest.mark.feature("Memory: Choose policies for too little memory")
@pytest.mark.parametrize("part", [0.6, 0.4])
def test_what_does_not_fit_gets_fates_that_fit(part: float, plain: int) -> None:
    budget = int(plain * part)
    with onebox.open("cpu", threads=1, memory=budget) as pool:
        found = planned(pool)
        plan = found.plan
        policies = {stage.policy for stage in plan.stages}
        assert policies & {"recompute", "offload"}
        assert 0.6 * budget <= peak_bytes(plan) <= budget
        labels = {one.label: one for one in found.result.candidates}
        assert labels["device 0 alone"].shortfalls
        policies = [one for label, one in labels.items() if label.startswith("device 0 alone, ")]
        assert len(policies) >= 3
        assert all(one.step_s >= found.result.candidates[0].step_s for one in policies if not one.shortfalls)
        model = deep()
        optimizer = momentum(model)
        raise_first([pool.post(0, [Ask("peak")], answer=True)])  # from here on: the device has been measured, too
        with onebox.Trainer(
            model, nn.functional.cross_entropy, optimizer, pool=pool, plan=plan, engine=onebox.Engine(check_every=1)
        ) as job:
            losses = [float(job.step(*batch)) for batch in batches()]
            tensors = tensors_of(job)
        (answer,) = raise_first([pool.post(0, [Ask("peak")], answer=True)])
        (memory,) = answer.results
        assert isinstance(memory, WorkerMemory)
        assert memory.peak_bytes == pytest.approx(peak_bytes(plan), rel=0.05)
    alone = deep()
    expected = train(alone, nn.functional.cross_entropy, momentum(alone), batches(), lambda size: [size])
    assert_same(type(expected)(losses=losses, norms=[], tensors=tensors), expected)


def test_one_policy_alone_and_none_at_all(plain: int) -> None:
    with onebox.open("cpu", threads=1, memory=int(plain * 0.6)) as pool:
        for policy in ("recompute", "offload"):
            plan = planned(pool, policies=("keep", policy)).plan
            assert {stage.policy for stage in plan.stages} <= {"keep", policy}
        with pytest.raises(PlanError, match="no plan fits"):
            planned(pool, policies=("keep",))


ROOM = 4_000_000
"""Bytes of a device that hold half of the large layer with its gradient and momentum, and not all of it."""


def large() -> nn.Module:
    """Return a layer of 2 MiB, which alone is a segment, and a small one behind it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 4)).double()


def rows(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 256, generator=generator, dtype=torch.float64), torch.randint(4, (8,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.feature("Split layers: Split layers over devices")
def test_a_layer_that_fits_no_device_is_split_over_two() -> None:
    loss = nn.functional.cross_entropy
    with onebox.open("cpu*2", threads=1, memory=ROOM) as pool:
        model = large()
        with onebox.Trainer(model, loss, momentum(model), pool=pool, plan="auto") as trainer:
            losses = [float(trainer.step(*batch)) for batch in rows(STEPS)]
            tensors = tensors_of(trainer)
            plan = trainer.plan
            assert plan is not None and plan.split
            assert max(memory.peak_bytes for memory in trainer.memory()) <= ROOM
        assert plan.predicted is not None and max(plan.predicted.peak_bytes) <= ROOM
        for options in ({"split_layers": False}, {"islands": [[0], [1]]}):
            with pytest.raises(PlanError, match="no plan fits"):
                onebox.make_plan(model, loss, momentum(model), *rows(1)[0], pool=pool, **options)  # type: ignore[arg-type]
        with (
            onebox.Trainer(model, loss, momentum(model), pool=pool, plan="auto", adaptive=True) as trainer,
            pytest.raises(PlanError, match="no plan fits"),  # adaptive plans have whole layers
        ):
            trainer.step(*rows(1)[0])
        with pytest.raises(PlanError, match="no plan fits"):  # Adafactor looks at a parameter as a whole
            onebox.make_plan(model, loss, torch.optim.Adafactor(model.parameters()), *rows(1)[0], pool=pool)
    alone = large()
    sizes = [part.size for part in plan.micro_batches(8)]
    expected = train(alone, loss, momentum(alone), rows(STEPS), lambda size: sizes)
    assert_same(type(expected)(losses=losses, norms=[], tensors=tensors), expected)
