"""``python -m tests.gpu_run`` is rehearsed on CPU workers: failures, hangs and interruptions are in its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import test_two_gpus
from tests.gpu_run.__main__ import GpuRun
from tests.gpu_run.checks import CHECKS, TEST_S, Check, suite
from tests.gpu_run.report import Report, Result
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parents[2]

_FAILING = """
def test_holds(): pass

def test_does_not_hold():
    assert 1 + 1 == 3, "on purpose"
"""

_HANGING = """
import subprocess, sys, time
print("before", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def script(name: str, text: str, *, limit_s: float = 60.0, devices: int = 1) -> Check:
    return Check(name=name, reveals="what is said here", command=("-c", text), limit_s=limit_s, devices=devices)


def result(report: Report, name: str) -> Result:
    return next(found for found in report.results if found.name == name)


def written(folder: Path) -> dict[str, Any]:
    """Return the report that was written, by the names of the checks."""
    found = json.loads((folder / "report.json").read_text())
    assert [each["name"] for each in found["results"]]
    return {each["name"]: each for each in found["results"]}


def test_whatever_fails_the_next_check_runs(tmp_path: Path) -> None:
    checks = [
        script("fails", "import sys; print('last words'); sys.exit(3)"),
        script("crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        script("leaves a process", "import subprocess; subprocess.Popen(['sleep', '600'])"),
        script("passes", "print('{\"figure\": 1}')"),
    ]
    report = GpuRun(device="cpu", folder=tmp_path, limit_s=120).all(checks)
    assert report.status == 1
    found = written(tmp_path)
    assert [each["status"] for each in found.values()] == ["failed", "failed", "failed", "passed"]
    assert found["fails"]["reason"] == "exit status 3"
    assert found["fails"]["last_lines"] == ["last words"]
    assert found["crashes"]["reason"] == "signal 11"
    assert found["leaves a process"]["reason"] == "1 processes were left and have been ended"
    assert found["passes"]["figures"] == {"figure": 1}
    text = (tmp_path / "report.txt").read_text()
    assert "1 passed, 3 failed, 0 skipped" in text
    assert "last words" in text


def test_a_check_that_hangs_ends_with_all_its_processes_and_says_where_it_was(tmp_path: Path) -> None:
    checks = [script("hangs", _HANGING, limit_s=2), script("passes", "")]
    report = GpuRun(device="cpu", folder=tmp_path, limit_s=120, spare_s=1).all(checks)
    hung = result(report, "hangs")
    assert hung.status == "failed"
    assert hung.reason == "not over after 2 s; its processes were ended"
    assert any("most recent call first" in line for line in hung.last_lines), "the stack"
    child = next(int(line.split()[1]) for line in hung.last_lines if line.startswith("child "))
    assert not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text()
    assert result(report, "passes").status == "passed"


def test_what_does_not_fit_the_time_or_the_machine_is_skipped(tmp_path: Path) -> None:
    gpu = {"name": "one", "memory_bytes": 1 << 30, "free_bytes": 1 << 30, "capability": "9.0", "peers": []}
    machine = script("machine", f"print({json.dumps({'devices': [gpu]})!r})")
    two = script("needs two", "", devices=2)
    report = GpuRun(device="cuda", folder=tmp_path, limit_s=120).all([machine, two, script("one", "")])
    assert result(report, "needs two").reason == "needs 2 GPUs, here are 1"
    assert result(report, "one").status == "passed"
    late = GpuRun(device="cpu", folder=tmp_path, limit_s=5).all([script("late", "")])
    assert result(late, "late").status == "skipped"
    assert result(late, "late").reason == "the 0 minutes are over"


def test_tests_that_fail_are_named_and_those_that_all_skip_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(_FAILING)
    (tmp_path / "test_skipping.py").write_text("import pytest\ndef test_it(): pytest.skip('no such thing')\n")
    checks = [
        suite("failing", "", str(tmp_path / "test_failing.py"), limit_s=60),
        suite("skipping", "", str(tmp_path / "test_skipping.py"), limit_s=60),
        suite("none", "", str(tmp_path / "test_failing.py"), "-k", "nothing", limit_s=60),
    ]
    report = GpuRun(device="cpu", folder=tmp_path, limit_s=120).all(checks)
    failing, skipping, none = report.results
    assert failing.counts == {"passed": 1, "failed": 1, "skipped": 0}
    ((name, message),) = failing.failures
    assert name == "test_does_not_hold"
    assert "on purpose" in message
    assert (skipping.status, skipping.reason) == ("skipped", "no such thing")
    assert (none.status, none.reason) == ("failed", "exit status 5")


_THEN_HANGING = (
    _FAILING
    + """
def test_hangs():
    import time
    time.sleep(600)
"""
)


def test_tests_that_were_over_before_the_time_limit_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(_THEN_HANGING)
    check = suite("hanging", "", str(tmp_path / "test_hanging.py"), limit_s=20)
    report = GpuRun(device="cpu", folder=tmp_path, limit_s=120).all([check])
    (hung,) = report.results
    assert hung.reason == "not over after 20 s; its processes were ended"
    assert hung.counts == {"passed": 1, "failed": 1, "skipped": 0}
    assert [name for name, _ in hung.failures] == ["test_does_not_hold"]
    assert "in test_hangs" in report.text(), "the stack of the one that hangs"


def test_an_interrupted_run_has_a_report(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "tests.gpu_run", "--device", "cpu", "--only", "open", "--report", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        report = tmp_path / "report.json"
        until(lambda: bool(report.is_file() and written(tmp_path)["machine"]["status"] == "running"))
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert written(tmp_path)["machine"]["reason"] == "interrupted"
    assert written(tmp_path)["open"]["status"] == "waiting"
    assert "1 not run" in output


def test_every_file_of_the_tests_of_gpus_is_in_a_check() -> None:
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    named = {part for check in CHECKS for part in check.command if part.startswith("tests/gpu/")}
    assert named == files
    assert sum(check.limit_s for check in CHECKS if check.devices == 1) <= 45 * 60
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(
    ("name", "test", "lasts_s"),
    [
        ("two: idle", test_two_gpus.test_an_idle_minute, test_two_gpus.IDLE_S),
        ("two: peer killed", test_two_gpus.test_a_run_goes_on_after_a_killed_peer, 2 * test_two_gpus.NOTICED_S),
    ],
)
def test_tests_that_wait_long_are_within_the_time_limits(name: str, test: Any, lasts_s: float) -> None:
    (mark,) = [mark for mark in test.pytestmark if mark.name == "timeout"]
    (check,) = [check for check in CHECKS if check.name == name]
    assert lasts_s + TEST_S <= mark.args[0] < check.limit_s


def rehearsed(*names: str) -> list[Check]:
    """Return checks of these names with more time: CPUs take longer, and run other tests meanwhile."""
    return [replace(check, limit_s=3 * check.limit_s) for check in CHECKS if check.name in names]


REHEARSED = ["open", "clocks", "bad label", "numerics", "one GPU twice", "two: skips"]
"""Some of each kind; ``python -m tests.gpu_run --device cpu`` rehearses all, for a quarter of an hour."""


@pytest.mark.soak
@pytest.mark.feature("GPUs: Check a machine and get a report")
def test_checks_pass_on_cpu_workers_beside_one_that_fails_and_one_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(_FAILING)
    own = rehearsed(CHECKS[0].name, *REHEARSED)
    failing = suite("failing", "", str(tmp_path / "test_failing.py"), limit_s=60)
    checks = [own[0], failing, script("hangs", _HANGING, limit_s=11), *own[1:]]
    report = GpuRun(device="cpu", folder=tmp_path, limit_s=540).all(checks)
    statuses = {found.name: found.status for found in report.results}
    assert statuses.pop("failing") == statuses.pop("hangs") == "failed"
    assert set(statuses.values()) == {"passed"}, report.text()
    assert report.machine["torch"]
    assert report.machine["confinement"]
    assert all(found.counts["passed"] for found in report.results if found.counts)


@pytest.mark.soak
def test_steps_are_timed_on_a_cpu_worker(tmp_path: Path) -> None:
    report = GpuRun(device="cpu", folder=tmp_path, limit_s=590).all(rehearsed("steps"))
    (found,) = report.results
    assert found.status == "passed", report.text()
    assert found.figures is not None
    assert found.figures["remote_over_eager"] > 0
    for model in ("resnet50_bf16", "resnet50_fp32", "gpt2_bf16", "gpt2_fp32"):
        assert found.figures[model]["rounds"] == 2
        assert {"eager_ms", "remote_ms", "compile_ms", "remote_over_eager"} <= found.figures[model].keys()
        for side in ("eager", "remote", "compile"):
            assert json.loads((tmp_path / f"{model}_{side}.json").read_text())["traceEvents"]
