"""Suites of the worker on modelled accelerators, and whether they notice each wait that is missing.

A modelled accelerator runs kernels as late as it may, in an order drawn from a seed, in memory that is poisoned until
it is written, and checks that each two accesses to the same bytes are in an order that streams, events and waits give.

``suites`` and ``schedules`` count the files of tests and their cases with each seed; ``races`` and ``deadlocks`` those
that failed so, ``unfinished`` the suites for which the time was too short, ``failures`` all; ``mutations`` are the
waits of ``tests/seeded_faults/waits.toml``, each removed in a copy of the tree, and ``mutations_missed`` those that no
test notices. ``not_reached`` are suites and mutations that were not begun.
"""

from __future__ import annotations

import argparse
import functools
import json
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import commit, machine

from tests.seeded_faults.__main__ import Copy, check
from tests.seeded_faults.table import SeededFault, seeded_faults

ROOT = Path(__file__).parents[1]
UNIT = "tests/modelled"
PROCESS = "tests/process/test_modelled.py"
RUN_S = 3000.0
"""Time limit of a suite, each of whose tests has one of its own."""

UNFINISHED = "it did not end in time"
"""The failure of a suite that its time limit has ended: none of a test's."""

_SEEDS = 4
"""Seeds of the tests."""

_TEST = re.compile(r"^(?P<file>\S+\.py)::.* (PASSED|FAILED|ERROR)\b", re.MULTILINE)
_FAILURE = re.compile(r"^(?P<words>(FAILED|ERROR) \S+\.py::.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The run of a suite or a mutation.

    Args:
        name: The suite's file or the mutation.
        cases: The suite's cases; 0 for a mutation.
        failed: A line for each case that failed, or the reason why the mutation was missed.
        seconds: The time that it took.
    """

    name: str
    cases: int
    failed: tuple[str, ...]
    seconds: float


def run_suite(path: str, seeds: int) -> list[Found]:
    """Run the tests of a file with several seeds.

    Args:
        path: The file.
        seeds: Number of seeds.

    Returns:
        What was found; at the time limit the suite has failed.
    """
    begin_s = time.monotonic()
    others = " or ".join(f"seed{seed}" for seed in range(seeds, _SEEDS))
    options = ["-v", "-rfE", "-p", "no:cacheprovider", "--timeout=120", "-k", f"not ({others})"]
    late: list[str] = []
    try:
        command = [sys.executable, "-m", "pytest", *options, path]
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False).stdout
    except subprocess.TimeoutExpired as error:
        output, late = (error.stdout or b"").decode(errors="replace"), [UNFINISHED]
    cases = sum(match["file"] == path for match in _TEST.finditer(output))
    failed = [match["words"] for match in _FAILURE.finditer(output)] + late
    failed += [] if cases or failed else [f"no tests: {output[-300:]}"]
    return [Found(name=path, cases=cases, failed=tuple(failed), seconds=round(time.monotonic() - begin_s, 1))]


def run_mutation(copies: queue.SimpleQueue[Copy], fault: SeededFault) -> list[Found]:
    """Remove a wait in a copy of the tree, and run its tests there.

    Args:
        copies: Copies that are free.
        fault: The mutation.
    """
    copy = copies.get()
    try:
        result = check(copy, fault, "long", sound=True)
    finally:
        copies.put(copy)
    missed = () if result.outcome == "caught" else (f"{result.outcome}: {result.words}",)
    return [Found(name=fault.name, cases=0, failed=missed, seconds=round(result.seconds, 1))]


def run_all(work: Sequence[Callable[[], list[Found]]], jobs: int, limit_s: float) -> Iterator[Found]:
    """Yield what was found by each piece of work that began before a time limit.

    Args:
        work: The pieces.
        jobs: Pieces at a time.
        limit_s: The limit.
    """
    ends = time.monotonic() + limit_s

    def one(run: Callable[[], list[Found]]) -> list[Found]:
        return run() if time.monotonic() < ends else []

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(one, run) for run in work]):
            for found in future.result():
                print(f"{found.name:52} {found.cases or '':4} {found.seconds:5.0f} s", *found.failed, file=sys.stderr)
                yield found


def report(suites: Sequence[str], mutations: Sequence[str], found: dict[str, Found]) -> dict[str, object]:
    """Return the figures.

    Args:
        suites: Names of all suites.
        mutations: Names of all mutations.
        found: What was found by those that were run.
    """
    failed = [line for name in suites if name in found for line in found[name].failed]
    missed = [name for name in mutations if name in found and found[name].failed]
    return {
        "suites": len(suites),
        "schedules": sum(each.cases for each in found.values()),
        "failures": len(failed),
        "races": sum("race" in line.lower() for line in failed),
        "deadlocks": sum("Timeout" in line for line in failed),
        "unfinished": sum(line == UNFINISHED for line in failed),
        "mutations": len(mutations),
        "mutations_missed": len(missed),
        "missed": missed,
        "not_reached": sum(name not in found for name in (*suites, *mutations)),
        "seconds": round(sum(each.seconds for each in found.values())),
        "machine": machine(),
        "commit": commit(),
    }


def main() -> int:
    """Run suites and mutations; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the suites, up to 3")
    parser.add_argument("--only", choices=("suites", "mutations"), help="only those")
    parser.add_argument("--jobs", type=int, default=2, help="suites or mutations that are run at a time")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="nothing more is begun after this time")
    parser.add_argument("--keep", type=Path, help="a file of results: what it has is not run again, and it gets others")
    given = parser.parse_args()
    suites = [str(path.relative_to(ROOT)) for path in sorted((ROOT / UNIT).glob("test_*.py"))] + [PROCESS]
    faults = {fault.name: fault for fault in seeded_faults("waits.toml")}
    names = [*(suites if given.only != "mutations" else ()), *(faults if given.only != "suites" else ())]
    found: dict[str, Found] = {}
    if given.keep is not None and given.keep.exists():
        lines = map(json.loads, given.keep.read_text(encoding="utf-8").splitlines())
        found = {
            each["name"]: Found(**each | {"failed": tuple(each["failed"])}) for each in lines if each["name"] in names
        }
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    with ExitStack() as stack:
        for _ in range(given.jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="waits-"))
            copies.put(Copy(Path(folder)))
        work = [functools.partial(run_suite, n, given.seeds) for n in names if n not in faults and n not in found]
        work += [functools.partial(run_mutation, copies, faults[n]) for n in names if n in faults and n not in found]
        for each in run_all(work, given.jobs, given.limit_s):
            found[each.name] = each
            if given.keep is not None:
                with given.keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(each)) + "\n")
    made = report([n for n in names if n not in faults], [n for n in names if n in faults], found)
    print(json.dumps(made) if given.json else "\n".join(f"{key:18} {value}" for key, value in made.items()))
    return 1 if made["failures"] or made["missed"] or made["not_reached"] else 0


if __name__ == "__main__":
    sys.exit(main())
