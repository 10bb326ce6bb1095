"""The report of a run of checks, as text and JSON, which is whole after every check."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

_TEST = re.compile(r"^\S+\.py::(?P<name>.+?) (?P<result>PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
"""The result of a test in pytest's verbose output."""

Status = Literal["passed", "failed", "skipped", "running", "waiting"]

LAST_LINES = 25
"""Lines of a log in the report; the log is beside it."""

STACK_LINES = 20
"""Innermost calls of each thread in the report."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a check.

    Args:
        name: Of the check.
        reveals: What a failure would show.
        status: ``passed``, ``failed``, ``skipped``; ``running`` or ``waiting`` where the report was written before.
        reason: Why it failed or was skipped.
        seconds: Duration.
        limit_s: Longest duration allowed.
        counts: Numbers of tests by their result.
        failures: For each failed test its name and the end of its message.
        skips: Reasons of tests that were skipped, with their number.
        last_lines: End of the output, where it failed and failures of tests do not say all.
        figures: Last JSON object of the output, where it has one.
        log: Name of the file with all output.
    """

    name: str
    reveals: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] | None = None
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a run so far.

    Args:
        device: Kind of devices.
        commit: Of the code, with a plus sign where files were changed since.
        begun: When, in UTC.
        seconds: Duration so far.
        machine: From :mod:`tests.gpu_run.machine`.
        results: In the order of the checks.
    """

    device: str
    commit: str
    begun: str
    seconds: float
    machine: dict[str, Any]
    results: Sequence[Result]

    @property
    def status(self) -> int:
        """Exit status: 0 where every check passed or had a reason to be skipped, 1 else."""
        return 0 if all(result.status in ("passed", "skipped") for result in self.results) else 1

    def write(self, folder: Path) -> None:
        """Write ``report.txt`` and ``report.json``, each whole or not at all."""
        for name, text in (("report.json", json.dumps(asdict(self), indent=1)), ("report.txt", self.text())):
            part = folder / f"{name}.part"
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, folder / name)

    def text(self) -> str:
        """Return the report for people."""
        lines = [f"onebox {self.commit} on {self.device}, {self.begun}, {self.seconds:.0f} s", *self._machine(), ""]
        width = max((len(result.name) for result in self.results), default=0)
        lines += [_line(result, width) for result in self.results]
        for result in self.results:
            if result.figures and result.name != "machine":
                lines += ["", f"== figures of {result.name}", json.dumps(result.figures, indent=1)]
        for result in self.results:
            if result.status == "failed":
                lines += ["", *_failed(result)]
        counts = [
            (kind, sum(result.status == kind for result in self.results)) for kind in ("passed", "failed", "skipped")
        ]
        rest = len(self.results) - sum(count for _, count in counts)
        told = ", ".join(f"{count} {kind}" for kind, count in counts)
        return "\n".join([*lines, "", told + (f", {rest} not run" if rest else "")])

    def _machine(self) -> list[str]:
        found = self.machine
        if not found:
            return ["machine: unknown"]
        names = ("driver", "cuda", "torch", "nccl", "cudnn", "python", "kernel", "cores")
        lines = [", ".join(f"{name} {found.get(name)}" for name in names)]
        lines += [
            f"  cuda:{index}: {gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB "
            f"({gpu['free_bytes'] / 2**30:.1f} free), capability {gpu['capability']}, peers {gpu['peers']}"
            for index, gpu in enumerate(found.get("devices", []))
        ]
        lines += [f"  {name}={value}" for name, value in found.get("variables", {}).items()]
        return [*lines, *(f"  problem: {problem}" for problem in found.get("problems", []))]


def _line(result: Result, width: int) -> str:
    told = ", ".join(f"{count} {kind}" for kind, count in result.counts.items() if count)
    why = f": {result.reason}" if result.reason else ""
    took = f"{result.seconds:6.1f} s" if result.seconds else " " * 8
    return f"{result.status:<8} {result.name:<{width}} {took}  {told}{why}".rstrip()


def _failed(result: Result) -> list[str]:
    lines = [f"== {result.name}: {result.reason}", f"   would reveal: {result.reveals}", f"   log: {result.log}"]
    for name, message in result.failures:
        lines += [f"-- {name}", *(f"   {line}" for line in message.splitlines()[-LAST_LINES:])]
    return [*lines, *(f"   {line}" for line in result.last_lines)]


def tests_of(listing: Path, log: Path) -> tuple[dict[str, int], list[tuple[str, str]], dict[str, int]]:
    """Return what pytest's listing has: numbers by result, failures with their messages, reasons of skips.

    Args:
        listing: The listing; without it, such as after the time limit, the log says which tests were over.
        log: The output.
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: list[tuple[str, str]] = []
    skips: dict[str, int] = {}
    if not listing.is_file():
        for found in _TEST.finditer(log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""):
            kind = {"PASSED": "passed", "SKIPPED": "skipped"}.get(found["result"], "failed")
            counts[kind] += 1
            failures += [(found["name"], "in the log")] * (kind == "failed")
        return (counts if any(counts.values()) else {}), failures, skips
    for case in ElementTree.parse(listing).getroot().iter("testcase"):
        wrong = [found for kind in ("failure", "error") for found in case.findall(kind)]
        left_out = case.find("skipped")
        counts["failed" if wrong else "skipped" if left_out is not None else "passed"] += 1
        failures += [(case.get("name", ""), (found.text or found.get("message") or "").strip()) for found in wrong]
        if left_out is not None:
            why = left_out.get("message", "")
            skips[why] = skips.get(why, 0) + 1
    return counts, failures, skips


def last_lines(log: Path) -> list[str]:
    """Return the end of a log; where stacks were written at the end, what came before and the beginning of each.

    The innermost call is first in a stack, and a test runner's own calls, of which there are many, are last.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    stacks = next((place for place, line in enumerate(lines) if "Fatal Python error" in line), len(lines))
    found, depth = lines[max(0, stacks - LAST_LINES) : stacks], 0
    for line in lines[stacks:]:
        depth = depth + 1 if line.startswith("  ") else 0
        if depth <= STACK_LINES and not line.startswith("Extension modules"):
            found.append(line)
    return found


def figures_of(log: Path) -> dict[str, Any] | None:
    """Return the JSON object in the last line of a log that begins with a brace."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                return None
            return found if isinstance(found, dict) else None
    return None


def now() -> str:
    """Return the time in UTC, which may be in the name of a folder."""
    return time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
