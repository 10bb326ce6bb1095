"""Commands run as a person runs them: as processes, with their output and what they leave running."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.kit import warm

POOL = ("--pool", "cpu*2", "--threads", "1")
SLOW = ("--pool", "cpu@0.1,cpu@0.1")
"""Whoever reads what such a run says has seconds until it is over; it computes the same bits."""

WITHIN_S = 120.0


def command(
    arguments: Sequence[str], folder: Path, *, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``onebox`` to its end."""
    line = [sys.executable, "-m", "onebox", *arguments]
    return warm.run(line, cwd=folder, env=environment or warm.single(), text=True, timeout=WITHIN_S)


@contextlib.contextmanager
def running(arguments: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start ``onebox``; whatever happens, it is gone afterwards."""
    line = [sys.executable, "-m", "onebox", *arguments]
    pipe = subprocess.PIPE
    with warm.Popen(line, cwd=folder, env=warm.single(), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> tuple[str, ...]:
    """Read a command's output up to a line; return the groups of the pattern in it."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found.groups()
    raise AssertionError(f"the command ended before it said {pattern!r}: {process.communicate()}")


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the workers that a command has started, in their order."""
    found = psutil.Process(process.pid).children(recursive=True)
    return [each for each in found if each.name() == "onebox-worker"]


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """Check that processes end."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    end_s = time.monotonic() + 30
    while alive and time.monotonic() < end_s:  # an orphan that nobody has waited for yet
        alive = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    assert not alive


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without what depends on the clock."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in ("samples_per_s", "time")}
        for record in records
        if record["event"] not in ("begin", "feed", "account")
    ]
