"""A trainer that plans by itself: ``plan="auto"``, against one process in float64."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import UsageError
from onebox.plan import ASYNC
from tests.models import CASES
from tests.process.shelf import Shelf
from tests.reference import Outcome, assert_same, train


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def outcome(trainer: onebox.Trainer, losses: list[onebox.StepLoss]) -> Outcome:
    tensors = {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}
    return Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=tensors)


@pytest.mark.parametrize("engine", [onebox.Engine(), onebox.Engine(overlap=True)], ids=["plain", "overlap"])
def test_the_result_is_that_of_one_process(
    engine: onebox.Engine, pools: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
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


def test_stale_gradients_get_a_plan_that_they_can_use(pools: Shelf) -> None:
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


def test_the_model_is_measured_behind_code_that_runs_on_the_device(pools: Shelf) -> None:
    model = nn.Linear(4, 3)

    def scaled(inputs: Tensor) -> Any:
        return inputs.float() / 255

    before = torch.random.get_rng_state()
    options: dict[str, Any] = {"pool": pools(2), "plan": "auto", "on_device": scaled}
    with onebox.Trainer(model, nn.functional.mse_loss, sgd(model), **options) as trainer:
        loss = trainer.step(torch.full((8, 4), 51, dtype=torch.uint8), torch.zeros(8, 3)).item()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loss == pytest.approx(nn.functional.mse_loss(model(torch.full((8, 4), 0.2)), torch.zeros(8, 3)).item())


def test_a_plan_that_is_not_there_is_answered_with_what_is_allowed(pools: Shelf) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"plan='atuo': there is no such file; allowed are a Plan, .*'auto'"):
        onebox.Trainer(
            model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), pool=pools(2), plan="atuo"
        )
