"""``onebox plan`` and ``onebox train --plan``: a plan is made, kept, edited, checked, run, and held against the run."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

import onebox.engine.problem.memory_search
from onebox.cli import main
from onebox.cli.planning import INTERRUPTED
from onebox.plan import Plan, SearchResult, Stage, search
from onebox.sizes import time_text
from onebox.stop_signals import RECENT
from tests.process.cli.commands import POOL, command, metrics

JOB = ("--model", "mlp", "--data", "digits", *POOL)


@dataclass(frozen=True)
class Made:
    """What ``onebox plan`` left and said."""

    folder: Path
    text: str
    report: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return Plan.read(self.folder / "plan.json")

    def two_stages(self) -> Plan:
        """Return a plan of two stages, from what the search compared."""
        found = [one["plan"] for one in self.report["candidates"] if one["label"] == "even cuts, 1f1b"]
        plan: Plan = msgspec.convert(found[0], Plan)
        assert len(plan.stages) == 2
        return plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A plan for the MLP; tests only look at it."""
    folder = tmp_path_factory.mktemp("plan")
    files = ("--out", "plan.json", "--figure", "plan.svg", "--report", "report.json")
    done = command(["plan", *JOB, "--micro-batches", "16,32", "--budget", "1", *files], folder)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return Made(folder, done.stdout, json.loads((folder / "report.json").read_text()))


def write(folder: Path, plan: Plan, name: str = "given.json") -> str:
    path = folder / name
    path.write_text(plan.to_json())
    return str(path)


@pytest.mark.feature("Plans: See what a plan costs, and whether that came true")
def test_it_says_what_the_plan_is_what_it_costs_and_why_this_one(made: Made) -> None:
    text = made.text
    assert made.plan.predicted is not None and made.plan.describe() in text
    assert "samples/s, bubble" in text
    for part in ("segments", "forward", "memory", "busy", "schedule", "why not", "model.body.1 "):
        assert part in text, part
    for label in ("the best found", "device 0 alone", "data parallel", "even cuts", "gpipe", "1f1b"):
        assert label in text, label
    best, *others = made.report["candidates"]
    times_s = [one["plan"]["predicted"]["step_s"] for one in others if one["plan"] != best["plan"]]
    assert times_s and all(f"× {step_s / made.plan.predicted.step_s:.2f}" in text for step_s in times_s)
    assert "slower" in text
    assert "emulated" not in text
    assert "run it with: onebox train --model mlp --pool 'cpu*2' --threads 1 --plan plan.json" in text


@pytest.mark.feature("Plans: Make, edit and check a plan file")
def test_the_files(made: Made) -> None:
    assert {path.name for path in made.folder.iterdir()} == {"plan.json", "plan.svg", "report.json"}
    assert made.plan.predicted is not None and made.plan.predicted.batch == 64
    assert made.report["plan"] == json.loads((made.folder / "plan.json").read_text())
    assert made.report["candidates"][0]["label"] == "the best found"
    assert made.report["samples_per_s"] == pytest.approx(64 / made.plan.predicted.step_s)
    used = [number in made.plan.devices for number in range(2)]  # how many pay depends on what the machine does besides
    assert [device["peak_bytes"] > 0 for device in made.report["devices"]] == used
    assert "<!-- predicted: " in (made.folder / "plan.svg").read_text()


