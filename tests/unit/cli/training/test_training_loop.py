"""What a checkpoint keeps of a run's standing, and how rates are taken."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from onebox.cli.training.training_loop import EpochResult, RunProgress, TrainingLoop, result_line
from onebox.engine.steps.account import PLANNING, STEPS
from onebox.engine.steps.wall_time import WallTime
from onebox.errors import CheckpointError
from onebox.feed import Position
from onebox.plan import Plan
from onebox.report import Progress
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


def fake_feed(clock: Any, sizes: list[int], wait_s: float) -> Any:
    """Return a feed of batches of those sizes, each of which is waited for."""

    def batches() -> Iterator[Any]:
        for size in sizes:
            clock.now_ns += int(wait_s * 1e9)
            yield SimpleNamespace(size=size)

    class Batches(SimpleNamespace):
        def __len__(self) -> int:
            return len(sizes)

        def epoch(self, number: int) -> Any:
            self.position = Position(epoch=number + 1, index=0, seed=3)
            return contextlib.nullcontext(batches())

    return Batches(skipped=SimpleNamespace(in_epoch=0, count=0, first=()), counters=(), report=lambda: "")


def fake_trainer(clock: Any, plan_s: float, step_s: float) -> Any:
    """Return a trainer on a device that computes nothing."""
    wall = WallTime((), lambda: clock.now_ns)

    def step(_: object) -> Any:
        if trainer.plan is None:
            with wall.during(PLANNING):
                clock.now_ns += int(plan_s * 1e9)
            trainer.plan = Plan.data_parallel([0], [1.0])
        trainer.steps_done += 1
        return SimpleNamespace(item=item, gradient_norm=None)

    def item() -> float:
        with wall.during(STEPS):
            clock.now_ns += int(step_s * 1e9)
        return 0.5

    def evaluate(batches: Any) -> Any:
        return SimpleNamespace(loss=0.5 + sum(batch.size for batch in batches), metrics={"accuracy": math.nan})

    pool = SimpleNamespace(devices=[SimpleNamespace(kind="sim")])
    rest: dict[str, Any] = dict.fromkeys(("recoveries", "island_changes", "decisions", "links", "island_plans"), ())
    trainer = SimpleNamespace(
        wall=wall, plan=None, steps_done=0, behind=False, step=step, evaluate=evaluate, pool=pool, **rest
    )
    return trainer


def test_console_and_metrics_and_summary_have_one_rate() -> None:
    """Planning takes 60 s, and of each step of 32 samples the feed takes 0.05 s and the devices 0.20 s."""
    clock, stream, records = SimpleNamespace(now_ns=0), io.StringIO(), list[Any]()
    trainer: Any = fake_trainer(clock, plan_s=60.0, step_s=0.20)
    config: Any = SimpleNamespace(epochs=2, batch=32, plan=None, save_interval=None)
    stop: Any = SimpleNamespace(requested=False, wait_for=lambda call: call())
    data: Any = SimpleNamespace(train=range(128))
    progress = Progress(8, 2, every=1, console=Console(file=stream), clock=lambda: clock.now_ns / 1e9)
    loop = TrainingLoop(
        config=config,
        trainer=trainer,
        data=data,
        train=fake_feed(clock, [32] * 4, 0.05),
        test=fake_feed(clock, [], 0.0),
        folder=None,  # type: ignore[arg-type]
        log=SimpleNamespace(write=records.append),  # type: ignore[arg-type]
        progress=progress,
        standing=RunProgress(position=Position(epoch=0, index=0, seed=3)),
        stop=stop,
    )
    loop.run()
    steps = [line for line in stream.getvalue().splitlines() if " step " in line]
    assert len(steps) == 8 and all(" 128 samples/s" in line for line in (steps[3], steps[-1]))
    epochs = [line for line in stream.getvalue().splitlines() if "test loss" in line]
    assert len(epochs) == 2 and all(line.endswith(" 128 samples/s") for line in epochs)
    rates = [record["samples_per_s"] for record in records if record["event"] in ("epoch", "account")]
    assert [*rates, loop.account.rate(loop.samples)] == pytest.approx([128.0] * 5)
    assert loop.account.seconds == pytest.approx(62.0)


def test_a_result_as_a_line() -> None:
    line = "epoch 1/3  loss 0.2500  test loss 0.1250  test accuracy 75.0 %  1,000 samples/s"
    assert result_line(RESULT, 3) == line
