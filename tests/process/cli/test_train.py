"""A run of ``onebox train``: what it says, what it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onebox.cli import main
from onebox.engine.state.checkpoint_files import read
from tests.process.cli.commands import POOL, command, metrics
from tests.process.cli.conftest import Run

STEPS_PER_EPOCH = 23  # 1,442 digits in batches of 64; the last has 34
EPOCHS = 3


def test_it_says_what_it_does(undisturbed: Run) -> None:
    text = undisturbed.done.stdout
    assert not undisturbed.done.stderr
    assert text.isprintable() or "\x1b" not in text
    assert "cnn of 75,434 parameters, 1,442 samples to train on, 355 to test on" in text
    assert "plan: 1 stage, 2 replicas (0: 50%, 1: 50%)" in text
    assert len(re.findall(r"^epoch \d/3  step \d+/69  loss", text, re.MULTILINE)) == 7
    results = re.findall(r"^epoch (\d)/3  loss .* test loss .* test accuracy .* samples/s$", text, re.MULTILINE)
    assert results == ["1", "2", "3"]
    accounts = re.findall(r"^\d+\.\d s: ([a-z].+ \d+ %)$", text, re.MULTILINE)  # of each epoch, and of the run
    assert len(accounts) == EPOCHS + 1
    assert "capture and planning" in accounts[0] and "capture and planning" in accounts[-1]
    assert "run folder run" in text


@pytest.mark.feature("Command line: Train a model and data set")
def test_it_learns(undisturbed: Run) -> None:
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["test_accuracy"] >= 0.97
    assert summary["test_loss"] < 0.2


@pytest.mark.feature("Command line: Find all of a run in its folder")
def test_the_run_folder(undisturbed: Run) -> None:
    names = {path.name for path in undisturbed.folder.iterdir()}
    assert names == {"config.json", "status.json", "metrics.jsonl", "checkpoint", "timeline.json", "summary.json"}


def test_the_configuration_is_resolved(undisturbed: Run) -> None:
    config = json.loads((undisturbed.folder / "config.json").read_text())
    assert config["pool"] == "cpu,cpu"
    assert (config["lr"], config["weight_decay"], config["momentum"]) == (1e-3, 1e-2, None)
    assert (config["epochs"], config["seed"], config["threads"]) == (3, 3, 1)


@pytest.mark.feature("Monitoring: Record metrics as JSON lines")
def test_the_metrics(undisturbed: Run) -> None:
    records = metrics(undisturbed.folder)
    steps = [record for record in records if record["event"] == "step"]
    epochs = [record for record in records if record["event"] == "epoch"]
    assert [record["step"] for record in steps] == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert [record["step"] for record in epochs] == [STEPS_PER_EPOCH * (n + 1) for n in range(EPOCHS)]
    assert sum(record["samples"] for record in steps) == EPOCHS * 1442
    for epoch in epochs:
        own = [record for record in steps if record["epoch"] == epoch["epoch"]]
        mean = sum(record["loss"] * record["samples"] for record in own) / 1442
        assert epoch["train_loss"] == pytest.approx(mean, rel=1e-12)


def test_the_feed_of_each_epoch_is_on_record(undisturbed: Run) -> None:
    records = [json.loads(line) for line in (undisturbed.folder / "metrics.jsonl").read_text().splitlines()]
    feeds = [record for record in records if record["event"] == "feed"]
    assert [(record["epoch"], record["step"]) for record in feeds] == [(1, 23), (2, 46), (3, 69)]
    for record in feeds:
        assert list(record["stages"]) == ["read", "process", "upload", "compute"]
        assert {stage["items"] for stage in record["stages"].values()} == {STEPS_PER_EPOCH}
        assert record["stages"]["read"]["bytes"] == 1442 * (64 + 8)
        assert record["skipped"] == 0


@pytest.mark.feature("Monitoring: Account for the time of each epoch")
def test_the_account_of_each_epoch_is_all_of_its_time(undisturbed: Run) -> None:
    records = [json.loads(line) for line in (undisturbed.folder / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["event"] == "begin" and records[0]["version"] == 2
    accounts = [record for record in records if record["event"] == "account"]
    assert [(record["epoch"], record["step"], record["samples"]) for record in accounts] == [
        (n + 1, STEPS_PER_EPOCH * (n + 1), 1442) for n in range(EPOCHS)
    ]
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    known = r"computing|waiting for device [01]|transfers within localhost|feed|client|saving|evaluating|" + (
        r"capture and planning|not attributed"
    )
    for shares in (*(record["shares"] for record in accounts), summary["account"]):
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(re.fullmatch(known, cause) for cause in shares), shares
    assert {"computing", "evaluating", "capture and planning"} <= accounts[0]["shares"].keys()
    assert summary["seconds"] >= sum(record["seconds"] for record in accounts) - 1e-6
    epochs = [record for record in records if record["event"] == "epoch"]
    assert [record["samples_per_s"] for record in epochs] == [record["samples_per_s"] for record in accounts]
    assert all(record["text"] in undisturbed.done.stdout for record in accounts)
    whole = {"samples": EPOCHS * 1442, "shares": summary["account"], **summary}
    for one in (*accounts, whole):  # one rate, of the same account, wherever it is given
        training_s = one["seconds"] * (1 - one["shares"].get("capture and planning", 0.0))
        assert one["samples_per_s"] == pytest.approx(one["samples"] / training_s)


@pytest.mark.feature("Monitoring: Open a timeline in Perfetto")
def test_the_timeline_is_a_trace_whose_tracks_do_not_overlap(undisturbed: Run) -> None:
    trace = json.loads((undisturbed.folder / "timeline.json").read_text())
    events = trace["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"worker 0 (cpu)", "worker 1 (cpu)"}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert 1 <= event["args"]["step"] <= EPOCHS * STEPS_PER_EPOCH
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert {event["cat"] for track in tracks.values() for event in track} >= {"compute", "transfer"}
    for track in tracks.values():
        for first, second in pairwise(sorted(track, key=lambda event: float(event["ts"]))):
            assert int(1000 * (first["ts"] + first["dur"])) <= int(1000 * second["ts"]) + 1


def test_the_summary(undisturbed: Run) -> None:
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    assert summary["steps"] == EPOCHS * STEPS_PER_EPOCH
    assert summary["seconds"] > 0 and summary["samples_per_s"] > 0
    assert [device["peak_bytes"] > 0 for device in summary["devices"]] == [True, True]
    assert summary["plan"]["stages"][0]["shares"] == [0.5, 0.5]
    assert summary["comparison"] is None  # there was no plan to compare with
    assert (undisturbed.folder / summary["checkpoint"] / "manifest.json").exists()


def test_the_checkpoint_holds_the_position_in_the_data(undisturbed: Run) -> None:
    manifest = read(undisturbed.folder / "checkpoint").manifest
    assert manifest.step == EPOCHS * STEPS_PER_EPOCH
    assert manifest.extra["position"] == {"epoch": EPOCHS, "index": 0, "seed": 3, "samples": 0}


def test_a_complete_run_that_is_resumed_says_so_and_changes_nothing(
    undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert "has had all its 3 epochs" in capsys.readouterr().out
    for name in ("metrics.jsonl", "summary.json", "timeline.json", "config.json"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed.folder / name).read_bytes(), name


def test_a_run_goes_on_with_its_optimizer_on_the_host(undisturbed: Run, tmp_path: Path) -> None:
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", str(EPOCHS + 1), "--update", "host"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["plan"]["update"] == "host"
    assert summary["steps"] == (EPOCHS + 1) * STEPS_PER_EPOCH


def test_a_damaged_checkpoint_is_refused_by_name(
    undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    file = tmp_path / "run" / "checkpoint" / "step-00000069" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and str(file) in text and "checksum" in text


def test_shares_that_do_not_fit_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *POOL, "--shares", "1,2,3", "--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "onebox: --shares 1,2,3: 3 weights for 2 devices; give one for each\n"
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_a_failure_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "--pool", "cpu", "--threads", "1", "--memory", "1KiB", "--run", str(tmp_path / "run")]
    assert main(line) == 1
    text = capsys.readouterr().err
    assert text.startswith("onebox: worker 0 (cpu") and "quota" in text and "Traceback" not in text


@pytest.mark.feature("Command line: List the devices of a pool")
def test_devices_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", *POOL, "--memory", "1GiB", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)
    assert [(each["number"], each["device"], each["threads"]) for each in devices] == [(0, "cpu", 1), (1, "cpu", 1)]
    assert [each["memory_bytes"] for each in devices] == [1 << 30] * 2


def test_help_and_wrong_flags_do_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for line, status in (("--help", 0), ("train --help", 0), ("train --batch 0", 2)):
        done = command(line.split(), tmp_path, environment=environment)
        assert done.returncode == status, done.stderr
