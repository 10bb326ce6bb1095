"""Suites of the worker on modelled accelerators, and whether they notice each wait that is missing.

A modelled accelerator runs kernels as late as it may, in an order drawn from a seed, in memory that is poisoned until
it is written, and checks that each two accesses to the same bytes are in an order that streams, events and waits give.

``suites`` and ``schedules`` count the files of tests and their cases with each seed; ``races`` and ``deadlocks`` those
that failed so, ``failures`` all; ``mutations`` are the waits of ``tests/seeded_faults/waits.toml``, each removed in a
copy of the tree, and ``mutations_missed`` those that no test notices.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.seeded_faults.__main__ import Copy, check
from tests.seeded_faults.table import seeded_faults

ROOT = Path(__file__).parents[1]
UNIT = "tests/modelled"
PROCESS = "tests/process/test_modelled.py"
RUN_S = 900.0
"""Time limit of a suite."""

_TEST = re.compile(r"^(PASSED|FAILED|ERROR) (?P<name>\S+)(?P<words>.*)$", re.MULTILINE)


def run_suite(path: str, seeds: int) -> tuple[int, list[str]]:
    """Run the tests of a file with several seeds.

    Args:
        path: The file.
        seeds: Number of seeds.

    Returns:
        The number of cases, and a line for each that failed.
    """
    chosen = " or ".join(f"seed{seed}" for seed in range(seeds))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--timeout=120",
        "-k",
        chosen,
        path,
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    except subprocess.TimeoutExpired:
        return 1, [f"{path} did not end: Timeout"]
    tests = list(_TEST.finditer(done.stdout))
    failed = sorted({test["name"] + test["words"] for test in tests if test[1] != "PASSED"})
    if done.returncode not in (0, 1) or not tests:
        failed.append(f"{path} could not be run: {done.stdout[-300:]}")
    return len({test["name"] for test in tests}), failed


def run_mutations(only: Sequence[str]) -> tuple[int, list[str]]:
    """Remove each wait in a copy of the tree; return how many there are, and those that were not noticed."""
    faults = [each for each in seeded_faults("waits.toml") if not only or any(name in each.name for name in only)]
    missed = []
    with tempfile.TemporaryDirectory(prefix="waits-") as folder:
        copy = Copy(Path(folder))
        for fault in faults:
            result = check(copy, fault, "long", sound=True)
            print(f"{fault.name:36} {result.outcome:14} {result.seconds:4.0f} s  {result.words}"[:180], file=sys.stderr)
            missed += [fault.name] * (result.outcome != "caught")
    return len(faults), missed


def main() -> int:
    """Run suites and mutations; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the suites, up to 3")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="only mutations whose name has this"
    )
    given = parser.parse_args()
    begin_s = time.monotonic()
    suites = [str(path.relative_to(ROOT)) for path in sorted((ROOT / UNIT).glob("test_*.py"))] + [PROCESS]
    schedules, failed = 0, []
    for suite in suites:
        count, lines = run_suite(suite, given.seeds)
        schedules += count
        failed += lines
        print(f"{suite:64} {count:4} cases  {len(lines):3} failed", file=sys.stderr)
    mutations, missed = run_mutations(given.only)
    found = {
        "suites": len(suites),
        "schedules": schedules,
        "failures": len(failed),
        "races": sum("race" in line for line in failed),
        "deadlocks": sum("Timeout" in line for line in failed),
        "mutations": mutations,
        "mutations_missed": len(missed),
        "missed": missed,
        "seconds": round(time.monotonic() - begin_s),
    }
    for line in failed:
        print(line, file=sys.stderr)
    print(json.dumps(found) if given.json else "\n".join(f"{key:18} {value}" for key, value in found.items()))
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
