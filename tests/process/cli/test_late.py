"""Gradients that are a step late, from the command line: a plan is checked, trained with, and refused where exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebox.cli import main
from onebox.plan import ASYNC, Plan, Stage
from tests.process.cli.commands import POOL, command, metrics

JOB = ("--model", "mlp", "--data", "digits", *POOL)
SEGMENTS = ("model.body.1", "model.body.3", "model.body.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ``onebox plan --staleness 1`` finds, and a plan of two stages."""
    folder = tmp_path_factory.mktemp("late")
    options = (
        "--micro-batches",
        "16",
        "--budget",
        "1",
        "--staleness",
        "1",
        "--correction",
        "none",
        "--out",
        "found.json",
    )
    done = command(["plan", *JOB, *options], folder)
    assert done.returncode == 0, done.stderr
    found = Plan.read(folder / "found.json")
    assert ("--staleness 1 --correction none" in done.stdout) == (found.schedule == ASYNC)
    assert ("gradients are applied 1 step late" in done.stdout) == (found.schedule == ASYNC)
    return folder


def two_stages(folder: Path, schedule: str) -> str:
    path = folder / f"{schedule}.json"
    stages = tuple(
        Stage(segments=part, replicas=((device,),), shares=(1.0,))
        for device, part in enumerate((SEGMENTS[:1], SEGMENTS[1:]))
    )
    path.write_text(Plan(stages=stages, micro_batch=16, schedule=schedule).to_json())
    return path.name


def test_a_plan_is_checked_and_trained_with(folder: Path) -> None:
    name = two_stages(folder, ASYNC)
    done = command(["plan", *JOB, "--check", name], folder)
    assert done.returncode == 0, done.stderr
    assert "1 step late; 3 versions of the weights, and what updates were last, on each device" in done.stdout
    assert "in flight, stage by stage: 2, 1;" in done.stdout
    assert f"onebox train --staleness 1 --model mlp --pool 'cpu*2' --threads 1 --plan {name}" in done.stdout
    late = ("--staleness", "1", "--correction", "predict", "--warm-up", "2")
    done = command(["train", *JOB, "--plan", name, "--epochs", "1", "--run", "run", *late], folder)
    assert done.returncode == 0, done.stderr
    assert "late gradients: correction 'predict', asked for; the first 2 steps are exact" in done.stdout
    steps = max(line["step"] for line in metrics(folder / "run"))
    assert f"gradients were 0 steps late once, 1 step late {steps - 3} times; 2 steps were exact" in done.stdout
    losses = [line["loss"] for line in metrics(folder / "run") if "loss" in line]
    assert losses[-1] < losses[0]


def test_exact_steps_overlap(folder: Path) -> None:
    plan = two_stages(folder, "1f1b")
    done = command(["train", *JOB, "--plan", plan, "--epochs", "1", "--run", "overlapped", "--overlap"], folder)
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in metrics(folder / "overlapped") if "loss" in line]
    assert losses[-1] < losses[0]


def test_what_does_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late, exact = (str(tmp_path / two_stages(tmp_path, name)) for name in (ASYNC, "1f1b"))
    for plan, options, said in (
        (late, (), "train it with --staleness 1"),
        (exact, ("--staleness", "1"), "--staleness 1 needs a plan with the schedule async-1f1b"),
    ):
        assert main(["train", *JOB, "--plan", plan, *options, "--run", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1
