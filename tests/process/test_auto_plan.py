"""A trainer that plans by itself: ``plan="auto"``, against one process in float64."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.engine import session as session_module
from onebox.engine import trainer as trainer_module
from onebox.engine.planning import resolve_plan
from onebox.engine.session import TrainingSession
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.errors import PlanError, UsageError
from onebox.graph import TracedModel
from onebox.plan import ASYNC, predict
from tests.kit.models import CASES
from tests.kit.pools import Pools
from tests.kit.reference import assert_same, train
from tests.kit.stages import outcome

STEPS = 3


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.feature('Plans: Plan and train by plan="auto"')
@pytest.mark.parametrize("engine", [onebox.Engine(), onebox.Engine(overlap=True)], ids=["plain", "overlap"])
def test_the_result_is_that_of_one_process(
    engine: onebox.Engine, pools: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, sizes = CASES["mlp"], [8, 8, 6, 8]
    model, expected = case.model(), case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), plan="auto", engine=engine) as trainer:
        assert trainer.plan is None
        with caplog.at_level(logging.INFO, "onebox"):
            losses = [trainer.step(*batch) for batch in case.batches(sizes)]
        plan = trainer.plan
        assert plan is not None
        assert plan.predicted is not None
        found = outcome(trainer, losses)
        trainer.save(tmp_path)
    said = [record.getMessage() for record in caplog.records if "plan='auto'" in record.getMessage()]
    assert said == [f"plan='auto': {plan.describe()}"]
    reference = train(
        expected, case.loss, sgd(expected), case.batches(sizes), lambda n: [part.size for part in plan.micro_batches(n)]
    )
    assert_same(found, reference, 1e-12)
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, sgd(model), pool=pools(2), plan="auto") as trainer:
        trainer.step(*case.batches([8])[0]).item()
        assert trainer.plan is not None
        if plan.micro_batch is not None:
            assert trainer.plan.micro_batch == plan.micro_batch


def test_an_adaptive_run_follows_the_problem_of_its_plan(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments measured one by one are better than times of stages that are divided among them."""
    made, followed, found = resolve_plan.make_plan, session_module.problem_maker, []

    def plan(*args: Any, **options: Any) -> Any:
        found.append(made(*args, **options))
        return found[-1]

    asked: list[Any] = []

    def follow(*args: Any) -> Any:
        asked.append(args[-1])
        return followed(*args)

    monkeypatch.setattr(resolve_plan, "make_plan", plan)
    monkeypatch.setattr(session_module, "problem_maker", follow)
    case = CASES["mlp"]
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), plan="auto", adaptive=True) as trainer:
        trainer.step(*case.batches([8])[0]).item()
    assert asked[0]() is found[0].problem


@pytest.mark.parametrize("name", ["mlp", "dropping"])
def test_the_run_begins_with_the_captures_of_planning(name: str, pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, bool, bool]] = []
    original = Captures._capture

    def capture(own: Captures, batch: Batch, size: int, *, train: bool, probe: bool = False) -> TracedModel:
        made.append((size, train, probe))
        return original(own, batch, size, train=train, probe=probe)

    monkeypatch.setattr(Captures, "_capture", capture)
    case = CASES[name]
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), plan="auto") as trainer:
        trainer.step(*case.batches([8])[0]).item()
        assert trainer.plan is not None
        sizes = {part.size for part in trainer.plan.micro_batches(8)}
    assert len(made) == len(set(made))
    assert {(size, True, False) for size in sizes} <= set(made)


def test_stale_gradients_get_a_plan_that_they_can_use(pools: Pools) -> None:
    case = CASES["mlp"]
    model = case.model()
    stale = onebox.StaleGradients(correction="none", warm_up=0)
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), plan="auto", stale=stale) as trainer:
        for batch in case.batches([8] * 4):
            trainer.step(*batch)
        trainer.wait()
        assert trainer.plan is not None
        assert trainer.plan.schedule == ASYNC or len(trainer.plan.stages) == 1
        assert trainer.delays


def test_the_model_is_measured_behind_code_that_runs_on_the_device(pools: Pools) -> None:
    model = nn.Linear(4, 3)

    def scaled(inputs: Tensor) -> Any:
        return inputs.float() / 255

    before = torch.random.get_rng_state()
    options: dict[str, Any] = {"pool": pools(2), "plan": "auto", "on_device": scaled}
    with onebox.Trainer(model, nn.functional.mse_loss, sgd(model), **options) as trainer:
        loss = trainer.step(torch.full((8, 4), 51, dtype=torch.uint8), torch.zeros(8, 3)).item()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loss == pytest.approx(nn.functional.mse_loss(model(torch.full((8, 4), 0.2)), torch.zeros(8, 3)).item())


def test_a_plan_that_is_not_there_is_answered_with_what_is_allowed(pools: Pools) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"plan='atuo': there is no such file; did you mean plan='auto'\? allowed"):
        onebox.Trainer(
            model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), pool=pools(2), plan="atuo"
        )


