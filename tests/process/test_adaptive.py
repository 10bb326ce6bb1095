"""A run follows its devices: one becomes slow, layers move away from it while it trains, and no bit changes."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import onebox
from onebox.engine.problem.estimate import estimate_links, estimate_profile
from onebox.engine.problem.planner_problem import make_problem
from onebox.engine.workload import captures
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.errors import UsageError
from onebox.plan import Plan, Prediction, Stage
from onebox.plan.model.problem import Problem
from onebox.pool import Pool, open_pool
from tests.kit.pools import Pools
from tests.kit.trainer_arguments import grouped

LAYERS, WIDTH, BATCH, MICRO_BATCH = 6, 512, 64, 16
COST_S = 0.00015
"""Of a segment's forward, or half of its backward, for a sample."""

MOST = 120
"""Steps after which a decision should have come."""

SEGMENTS = tuple(f"model.{place}" for place in range(LAYERS))


@pytest.fixture(scope="module")
def sims() -> Iterator[Pool]:
    """Two devices that sleep."""
    with open_pool("sim*2", threads=1) as opened:
        yield opened


def model() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)))


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same batches each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x, y = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator)
        yield x, y


def adamw(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=1e-3)


def cut(bound: int) -> Plan:
    """Return a plan of two stages, of which the first one has so many segments."""
    parts = (SEGMENTS[:bound], SEGMENTS[bound:])
    stages = tuple(Stage(segments=own, replicas=((d,),), shares=(1.0,)) for d, own in enumerate(parts))
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule="1f1b")


def problem_of(pool: Pool, speeds: tuple[float, ...]) -> Problem:
    """Return what a planner would be given, if it took devices for faster or slower than they are."""
    built = model()
    trained = frozenset(f"model.{name}" for name, _ in built.named_parameters())
    recipe = CaptureSpec(
        model=built,
        loss=nn.functional.mse_loss,
        metrics={},
        precision="fp32",
        device_type="cpu",
        trained=trained,
    )
    profile, _ = estimate_profile(
        Captures(recipe), as_batch(*next(batches(1))), [MICRO_BATCH], adamw(built), pool.devices
    )
    found = make_problem(profile, pool.devices, estimate_links(pool.devices), batch=BATCH, micro_batches=(MICRO_BATCH,))
    devices = tuple(replace(spec, speed=speed) for spec, speed in zip(found.devices, speeds, strict=True))
    return replace(found, devices=devices)


@pytest.mark.feature("Adaptive plans: Move layers from a slow device with the same bits")
def test_layers_move_away_from_a_device_that_becomes_slow(sims: Pool, caplog: pytest.LogCaptureFixture) -> None:
    built, plan = model(), cut(3)
    costs = dict.fromkeys(SEGMENTS, (COST_S, COST_S, COST_S))
    with (
        caplog.at_level(logging.WARNING, logger="onebox"),
        onebox.Trainer(
            built,
            nn.functional.mse_loss,
            adamw(built),
            pool=sims,
            plan=plan,
            adaptive=True,
            engine=onebox.Engine(costs=costs),
        ) as trainer,
    ):
        for step, batch in enumerate(batches(MOST)):
            if step == 14:
                assert not [made for made in trainer.decisions if made.decision.kind == "recut"], "all is as planned"
                sims.retime(1, speed=1 / 3)
            trainer.step(*batch)
            if step > 14 and trainer.plan is not None and len(trainer.plan.stages[1].segments) < 3:
                break
        trainer.wait()
        made = trainer.decisions[-1]
    sims.retime(1, speed=1.0)
    assert made.decision.kind == "recut"
    assert "device 1 takes" in made.line
    assert made.moved_bytes > 0
    said = [record.getMessage() for record in caplog.records if record.name == "onebox"]
    begun = [line.removeprefix("adaptive: ") for line in said if line.startswith("adaptive: ")]
    assert any(made.line.startswith(line) for line in begun), "what became of it is added later"


@pytest.mark.feature("Adaptive plans: Move layers from a slow device with the same bits")
def test_the_curve_of_a_run_whose_layers_move_is_the_same_to_the_last_bit(pools: Pools) -> None:
    pool, plan = pools(2), cut(1)

    def losses(problem: Problem | bool, steps: int) -> tuple[list[float], Plan | None]:
        """Train so many steps at most, or until three behind a change of the plan."""
        built, found = model(), []
        with onebox.Trainer(
            built, nn.functional.mse_loss, adamw(built), pool=pool, plan=plan, adaptive=problem
        ) as trainer:
            for batch in batches(steps):
                found.append(trainer.step(*batch).item())
                made = [each for each in trainer.decisions if each.moved_bytes]
                if made and trainer.steps_done >= made[0].step + 3:
                    break
            return found, trainer.plan

    followed, after = losses(problem_of(pool, (1.0, 5.0)), MOST)
    assert after != plan
    assert losses(False, len(followed)) == (followed, plan)


def test_a_model_in_use_is_captured_for_other_plans_by_the_thread_of_its_steps(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture puts tensors without values into the model; a plan that was predicted may get other micro-batches."""
    threads, plain = [], captures.capture

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        time.sleep(0.2)  # many steps long: another thread would be in the middle of it
        return plain(*arguments, **options)

    monkeypatch.setattr(captures, "capture", noted)
    told = Prediction(batch=BATCH, step_s=0.01, bubble=0.0, peak_bytes=(0, 0), stages_s=((1e-3,) * 3,) * 2)
    plan, built = msgspec.structs.replace(cut(3), predicted=told), model()
    options = grouped(pool=pools(2), plan=plan, adaptive=True, loss_reduction="mean")  # no capture checks the loss
    with onebox.Trainer(built, nn.functional.mse_loss, adamw(built), **options) as trainer:
        end_s = time.monotonic() + 60.0
        for batch in itertools.cycle(batches(2)):
            trainer.step(*batch).item()
            if len(threads) > 1 or time.monotonic() > end_s:
                break
    assert len(threads) > 1
    assert set(threads) == {threading.get_ident()}


def test_what_cannot_be_followed_is_refused(pools: Pools) -> None:
    pool, built = pools(2), model()
    given = built, nn.functional.mse_loss, adamw(built)
    split = Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=MICRO_BATCH)
    for wrong, told in (({"trace": False}, "trace"), ({"plan": split}, "splits layers")):
        with pytest.raises(UsageError, match=told):
            onebox.Trainer(*given, **grouped(pool=pool, adaptive=True, **wrong))
    with pytest.raises(UsageError, match="adaptive='yes'"):
        onebox.Trainer(*given, pool=pool, adaptive="yes")  # type: ignore[arg-type]
