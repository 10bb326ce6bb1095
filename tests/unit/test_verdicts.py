"""The table of ``make bench``: what is measured, and how it is judged."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.kit.waiting import until

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def verdicts() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("verdicts", BENCHMARKS / "verdicts.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["verdicts"] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec.loader.exec_module(module)
    return module


def test_each_benchmark_is_there(verdicts: ModuleType) -> None:
    for name in verdicts.TARGETS:
        assert (BENCHMARKS / f"{name}.py").is_file()


@pytest.mark.parametrize(("value", "at_least", "met"), [
    (1.0, False, True), (1.01, False, False), (1.0, True, True), (0.99, True, False)
])  # fmt: skip
def test_a_bound_belongs_to_what_is_allowed(verdicts: ModuleType, value: float, at_least: bool, met: bool) -> None:
    assert verdicts.Target("x", 1.0, at_least=at_least).met(value) is met


def test_a_figure_that_did_not_come_is_not_met(verdicts: ModuleType) -> None:
    ran = verdicts.Ran(name="scaling", figures={"share_of_ceiling": 0.95}, minutes=1.0, noise=0.1)
    assert ran.rows == [
        ("share_of_ceiling", "0.95", "at least 0.93", "met"),
        ("over_ddp", "", "at least 1", "not measured"),
    ]
    ended = verdicts.Ran(name="scaling", figures={}, minutes=5.0, noise=0.1, why="did not end within 5 minutes")
    assert ended.rows == [("", "", "", "did not end within 5 minutes")]


def test_a_benchmark_that_fails_or_does_not_end_has_no_figures(
    verdicts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with a script in its place."""
    monkeypatch.setattr(verdicts, "HERE", tmp_path)
    scripts = {
        "eager": "print('{\"cnn_ratio\": 1.0}')",
        "remote": "raise SystemExit(3)",
        "memory": "print('no object')",
        "scaling": "import time; time.sleep(600)",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert verdicts.run("eager", 1.0).figures == {"cnn_ratio": 1.0}
    why = {name: verdicts.run(name, 0.02 if name == "scaling" else 1.0).why for name in ("remote", "memory", "scaling")}
    assert why == {
        "remote": "failed: status 3",
        "memory": "failed: no JSON object",
        "scaling": "did not end within 0.02 minutes",
    }


LEFT_BEHIND = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"process": %d}' % left.pid, flush=True)
left.returncode = 0
"""


def test_a_process_that_is_left_behind_does_not_keep_the_figures(
    verdicts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the output of its benchmark open, and is ended with it."""
    monkeypatch.setattr(verdicts, "HERE", tmp_path)
    (tmp_path / "eager.py").write_text(LEFT_BEHIND)
    ran = verdicts.run("eager", 1.0)
    assert not ran.why
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(ran.figures["process"]).wait(10)
        psutil.Process(ran.figures["process"])


def test_a_figure_that_is_no_number_is_not_measured(verdicts: ModuleType) -> None:
    ran = verdicts.Ran(name="memory", figures={"alexnet_saving": "nan", "vgg16_saving": None}, minutes=1.0, noise=0.1)
    assert [row[-1] for row in ran.rows] == ["not measured", "not measured"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_table_of_an_interrupted_run_has_what_was_measured(tmp_path: Path, number: int, status: int) -> None:
    for name in ("verdicts", "common"):
        shutil.copy(BENCHMARKS / f"{name}.py", tmp_path)
    (tmp_path / "memory.py").write_text('print(\'{"alexnet_saving": 0.5, "vgg16_saving": 0.4}\')')
    begun = tmp_path / "begun"
    (tmp_path / "scaling.py").write_text(
        f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
    )
    command = [sys.executable, str(tmp_path / "verdicts.py"), "--only", "memory", "scaling", "eager", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        until(lambda: running.poll() is not None or (begun.exists() and begun.read_text().endswith(".")), 120)
        assert running.poll() is None
        running.send_signal(number)
        printed = running.stdout.read()
    assert running.returncode == status
    assert json.loads(printed.splitlines()[-1])["verdicts"] == {
        "memory": {"alexnet_saving": "met", "vgg16_saving": "missed"}
    }
    assert not psutil.pid_exists(int(begun.read_text()[:-1]))


def test_no_round_but_the_least_begins_after_its_part_of_the_time(verdicts: ModuleType) -> None:
    common, now_s = sys.modules["common"], 100.0
    budget, endless = (common.Budget(long=long, clock=lambda: now_s) for long in (False, True))
    rounds, later, all_of_them = budget.rounds(6, 0.5), budget.rounds(6, 0.4), endless.rounds(6, 0.5)
    assert [next(rounds), next(rounds)] == [0, 1]
    now_s += 0.5 * common.BUDGET_S
    assert next(rounds) == 2 and not budget.spent(0.5)
    now_s += 0.1
    assert list(rounds) == [] and budget.spent(0.5) and not budget.spent(0.6)
    assert list(later) == [0, 1], "two in any case"
    assert list(all_of_them) == [*range(6)] and not endless.spent(0.5)
    assert 60 * 5 - common.BUDGET_S >= 30, "a round that has begun is finished"