def test_by_default_it_plans_over_several_hosts_also_after_an_evaluation(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (trainer_module, resolve_plan):
        monkeypatch.setattr(module, "default_plan", lambda pool: "auto")
    case = CASES["mlp"]
    model, expected = case.model(), case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2)) as trainer:
        before = trainer.evaluate(case.batches([7, 3]))
        assert trainer.plan is not None and trainer.plan.devices == (0, 1)
        assert "plan auto" not in caplog.text
        uploaded = trainer.upload(*case.batches([8, 8])[0])
        losses = [trainer.step(uploaded), trainer.step(*case.batches([8, 8])[1])]
        plan = trainer.plan
        assert plan.predicted is not None and plan.predicted.batch == 8
        found = outcome(trainer, losses)
        after = trainer.evaluate(case.batches([7, 3]))
        trainer.save(tmp_path)
    assert re.search(r"1 hosts: plan auto, .*[;,] (which is data parallel|data parallel would take)", caplog.text)
    assert after.loss < before.loss
    reference = train(
        expected, case.loss, sgd(expected), case.batches([8, 8]), lambda n: [p.size for p in plan.micro_batches(n)]
    )
    assert_same(found, reference, 1e-12)
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, sgd(model), pool=pools(2)) as trainer:
        trainer.step(*case.batches([8])[0]).item()
        assert trainer.plan is not None
        assert trainer.plan.devices == plan.devices, "the stored plan, though it may leave devices idle"


@pytest.mark.parametrize("dies", ["planning", "switching"])
def test_a_plan_that_failed_after_an_evaluation_is_made_by_the_next_step(
    dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies in planning, or before the plan is changed, is replaced; an interrupted search is repeated."""
    monkeypatch.setattr(trainer_module, "default_plan", lambda pool: "auto")
    case = CASES["mlp"]
    model, made = case.model(), resolve_plan.make_plan
    calls: list[int] = []

    def disturbed(*args: Any, pool: onebox.Pool, **options: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt
        if len(calls) == 2 and dies == "planning":
            os.kill(pool.process_ids[1], signal.SIGKILL)
        return made(*args, pool=pool, **options)

    def switched(session: TrainingSession, *args: Any) -> None:
        if len(calls) == 2 and dies == "switching":
            os.kill(session._pool.process_ids[1], signal.SIGKILL)
            end_s = time.monotonic() + 20
            while not session._pool.lost and time.monotonic() < end_s:
                time.sleep(0.01)
        begin_with(session, *args)

    begin_with = TrainingSession.begin_with
    monkeypatch.setattr(resolve_plan, "make_plan", disturbed)
    monkeypatch.setattr(TrainingSession, "begin_with", switched)
    (batch,) = case.batches([8])
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(model, case.loss, sgd(model), pool=pool, recovery=onebox.Recovery(snapshot_every=2)) as trainer,
    ):
        trainer.evaluate([batch])
        with pytest.raises(KeyboardInterrupt):
            trainer.step(*batch)
        trainer.step(*batch).item()
        assert trainer.plan is not None and trainer.plan.predicted is not None
    assert len(calls) >= 2  # a loss may be noticed as late as by the step


def test_what_cannot_be_planned_is_data_parallel_by_default(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PlanError("no plan fits")

    monkeypatch.setattr(trainer_module, "default_plan", lambda pool: "auto")
    monkeypatch.setattr(resolve_plan, "make_plan", refuse)
    case = CASES["mlp"]
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pools(2)) as trainer:
        trainer.step(*case.batches([8])[0]).item()
        assert trainer.plan is not None and trainer.plan.devices == (0, 1)
    assert "data parallel, as no plan could be made for them: no plan fits" in caplog.text
    with (
        onebox.Trainer(model, case.loss, sgd(model), pool=pools(2), plan="auto") as trainer,
        pytest.raises(PlanError),
    ):
        trainer.step(*case.batches([8])[0])


def test_a_data_parallel_row_over_a_slow_link_is_predicted_as_it_runs() -> None:
    """The time is that of the link, which an emulated one keeps on a busy machine, too."""
    slow = onebox.Link(latency_s=2e-3, bandwidth_bps=1e6)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128))
    x, y = torch.ones(64, 128), torch.zeros(64, 128)
    with onebox.open("sim*2", threads=1, links={(0, 1): slow}) as pool:
        found = onebox.make_plan(model, nn.functional.mse_loss, sgd(model), x, y, pool=pool, budget_s=1.0)
        (row,) = [one for one in found.result.candidates if one.label == "data parallel, equal shares"]
        assert not row.refused and row.step_s > 0.25, "265 kB of gradients at 1 MB/s"
        assert row.step_s == pytest.approx(predict(found.problem, row.plan)[0].step_s, rel=0.01), "as --check has it"
        plan = msgspec.structs.replace(row.plan, predicted=None)
        with onebox.Trainer(model, nn.functional.mse_loss, sgd(model), pool=pool, plan=plan) as trainer:
            trainer.step(x, y).item()
            trainer.wait()
            begin_s = time.monotonic()
            for _ in range(STEPS):
                trainer.step(x, y).item()
            trainer.wait()
            step_s = (time.monotonic() - begin_s) / STEPS
    assert 0.67 < step_s / row.step_s < 1.5, (step_s, row.step_s)
