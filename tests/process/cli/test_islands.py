"""Islands on the command line: a run, its end, its continuation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onebox.engine.state.checkpoint_files import read
from tests.process.cli.commands import command, metrics

ISLANDS = ("--pool", "cpu*3", "--threads", "1", "--model", "mlp", "--islands", "0,1/2", "--outer-every", "7")


def test_a_run_of_islands_learns_and_is_resumed(tmp_path: Path) -> None:
    coded = ("--outer-compression", "e3m0", "--outer-state", "host")
    done = command(["train", *ISLANDS, *coded, "--epochs", "2", "--run", "run"], tmp_path)
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
