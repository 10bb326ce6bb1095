"""Runs that lose workers or room on the disk, and go on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onebox.cli import main
from onebox.engine.state.checkpoint_files import read, saves
from onebox.plan import Plan
from onebox.pool import Fault, Pool, open_pool
from onebox.pool.backends.local import LocalSource
from tests.process.cli.commands import POOL, SLOW, WITHIN_S, metrics, read_until, running, workers_of
from tests.process.cli.conftest import SETTINGS, Run

MOUNT = ["unshare", "--user", "--map-root-user", "--mount"]
"""A file system of one's own needs a namespace of one's own."""

ROOM = "1500k"
"""Enough for one checkpoint of 920 kB and all the rest, not for two."""


def weights(save: Path) -> list[bytes]:
    return [(save / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def test_a_run_that_loses_a_worker_goes_on_and_says_what_it_cost(undisturbed: Run, tmp_path: Path) -> None:
    line = ["train", *SETTINGS, *SLOW, "--run", "run", "--every", "1", "--recover", "on", "--snapshot-every", "5"]
    with running(line, tmp_path) as process:
        read_until(process, r"step 30/69")
        workers_of(process)[0].kill()
        output, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors
    run = tmp_path / "run"
    last = "checkpoint/step-00000069"
    assert weights(run / last) == weights(undisturbed.folder / last)
    assert re.search(r"recovered once: \d+ steps done again, [\d.]+ s\n", output)
    (story,) = json.loads((run / "summary.json").read_text())["recoveries"]
    assert story["lost"] == story["replaced"]
    assert story["text"] in errors
    found = metrics(run)
    (line_of_it,) = [record for record in found if record["event"] == "recovery"]
    assert {key: line_of_it[key] for key in story} == story
    assert [record for record in found if record is not line_of_it] == metrics(undisturbed.folder)


@pytest.mark.feature("Command line: Go on when the disk is full")
def test_a_full_disk_ends_no_run_and_spares_the_checkpoint_before(undisturbed: Run, tmp_path: Path) -> None:
    allowed = subprocess.run([*MOUNT, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    if allowed is None or allowed.returncode:
        pytest.skip("a file system of its own cannot be mounted here: user namespaces are not allowed")
    onebox = f"{sys.executable} -m onebox train"
    script = f"""
        mkdir run && mount -t tmpfs -o size={ROOM} none run || exit 99
        {onebox} {" ".join(SETTINGS)} --run run
        echo "status $?"
        cp -r run full
        mount -o remount,size=64m run
        {onebox} --resume run
        echo "status $?"
        cp -r run roomy
    """
    done = subprocess.run(
        [*MOUNT, "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=2 * WITHIN_S, check=False
    )
    assert "status 1" in done.stdout, done.stderr
    first, second = done.stdout.split("status 1\n")
    assert second.endswith("status 0\n"), done.stderr
    for step in (46, 69):
        assert re.search(
            rf"no checkpoint of step {step}: .* could not be written to run/checkpoint: .*make room", first
        )
    assert "Traceback" not in done.stderr
    assert "the run has ended, but its end is not saved" in done.stderr
    assert "the last checkpoint is run/checkpoint/step-00000023; go on with: onebox train --resume run" in done.stderr
    (only,) = saves(tmp_path / "full" / "checkpoint")
    assert read(only).manifest.step == 23
    found = metrics(tmp_path / "full")
    assert [record["step"] for record in found if record["event"] == "unsaved"] == [46, 69]
    assert [record for record in found if record["event"] != "unsaved"] == metrics(undisturbed.folder)

    assert "going on from run/checkpoint/step-00000023" in second
    last = "checkpoint/step-00000069"
    assert weights(tmp_path / "roomy" / last) == weights(undisturbed.folder / last)


def test_a_run_that_is_left_with_fewer_devices_tells_of_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(*arguments: Any, **options: Any) -> Pool:
        return open_pool(*arguments, **options, faults={1: (Fault("kill", "optimizerstep", 30),)})

    monkeypatch.setattr("onebox.cli.commands.train.open_pool", opened)
    monkeypatch.setattr(LocalSource, "replace", lambda *_: None)
    run, plan = tmp_path / "run", tmp_path / "plan.json"
    plan.write_text(Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=32).to_json())
    line = ["--model", "mlp", "--epochs", "2", "--plan", str(plan), "--recover", "on", "--run", str(run), *POOL]
    assert main(["train", *line]) == 0
    assert re.search(r"recovered once: .* s; without device 1 since\n", capsys.readouterr().out)
    summary = json.loads((run / "summary.json").read_text())
    (story,) = summary["recoveries"]
    assert story["gone"] == [1]
    assert story["plan"] == summary["plan"]["text"] == "1 stage on device 0, micro-batches of 32"
    assert [device["peak_bytes"] is None for device in summary["devices"]] == [False, True]
