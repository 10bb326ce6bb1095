"""``onebox memory``: yes or no by its exit status, where the peak is, and what would make it fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onebox.cli import main
from onebox.plan import Plan

JOB = ("--model", "mlp", "--data", "digits", "--pool", "cpu", "--threads", "1")


@pytest.mark.long
def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *JOB, "--memory", "2MiB"]) == 0
    said = capsys.readouterr().out
    assert "mlp, batch 64, adamw: 1 stage on device 0, one micro-batch each" in said
    assert "it fits" in said
    assert "at the peak of device 0, in backward 0, aten." in said
    for sort in ("optimizer state", "parameters", "gradients", "activations"):
        assert sort in said
    assert "largest batch: " in said and "does not" in said
    assert "what would make it fit" not in said


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    speeds = ("--gflops", "20", "--bandwidth", "5")
    files = ("--out", str(tmp_path / "plan.json"), "--json")
    assert main(["memory", *JOB, "--batch", "256", "--memory", "1400KiB", *speeds, *files]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["fits"]
    assert report["batch"] == 256
    (device,) = report["devices"]
    assert device["peak_bytes"] > device["budget_bytes"] == 1400 * 1024
    assert sum(device["sorts"].values()) == device["peak_bytes"]
    assert report["largest_batch"] < 256 and report["too_large_batch"] == report["largest_batch"] + 1
    assert report["times"] == "estimated for 20 GFLOP/s and 5 GB/s, as was said"
    best = report["ways"][0]
    assert best["fits"] and best["peak_bytes"]["0"] <= device["budget_bytes"] and not best["rejection_reason"]
    assert Plan.read(tmp_path / "plan.json").describe() == best["text"]


def test_what_is_wrong_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["memory", *JOB[:4], "--pool", "lab1"]) == 2
    assert "would have to be asked" in capsys.readouterr().err
    assert main(["memory", *JOB, "--memory", "much"]) == 2
    assert main(["memory", *JOB, "--plan", str(tmp_path / "none.json")]) == 2
    assert main(["memory", *JOB, "--report", str(tmp_path / "no" / "report.json")]) == 2
