"""Options that have no file of their own: another optimizer, a run that adapts, plans within limits, a page opened."""

from __future__ import annotations

import json
import re
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.kit import warm
from tests.kit.waiting import until
from tests.process.cli.commands import POOL, WITHIN_S, command, read_until
from tests.process.cli.conftest import Run

DIGITS = ("--data", "digits", "--model", "mlp", *POOL)


def trained(folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the summary of a run of one epoch."""
    done = command(["train", *DIGITS, "--epochs", "1", "--run", "run", *options], folder)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads((folder / "run" / name).read_text()) for name in ("config.json", "summary.json"))  # type: ignore[return-value]


@pytest.mark.feature("Command line: Train matrices with Muon and the rest with AdamW")
def test_muon(tmp_path: Path) -> None:
    config, summary = trained(tmp_path, "--optimizer", "muon")
    assert (config["optimizer"], config["lr"]) == ("muon", 1e-3)
    assert summary["test_accuracy"] > 0.2  # a tenth is guessed


@pytest.mark.feature("Command line: Let a run adapt its plan")
def test_a_run_that_adapts(tmp_path: Path) -> None:
    config, summary = trained(tmp_path, "--adaptive")
    assert config["adaptive"] is True
    assert summary["test_accuracy"] > 0.2


def planned(folder: Path, *options: str) -> dict[str, Any]:
    """Return what the command prints as JSON."""
    line = ["plan", "--data", "digits", "--model", "cnn", "--batch", "256", *POOL, "--budget", "1", "--json"]
    done = command([*line, *options], folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.feature("Command line: Plan with the policies that are allowed")
def test_policies_that_are_allowed(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--policies", "keep,recompute", "--memory", "3MB")["plan"]
    assert {stage.get("policy", "keep") for stage in plan["stages"]} <= {"keep", "recompute"}
    done = command(["plan", *DIGITS, "--policies", "keep,forget"], tmp_path)
    assert done.returncode == 2
    assert "forget" in done.stderr and "recompute" in done.stderr


@pytest.mark.feature("Command line: Plan where the optimizer's state is kept")
def test_where_the_state_is_kept(tmp_path: Path) -> None:
    assert planned(tmp_path, "--update", "host")["plan"]["update"] == "host"
    either = planned(tmp_path, "--update", "auto", "--preparing", "1.5")["plan"]
    assert either.get("update", "device") in ("device", "host")


OPENER = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"


@pytest.mark.feature("Command line: Open the page in a browser")
def test_the_page_is_opened(undisturbed: Run, tmp_path: Path) -> None:
    opener = tmp_path / "opener.py"
    opener.write_text(OPENER)
    environment = {**warm.single(), "BROWSER": f"{sys.executable} {opener} {tmp_path / 'opened'} %s"}
    line = [sys.executable, "-m", "onebox", "watch", str(undisturbed.folder), "--open"]
    with warm.Popen(line, cwd=tmp_path, env=environment, stdout=-1, stderr=-1, text=True) as watching:
        try:
            (address,) = read_until(watching, r"(http://\S+)")
            opened = until(lambda: (tmp_path / "opened").exists() and (tmp_path / "opened").read_text())
            leads = Path(urllib.request.url2pathname(opened.removeprefix("file://")))
            assert f"url={address}" in leads.read_text()
            assert leads.parent.stat().st_mode & 0o077 == 0  # other users see a browser's command line
            with urllib.request.urlopen(address, timeout=WITHIN_S) as page:
                assert re.search("<title>.*onebox", page.read().decode())
            watching.send_signal(signal.SIGINT)
            assert watching.wait(WITHIN_S) == 0
            assert not leads.exists()
        finally:
            watching.kill()