@pytest.mark.feature("Plans: Make, edit and check a plan file")
def test_an_edited_plan_is_checked(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages swapped over the devices, and another schedule; what the file itself predicts is not looked at."""
    given = made.two_stages()
    first, second = given.stages
    stages = (
        Stage(replicas=second.replicas, shares=(1.0,), segments=first.segments),
        Stage(replicas=first.replicas, shares=(1.0,), segments=second.segments),
    )
    edited = msgspec.structs.replace(given, stages=stages, schedule="zb-h1", predicted=None)
    path = write(tmp_path, edited)
    line = ["plan", *JOB, "--check", path, "--json", "--out", str(tmp_path / "checked.json")]
    assert main(line) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["candidates"] == []
    checked = Plan.read(tmp_path / "checked.json")
    assert msgspec.structs.replace(checked, predicted=None) == edited
    assert checked.predicted is not None and checked.predicted.step_s > 0
    assert 0 < checked.predicted.bubble < 1
    assert Plan.read(path) == edited


def test_a_plan_that_splits_layers_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=32)
    line = ["plan", *JOB, "--check", write(tmp_path, given), "--out", str(tmp_path / "checked.json")]
    assert main(line) == 0
    assert "1 stage on devices 0+1, micro-batches of 32" in capsys.readouterr().out
    checked = Plan.read(tmp_path / "checked.json")
    assert msgspec.structs.replace(checked, predicted=None) == given
    assert checked.predicted is not None and len(checked.predicted.peak_bytes) == 2


def wrong_plans() -> list[Any]:
    whole = Stage(replicas=((0,),), shares=(1.0,))
    far = msgspec.structs.replace(Plan.data_parallel([0, 7], [1.0, 1.0]))
    big = Plan(stages=(whole,), micro_batch=65)
    unknown = Plan(
        stages=(
            msgspec.structs.replace(whole, segments=("model.body.1",)),
            msgspec.structs.replace(whole, segments=("model.head",)),
        ),
        micro_batch=32,
    )
    row = "0: 0F0 0B0 0F1"
    short = Plan(stages=(whole,), micro_batch=32, schedule="table", table=(row,))
    return [
        pytest.param(far, "the plan uses device 7, but the pool has 2, numbered from 0", id="device"),
        pytest.param(big, "micro-batches of 65, but the batch has 64 samples", id="batch"),
        pytest.param(unknown, "'model.head', which the model does not have", id="segment"),
        pytest.param(short, "0B1 (or 0I1 and 0W1) is missing on device 0", id="table"),
    ]


@pytest.mark.parametrize(("plan", "part"), wrong_plans())
def test_a_plan_that_cannot_be_is_one_line_and_status_2(
    plan: Plan, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *JOB, "--check", write(tmp_path, plan)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("onebox: ") and text.count("\n") == 1
    assert part in text


@pytest.mark.parametrize(
    ("content", "part"),
    [("{", "is no plan file"), ('{"stages": [], "colour": 1}', "colour"), ('{"stages": []}', "at least one stage")],
    ids=["json", "key", "stage"],
)
@pytest.mark.parametrize("start", ["plan --check", "train --plan"])
def test_a_file_that_is_no_plan_is_refused_before_anything_starts(
    start: str, content: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text(content)
    run = ["--run", str(tmp_path / "run")] if start.startswith("train") else []
    assert main([*start.split(), str(tmp_path / "p.json"), *JOB, *run]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--out nowhere/p.json", "--out nowhere/p.json: a file in an existing folder is needed"),
        ("--figure plan.jpg", "allowed are .png, .svg, .pdf"),
        ("--report nowhere/p.json", "a file in an existing folder"),
        ("--check nowhere.json", "cannot read plan nowhere.json"),
    ],
)
def test_files_are_checked_before_time_is_spent(
    flags: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *JOB, *flags.split()]) == 2
    out = capsys.readouterr()
    assert part in out.err
    assert not out.out


def test_too_small_devices_are_an_error_that_says_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "--model", "mlp", "--pool", "sim", "--memory", "1MiB", "--micro-batches", "32", "--budget", "1"]
    assert main([*line, "--out", str(tmp_path / "p.json")]) == 1
    text = capsys.readouterr().err
    assert "no plan fits" in text and "misses device" in text and "What would help" in text
    assert not (tmp_path / "p.json").exists()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Press Ctrl-C when a search begins; return the number of times."""
    pressed: list[int] = []

    def pressing(*problem: Any, **named: Any) -> SearchResult:
        pressed.append(len(pressed) + 1)
        signal.raise_signal(signal.SIGINT)
        return search(*problem, **named)

    monkeypatch.setattr("onebox.engine.problem.memory_search.search", pressing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the background of a shell ignores it
    yield pressed
    signal.signal(signal.SIGINT, before)
    RECENT.forget()


def test_ctrl_c_ends_a_search_with_the_best_plan_so_far(
    interrupted: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "plan.json", tmp_path / "run"
    assert main(["plan", *JOB, "--micro-batches", "16,32", "--budget", "600", "--out", str(out)]) == 0
    assert Plan.read(out).predicted is not None
    assert capsys.readouterr().out.count(INTERRUPTED) == 1
    assert main(["train", *JOB, "--plan", "auto", "--epochs", "1", "--run", str(run)]) == 0
    assert capsys.readouterr().out.count(INTERRUPTED) == 1
    assert interrupted == [1, 2]
    assert Plan.read(run / "plan.json").predicted is not None


def test_a_second_ctrl_c_ends_the_command(
    interrupted: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = onebox.engine.problem.memory_search.search

    def twice(*problem: Any, **named: Any) -> SearchResult:
        signal.raise_signal(signal.SIGINT)
        return once(*problem, **named)

    monkeypatch.setattr("onebox.engine.problem.memory_search.search", twice)
    assert main(["plan", *JOB, "--budget", "600", "--out", str(tmp_path / "plan.json")]) == 130
    assert interrupted == [1] and not list(tmp_path.iterdir())
    assert INTERRUPTED not in capsys.readouterr().out


def test_a_plan_that_does_not_fit_is_shown_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, Plan.data_parallel([0], [1.0], micro_batch=32))
    assert main(["plan", "--model", "mlp", "--pool", "sim", "--memory", "1MiB", "--check", path]) == 2
    said = capsys.readouterr()
    assert re.search(r"onebox: the plan does not fit: device 0 lacks [\d.]+ \w+; smaller micro-batches", said.err)
    assert "too much" in said.out
    assert "run it with" not in said.out


def test_emulated_devices_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--model", "mlp", "--pool", "sim*2,sim@0.5", "--micro-batches", "8,16", "--budget", "1"]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "sim, emulated, speed 0.5" in text
    assert "with emulated devices" in text
    assert "* emulated" in text
    assert "onebox train --model mlp --pool 'sim*2,sim@0.5' --plan auto" in text


# ---- running plans


@pytest.fixture(scope="module")
def planned_run(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two epochs of the plan of two stages."""
    folder = tmp_path_factory.mktemp("planned")
    path = write(folder, made.two_stages())
    done = command(["train", *JOB, "--plan", path, "--epochs", "2", "--seed", "3", "--run", "run"], folder)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return Made(folder / "run", done.stdout, json.loads((folder / "run" / "summary.json").read_text()))


@pytest.mark.feature("Plans: Train by a plan file")
def test_a_planned_run_learns_and_keeps_its_plan(made: Made, planned_run: Made) -> None:
    assert planned_run.plan == made.two_stages()
    names = {path.name for path in planned_run.folder.iterdir()}
    assert names >= {"plan.json", "schedule.png", "memory.png", "timeline.json", "summary.json", "checkpoint"}
    assert "plan: 2 stages on devices 0; 1" in planned_run.text
    assert planned_run.report["test_accuracy"] >= 0.85
    for name in ("schedule.png", "memory.png"):
        with Image.open(planned_run.folder / name) as image:
            assert image.width > 1000


@pytest.mark.feature("Plans: See what a plan costs, and whether that came true")
def test_a_planned_run_says_how_right_the_plan_was(planned_run: Made) -> None:
    text, found = planned_run.text, planned_run.report["comparison"]
    assert "predicted and measured, medians of 44 steps" in text  # 22 of each epoch's 23 have a whole batch
    assert "bubble" in text and "time for 64 samples" in text and "peak, by the plan" in text
    assert found["steps"] == 44 and found["batch"] == 64
    assert found["step_s"]["predicted"] > 0 and found["step_s"]["measured"] > 0
    assert [row["stage"] for row in found["stages"]] == [0, 1]
    assert [(one["device"], one["difference_bytes"]) for one in found["memory"]] == [(0, 0), (1, 0)]
    for row in found["stages"]:
        assert set(row["seconds"]) == {"F", "B"}
        assert all(pair["error"] is not None for pair in row["seconds"].values())
    for row in found["devices"]:
        assert row["exact_bytes"] == pytest.approx(row["peak_bytes"]["measured"], rel=0.05)
        assert row["peak_bytes"]["predicted"] > 0


def test_a_planned_run_compares_its_first_steps_and_says_so_where_they_differ(planned_run: Made) -> None:
    found = planned_run.report["profile_correction"]
    assert found["first"] == 3
    assert found["steps"] in range(9, 41)
    assert set(found["devices"]) == {"0", "1"}
    assert found["planned_s"] == planned_run.plan.predicted.step_s if planned_run.plan.predicted else None
    said = f"from step 3 on, {found['text']}" if found["text"] else ""
    assert said in planned_run.text
    assert ("from step" in planned_run.text) == bool(said)


def test_the_timeline_of_a_planned_run_has_waits(planned_run: Made) -> None:
    events = json.loads((planned_run.folder / "timeline.json").read_text())["traceEvents"]
    waited = [event for event in events if event.get("cat") == "wait"]
    assert any(event["args"].get("for", "").startswith("receive") for event in waited)


def test_a_planned_run_that_is_resumed_ends_as_one_that_was_not(made: Made, planned_run: Made, tmp_path: Path) -> None:
    path = write(tmp_path, made.two_stages())
    run = str(tmp_path / "run")
    assert main(["train", *JOB, "--plan", path, "--epochs", "1", "--seed", "3", "--run", run]) == 0
    Path(path).unlink()  # the run has its own
    assert main(["train", "--resume", run, "--epochs", "2"]) == 0
    assert metrics(tmp_path / "run") == metrics(planned_run.folder)


def test_a_run_goes_on_with_another_plan_of_the_same_micro_batches_only(
    planned_run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(planned_run.folder, tmp_path / "run")
    size = planned_run.plan.micro_batch
    assert size is not None
    whole = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=size)
    other = write(tmp_path, msgspec.structs.replace(whole, micro_batch=size // 2), "other.json")
    same = write(tmp_path, whole, "same.json")
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "3", "--plan", other]) == 2
    assert "would change what is computed" in capsys.readouterr().err
    assert Plan.read(tmp_path / "run" / "plan.json") == planned_run.plan
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "3", "--plan", same]) == 0
    text = capsys.readouterr().out
    assert "plan: 1 stage, 2 replicas" in text and "epoch 3/3" in text
    assert "predicts nothing for batches of 64; onebox plan --check" in text
    assert Plan.read(tmp_path / "run" / "plan.json") == whole


def test_plan_auto_plans_runs_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", *JOB, "--plan", "auto", "--epochs", "1", "--run", str(run)]) == 0
    plan = Plan.read(run / "plan.json")
    assert plan.predicted is not None
    text = capsys.readouterr().out
    assert text.startswith("planning: ")
    assert f"predicted: step {time_text(plan.predicted.step_s)} for 64 samples" in text
    assert f"plan: {plan.describe()}" in text
    assert "predicted and measured, medians of 22 steps" in text
    config = json.loads((run / "config.json").read_text())
    assert config["plan"] == "auto"
    comparison = json.loads((run / "summary.json").read_text())["comparison"]
    assert comparison["step_s"]["predicted"] == plan.predicted.step_s


def test_a_plan_on_devices_that_only_sleep_is_run_for_its_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    pool = ("--pool", "sim*2")
    assert main(["train", "--model", "mlp", *pool, "--plan", "auto", "--epochs", "1", "--run", str(run)]) == 0
    text = capsys.readouterr().out
    assert "on emulated devices" in text
    assert "sim devices compute nothing" in text and "after epoch 1" not in text
    assert not (run / "checkpoint").exists()
    assert (run / "schedule.png").exists()


def test_a_plan_for_more_devices_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, Plan.data_parallel([0, 5], [1.0, 1.0]))
    assert main(["train", *JOB, "--plan", path, "--run", str(tmp_path / "run")]) == 2
    assert "the plan uses device 5, but the pool has 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.feature("Memory: Predict memory at every instruction, and show it")
def test_memory_is_shown_as_it_is_predicted_and_measured(tmp_path: Path) -> None:
    files = ("--figure", "plan.svg", "--report", "report.json")
    line = ["plan", *JOB, "--micro-batches", "32", "--schedules", "1f1b", "--budget", "0.5", "--show-memory", *files]
    done = command(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"plan.svg", "plan-memory.svg", "report.json"}
    for part in ("what becomes of the activations", "would keep", "policy", "measured in step 3 of 3", "0 B"):
        assert part in done.stdout, part
    report = json.loads((tmp_path / "report.json").read_text())
    memory, plan = report["memory"], msgspec.convert(report["plan"], Plan)
    named = [name for row in memory["stages"] for name in row["segments"]]
    assert named == ["model.body.1", "model.body.3", "model.body.5"]
    assert all(row["policy"] == "keep" and row["text"] for row in memory["stages"])
    assert [one["device"] for one in memory["compared"]] == sorted(plan.devices)
    assert all(one["difference_bytes"] == 0 for one in memory["compared"])
    assert plan.predicted is not None
    peaks = dict(zip(plan.devices, plan.predicted.peak_bytes, strict=True))
    assert {one["device"]: one["peak_bytes"] for one in memory["devices"]} == peaks
    for one in memory["devices"]:
        assert one["peak_bytes"] == max(use["peak_bytes"] for use in one["instructions"])
