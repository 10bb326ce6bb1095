"""What a checkpoint keeps of a run's standing, and how rates are taken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.cli.training.training_loop import EpochResult, RunProgress, TrainingLoop, result_line
from onebox.errors import CheckpointError
from onebox.feed import Position
from onebox.plan import Plan
from onebox.report.run.json_files import to_json

RESULT = EpochResult(step=23, epoch=1, train_loss=0.25, test_loss=0.125, test_accuracy=0.75, samples_per_s=1000.0)
PATH = Path("checkpoint/step-00000023")


def through_json(standing: RunProgress) -> object:
    return json.loads(to_json(standing.to_extra()))


@pytest.mark.parametrize("last", [None, RESULT])
def test_a_standing_survives_a_checkpoint(last: EpochResult | None) -> None:
    standing = RunProgress(position=Position(epoch=1, index=5, seed=3), loss_sum=0.1 + 0.2, last=last)
    assert RunProgress.from_extra(through_json(standing), seed=3, path=PATH) == standing  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_survives_too() -> None:
    standing = RunProgress(position=Position(epoch=0, index=5, seed=3), loss_sum=math.nan)
    assert RunProgress.from_extra(through_json(standing), seed=3, path=PATH).loss_sum is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"epoch": 1},
        {"position": {"epoch": -1, "index": 0, "seed": 3}},
        {"position": {"epoch": 1, "index": 0}},
        {"position": {"epoch": 1, "index": 0, "seed": 3}, "loss_sum": "much"},
        {"position": {"epoch": 1, "index": 0, "seed": 4}},
    ],
    ids=str,
)
def test_a_foreign_standing_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="step-00000023"):
        RunProgress.from_extra(extra, seed=3, path=PATH)


def test_every_new_plan_is_told_once() -> None:
    plans = [Plan.data_parallel([0, 1], [1.0, 1.0]), Plan.data_parallel([0], [1.0])]
    trainer = SimpleNamespace(recoveries=(), island_changes=(), decisions=(), plan=None)
    rest: Any = dict.fromkeys(["config", "data", "train", "test", "folder", "log", "progress", "standing", "stop"])
    told: list[Plan] = []
    loop = TrainingLoop(trainer=trainer, plan_listeners=[told.append], **rest)  # type: ignore[arg-type]
    for plan in (None, plans[0], plans[0], plans[1], plans[1]):
        trainer.plan = plan
        loop._tell_news()
    assert told == plans


def test_a_result_as_a_line() -> None:
    line = "epoch 1/3  loss 0.2500  test loss 0.1250  test accuracy 75.0 %  1,000 samples/s"
    assert result_line(RESULT, 3) == line
