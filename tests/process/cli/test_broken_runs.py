"""Runs that are killed, interrupted or fail: what they say, what they leave, and how they go on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from onebox.cli import main
from onebox.engine.state.checkpoint_files import read, saves
from tests.kit.waiting import until
from tests.process.cli.commands import (
    POOL,
    SLOW,
    WITHIN_S,
    assert_gone,
    command,
    metrics,
    read_until,
    running,
    workers_of,
)
from tests.process.cli.conftest import SETTINGS, Run

ENDLESS = ("--model", "mlp", "--epochs", "100000", "--every", "1", *POOL)


def write_pictures(folder: Path) -> None:
    """Write pictures of two classes; one is broken."""
    for number in range(40):
        path = folder / ("zeros", "ones")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (200 * (number % 2), number, 0)).save(path)
    (folder / "zeros" / "2.png").write_bytes(b"no picture")


def end(process: subprocess.Popen[str]) -> str:
    """Wait for a command to end and return what it said on standard error."""
    _, said = process.communicate(timeout=WITHIN_S)
    return said


@pytest.mark.feature("Command line: Resume a run")
@pytest.mark.feature("Checkpoints: Save every so many steps, or so often")
def test_a_killed_run_goes_on_and_ends_with_the_same_bits(undisturbed: Run, tmp_path: Path) -> None:
    line = ["train", *SETTINGS, *SLOW, "--run", "run", "--save-every", "7", "--every", "1"]
    with running(line, tmp_path) as process:
        read_until(process, r"step 30/69")
        workers = workers_of(process)
        process.kill()
    assert len(workers) == 2
    assert_gone(workers)
    killed_at = read(tmp_path / "run" / "checkpoint").manifest.step
    assert 21 <= killed_at < 69

    done = command(["train", "--resume", "run", *POOL], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"going on from run/checkpoint/step-{killed_at:08d}" in done.stdout
    ours, theirs = (folder / "checkpoint" / "step-00000069" for folder in (tmp_path / "run", undisturbed.folder))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert metrics(tmp_path / "run") == metrics(undisturbed.folder)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(
    undisturbed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed.folder, run, ignore=shutil.ignore_patterns("step-*", "summary.json"))
    assert main(["train", "--resume", str(run), "--epochs", "1"]) == 0
    assert "has no checkpoint yet" in capsys.readouterr().out
    assert metrics(run) == metrics(undisturbed.folder)[:24]


def test_an_interrupt_is_one_line_and_leaves_nothing_running(tmp_path: Path) -> None:
    """Here of a run that reads its pictures as it goes, one of which is broken."""
    write_pictures(tmp_path / "pictures")
    data = ("--data", "folder:pictures", "--batch", "8", "--on-error", "skip", "--read", "2", "--process", "2")
    with running(["train", *ENDLESS, *data, "--run", "run"], tmp_path) as process:
        read_until(process, r"1 left out: sample \d+ \(.*/zeros/2\.png\) failed in decode: ")
        read_until(process, r"epoch 2/")
        workers = workers_of(process)
        process.send_signal(signal.SIGINT)
        said = end(process)
    assert process.returncode == 130
    assert_gone(workers)
    newest = saves(tmp_path / "run" / "checkpoint")[0].relative_to(tmp_path)
    step = read(tmp_path / newest).manifest.step
    assert said == (
        f"onebox: interrupted after step {step}; the last checkpoint is {newest}; go on with: "
        "onebox train --resume run\n"
    )


@pytest.mark.feature("Checkpoints: Stop on a signal with a save")
def test_a_run_that_is_told_to_end_saves_where_it_is_and_goes_on_with_the_same_bits(
    undisturbed: Run, tmp_path: Path
) -> None:
    """All of its processes get the signal, as from schedulers; in the middle of an epoch, or of a test."""
    line = ["train", *SETTINGS, *SLOW, "--run", "run", "--every", "1"]
    steps = []
    for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)):
        with running(line, tmp_path) as process:
            read_until(process, rf"step {max(steps, default=0) + 4}/69")
            workers = workers_of(process)
            for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                each.send_signal(number)
            said = end(process)
        assert process.returncode == status, said
        assert_gone(workers)
        newest = saves(tmp_path / "run" / "checkpoint")[0].relative_to(tmp_path)
        steps.append(read(tmp_path / newest).manifest.step)
        what = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
        assert said == (
            f"onebox: {what} after step {steps[-1]}; the last checkpoint is {newest}; go on with: "
            "onebox train --resume run\n"
        )
        line = ["train", "--resume", "run", "--every", "1"]
    assert steps == sorted(set(steps)) and steps[-1] < 69
    done = command([*line, *POOL], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"going on from run/checkpoint/step-{steps[-1]:08d}" in done.stdout
    ours, theirs = (folder / "checkpoint" / "step-00000069" for folder in (tmp_path / "run", undisturbed.folder))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert metrics(tmp_path / "run") == metrics(undisturbed.folder)


@pytest.mark.parametrize("how", ["no time", "second Ctrl-C", "time is over"])
def test_a_run_that_is_to_end_at_once_saves_nothing(tmp_path: Path, how: str) -> None:
    within = {"no time": ["--stop-within", "0"], "time is over": ["--stop-within", "1"]}.get(how, [])
    with running(["train", *ENDLESS, "--run", "run", *within], tmp_path) as process:
        read_until(process, r"epoch 2/.* step")
        until(lambda: saves(tmp_path / "run" / "checkpoint"))  # which is written beside the steps
        workers = workers_of(process)
        if how != "no time":
            for worker in workers:
                worker.suspend()  # no step ends any more
        process.send_signal(signal.SIGINT)
        if how == "second Ctrl-C":
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        said = end(process)
    assert process.returncode == 130
    assert_gone(workers)
    late = ", and nothing could be saved within 1 s" if how == "time is over" else ""
    newest = saves(tmp_path / "run" / "checkpoint")[0].relative_to(tmp_path)
    assert said == (
        f"onebox: interrupted{late}; the last checkpoint is {newest}; go on with: onebox train --resume run\n"
    )
    read(tmp_path / newest)


def test_an_interrupt_while_the_workers_start(tmp_path: Path) -> None:
    with running(["train", *ENDLESS], tmp_path) as process:
        workers = []
        while process.poll() is None and len(workers) < 2:
            workers = workers_of(process)
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, said) == (130, "onebox: interrupted\n")
    assert_gone(workers)
    left = [*(tmp_path / "runs").iterdir()]
    assert shown or not left  # the devices are shown once the workers are there, which the signal may come after
    assert all((begun / "config.json").is_file() for begun in left)


def test_a_worker_that_dies_is_one_message_and_the_checkpoint_is_whole(tmp_path: Path) -> None:
    with running(["train", *ENDLESS, "--run", "run"], tmp_path) as process:
        read_until(process, r"epoch 2/")
        until(lambda: saves(tmp_path / "run" / "checkpoint"))  # which is written beside the steps
        workers = workers_of(process)
        workers[0].kill()
        said = end(process)
    assert process.returncode == 1
    assert_gone(workers)
    newest = saves(tmp_path / "run" / "checkpoint")[0].relative_to(tmp_path)
    assert "signal 9" in said and "Traceback" not in said
    assert f"the last checkpoint is {newest}; go on with: onebox train --resume run" in said
    read(tmp_path / newest)


def test_a_reader_that_goes_away_ends_the_run_quietly(tmp_path: Path) -> None:
    with running(["train", *ENDLESS, "--run", "run"], tmp_path) as process:
        read_until(process, r"step 3/")
        workers = workers_of(process)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait(timeout=WITHIN_S)
    assert (process.returncode, said) == (141, "")
    assert_gone(workers)
