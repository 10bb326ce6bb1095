"""Islands on the command line: a run, its end, its continuation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from onebox.engine.state.checkpoint_files import read
from tests.process.cli.commands import command, metrics

ISLANDS = ("--pool", "cpu*3", "--threads", "1", "--model", "mlp", "--islands", "0,1/2", "--outer-every", "7")


@pytest.mark.feature("Islands: Resume a run of islands")
def test_a_run_of_islands_learns_and_is_resumed(tmp_path: Path) -> None:
    options = ("--outer-compression", "e3m0", "--outer-state", "host", "--recover", "on")
    done = command(["train", *ISLANDS, *options, "--epochs", "2", "--run", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "island 0: 1 stage, 2 replicas (0: 50%, 1: 50%)" in done.stdout
    assert "island 1: 1 stage on device 2" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_accuracy"] > 0.8
    stored = read(tmp_path / "run" / "checkpoint").manifest.islands
    assert stored is not None
    assert stored.devices == ((0, 1), (2,))
    assert (stored.outer.compression, stored.outer.state) == ("e3m0", "host")
    assert stored.samples == ((0.0, 0.0),), "the end of a run includes all steps"
    done = command(["train", "--resume", "run", "--epochs", "3"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [each["step"] for each in metrics(tmp_path / "run") if each["event"] == "epoch"] == [23, 46, 69]


@pytest.mark.parametrize("overlap", [0, 3])
def test_a_run_that_is_given_more_epochs_is_the_run_that_had_them_from_the_start(overlap: int, tmp_path: Path) -> None:
    """The outer steps at the end of the shorter run, off their schedule, leave no trace; its last save has them."""
    options = ("--outer-compression", "int8", "--outer-overlap", str(overlap))
    for epochs, run in ((2, "short"), (3, "whole")):
        done = command(["train", *ISLANDS, *options, "--epochs", str(epochs), "--run", run], tmp_path)
        assert done.returncode == 0, done.stderr
    shorter = read(tmp_path / "short" / "checkpoint")
    assert shorter.manifest.islands is not None and not any(map(any, shorter.manifest.islands.samples))
    done = command(["train", "--resume", "short", "--epochs", "3"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "short") == metrics(tmp_path / "whole")
    resumed, whole = (read(tmp_path / run / "checkpoint") for run in ("short", "whole"))
    assert resumed.manifest.numbers == whole.manifest.numbers
    for found, wanted in ((resumed.state, whole.state), (resumed.optimizer, whole.optimizer)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("codec", ["none", "e3m0"])
def test_predicted_and_measured_stand_beside_each_other(codec: str, tmp_path: Path) -> None:
    options = ("--plan", "auto", "--epochs", "2", "--run", "run", "--outer-compression", codec)
    done = command(["train", *ISLANDS, *options], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "outer steps included" in done.stdout and "rate of a link during these" in done.stdout
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["comparison"]
    assert found["batch"] == 64 and len(found["islands"]) == 2
    for name in ("step_s", "sums_s", "link_bps"):
        assert found[name]["predicted"] > 0 and found[name]["measured"] > 0, name
    assert found["step_s"]["measured"] > found["sums_s"]["measured"]
    for island in found["islands"]:
        for device in island["devices"]:
            assert device["peak_bytes"]["measured"] >= device["exact_bytes"] > 0


@pytest.mark.feature("Plans: Compare exact, compressed and island training by a probe")
def test_a_plan_shows_exact_compressed_and_island_training(tmp_path: Path) -> None:
    options = ("--micro-batches", "32", "--schedules", "1f1b", "--budget", "1", "--lossy", "gradients,activations")
    done = command(["plan", *ISLANDS, *options, "--probe", "30", "--report", "report.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exact, compressed and island training, all predicted" in done.stdout
    assert "the islands: onebox train --islands 0,1/2 --outer-every 7 --model mlp --pool" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    exact, compressed, islands = report["modes"]
    assert [each["name"] for each in report["modes"]] == ["synchronous", "compressed", "islands"]
    assert compressed["text"] == "no codec shortens a step by a tenth", "within a host nothing is worth it"
    assert exact["step_s"] > 0 and islands["sample_s"] == islands["step_s"] / 64
    (there, back) = islands["traffic"]
    assert (there["from"], there["to"], back["from"], back["to"]) == ([0, 1], [2], [2], [0, 1])
    assert there["bytes"] == back["bytes"] > 0
    assert islands["accuracy"].startswith("loss +0.7 % (2 islands")
    assert compressed["probed_loss"] is None
    assert 0 < exact["probed_loss"] < 2.3 and 0 < islands["probed_loss"] < 2.3, "ten classes: log(10) before training"
    assert exact["probed_loss"] != islands["probed_loss"]
    assert "loss of" in done.stdout and "the probe" in done.stdout
    assert report["islands"]["devices"] == [[0, 1], [2]] and len(report["islands"]["plans"]) == 2


@pytest.mark.parametrize(("islands", "message"), [("0,1/1", "device 1 is named twice"), ("0", "device 1 is in no")])
def test_a_plan_refuses_what_training_refuses(islands: str, message: str, tmp_path: Path) -> None:
    done = command(["plan", "--pool", "cpu*2", "--threads", "1", "--model", "mlp", "--islands", islands], tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--islands", "0,1/1"], "device 1 is named twice; each belongs to one island"),
        (["--islands", "0"], "device 1 is in no island"),
        (
            ["--islands", "0/1", "--outer-every", "2", "--outer-fragments", "3"],
            "--outer-fragments 3 and --outer-every 2",
        ),
        (["--outer-every", "2"], "--outer-every 2 is for islands; it needs --islands"),
        (["--islands", "0/1", "--outer-compression", "int4"], "int4"),
        (["--islands", "0/1", "--outer-every", "3", "--outer-overlap", "3"], "--outer-overlap 3 and --outer-every 3"),
    ],
)
def test_what_makes_no_sense_is_one_error(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = command(["train", "--pool", "cpu*2", "--threads", "1", "--model", "mlp", *arguments], tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
