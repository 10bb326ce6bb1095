"""Run all checks of the GPUs of this machine within half an hour, and write one report.

Run it by ``make gpu``, or in any environment that has PyTorch by ``python -m tests.gpu_run``. This module and its
neighbours need nothing but Python, so that what is missing is in the report, too. Nothing stops the next check: each
has a time limit, at which all of its processes are ended. The report is written anew after each.

Exit status: 0 where all checks passed or were skipped for a reason, 1 where one failed or was not run, 130 where the
run was interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from tests.gpu_run.checks import CHECKS, SPARE_S, TEST_S, Check, Kind
from tests.gpu_run.processes import run
from tests.gpu_run.report import Report, Result, figures_of, last_lines, now, tests_of

ROOT = Path(__file__).parents[2]

DEVICE_VARIABLE = "ONEBOX_TEST_DEVICE"
"""The environment variable that gives tests in ``tests/gpu`` the kind of devices."""

_REHEARSED = 2
"""Devices of a rehearsal."""

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=get_args(Kind), default="cuda", help="cpu or model: a rehearsal without a GPU"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for all checks together")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of the checks, those whose names contain one of these"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="factor for the limits of checks and tests")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="where the report goes; under runs/ if not given")
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    options = parser.parse_args(arguments)
    chosen = [check for check in CHECKS if not options.only or any(part in check.name for part in options.only)]
    if options.list or not chosen:
        for check in chosen or CHECKS:
            print(f"{check.name:<16} {check.limit_s:>4.0f} s  {check.devices} devices  {check.reveals}")
        return 0 if chosen else 2
    if chosen[0] is not CHECKS[0]:
        chosen.insert(0, CHECKS[0])  # the machine is in every report
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, lambda *_: _interrupt())
    folder = (options.report or Path("runs", f"gpu-{now()}")).resolve()
    run_all = GpuRun(device=options.device, folder=folder, limit_s=60 * options.minutes, patience=options.patience)
    made = run_all.all(chosen)
    print(f"\n{made.text()}\n\nreport: {folder}/report.txt and report.json")
    return _INTERRUPTED if any(result.reason == "interrupted" for result in made.results) else made.status


def _interrupt() -> None:
    raise KeyboardInterrupt


@dataclass(frozen=True, kw_only=True)
class GpuRun:
    """A run of checks.

    Args:
        device: Kind of devices.
        folder: For the report and the logs; made if need be.
        limit_s: For all checks together.
        spare_s: Least time that is worth starting a check for.
        patience: Factor for the time limits of checks and tests.
    """

    device: Kind
    folder: Path
    limit_s: float
    spare_s: float = SPARE_S
    patience: float = 1.0

    def all(self, checks: Sequence[Check]) -> Report:
        """Run checks, one after the other, and return the report, which is written anew after each."""
        self.folder.mkdir(parents=True, exist_ok=True)
        begin_s = time.monotonic()
        waiting = [Result(name=check.name, reveals=check.reveals, status="waiting") for check in checks]
        report = Report(
            device=self.device, commit=commit(), begun=now(), seconds=0.0, machine={}, results=tuple(waiting)
        )
        for place, check in enumerate(checks):
            left_s = self.limit_s - (time.monotonic() - begin_s)
            try:
                report = self._written(report, place, replace(waiting[place], status="running"), begin_s)
                print(f"{check.name} …", flush=True)
                result = self._one(check, left_s, report.machine)
            except KeyboardInterrupt:
                result = replace(waiting[place], status="failed", reason="interrupted")
            if check.name == "machine" and result.figures:
                report = replace(report, machine=result.figures)
            report = self._written(report, place, result, begin_s)
            print(f"  {result.status} after {result.seconds:.1f} s {result.reason}".rstrip(), flush=True)
            if result.reason == "interrupted":
                break
        return report

    def _written(self, report: Report, place: int, result: Result, begin_s: float) -> Report:
        results = (*report.results[:place], result, *report.results[place + 1 :])
        made = replace(report, results=results, seconds=time.monotonic() - begin_s)
        made.write(self.folder)
        return made

    def _one(self, check: Check, left_s: float, machine: dict[str, Any]) -> Result:
        """Run a check, unless there is a reason not to."""
        name = check.name.replace(":", "").replace(" ", "-")
        log, listing = self.folder / f"{name}.log", self.folder / f"{name}.xml"
        blank = Result(name=check.name, reveals=check.reveals, status="skipped", log=log.name)
        limit_s = min(self.patience * check.limit_s, left_s)
        if limit_s < self.spare_s:
            return replace(blank, reason=f"the {self.limit_s / 60:.0f} minutes are over")
        if machine.get("missing"):
            return replace(blank, reason=f"packages are missing: {', '.join(machine['missing'])}")
        found = len(machine.get("devices", []))
        if self.device == "cuda" and machine and found < check.devices:
            return replace(blank, reason=f"needs {check.devices} GPUs, here are {found}")
        values = {"{device}": self.device, "{folder}": str(self.folder)}
        filled = [values.get(part, part) for part in check.command]
        filled += check.rehearsal if self.device != "cuda" else ()
        filled += [f"--timeout={self.patience * TEST_S:.0f}", f"--junitxml={listing}"] if check.tests else []
        listing.unlink(missing_ok=True)
        ending = run([sys.executable, *filled], log=log, limit_s=limit_s, folder=ROOT, environment=self._environment())
        counts, failures, skips = tests_of(listing, log) if check.tests else ({}, [], {})
        figures = None if check.tests else figures_of(log)
        made = replace(blank, seconds=ending.seconds, limit_s=limit_s, counts=counts, skips=skips, figures=figures)
        wrong = ending.problem(limit_s)
        if wrong:
            lines = last_lines(log) if ending.late or not failures else []
            return replace(made, status="failed", reason=wrong, failures=failures, last_lines=lines)
        if check.tests and not counts.get("passed"):
            return replace(made, reason="; ".join(skips) or "no test ran")
        return replace(made, status="passed")

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, DEVICE_VARIABLE: self.device, "PYTHONPATH": path}


def commit() -> str:
    """Return the commit, with a plus sign where files have changed since."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")


if __name__ == "__main__":
    sys.exit(main())
