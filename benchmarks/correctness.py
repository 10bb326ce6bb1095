"""Does a script written against PyTorch compute the same with a trainer, and on a virtual device?

The scripts are those of ``tests/process/plain``. Each runs as plain PyTorch on the CPU in float64 and both other ways;
all losses, parameters and buffers are compared. An outcome is equal, refused with an error that helps, or warned of.
Nothing else is right: another result without a word is silent, an error that names no line and no remedy, or speaks of
PyTorch's insides, is unhelpful.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

from common import commit, finish, machine, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.kit.pools import Pools
from tests.process.plain.case import CASES, WAYS, Case, Outcome, run_case

THEMES = (
    "autograd",
    "checks",
    "inputs",
    "layers",
    "layouts",
    "left_out",
    "losses",
    "optimizers",
    "readers",
    "state",
)
KINDS = ("equal", "refused", "warned", "silent", "unhelpful")


def load() -> list[Case]:
    """Return the cases of all themes."""
    for theme in THEMES:
        importlib.import_module(f"tests.process.plain.test_{theme}")
    return CASES


def run(cases: list[Case], *, verbose: bool) -> list[tuple[Case, str, Outcome]]:
    """Return the outcome of each case and way."""
    shelf, found = Pools(), []
    try:
        for case in sorted(cases, key=lambda case: case.devices):
            for way in case.expected:
                outcome = run_case(case, way, shelf)
                found.append((case, way, outcome))
                if verbose:
                    print(f"{way:8} {case.name}: {outcome.kind} {outcome.said}", flush=True)
    finally:
        shelf.close()
    return found


def report(found: list[tuple[Case, str, Outcome]], seconds: float) -> dict[str, object]:
    """Print what is not right, and totals; return the figures."""
    wrong = [
        [case.name, way, outcome.kind, "/".join(case.expected[way].kinds), f"{outcome.difference:.1e}", said(outcome)]
        for case, way, outcome in found
        if not outcome.meets(case.expected[way])
    ]
    if wrong:
        columns = ("case", "way", "outcome", "expected", "difference", "where, or the message")
        show("Cases that do not do what is expected of them", columns, wrong)
    counts = {way: Counter(outcome.kind for _, each, outcome in found if each == way) for way in WAYS}
    rows = [[way, *(str(counts[way][kind]) for kind in KINDS), str(counts[way].total())] for way in WAYS]
    show(f"Scripts against plain PyTorch, {seconds:.0f} s", ("way", *KINDS, "all"), rows)
    total = sum(counts.values(), Counter())
    return {
        "cases": len(found),
        **{kind: total[kind] for kind in KINDS},
        "unexpected": len(wrong),
        "scripts": len({case.name for case, _, _ in found}),
        "machine": machine(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def said(outcome: Outcome, size: int = 60) -> str:
    """Return the beginning of what an outcome says."""
    text = " ".join(outcome.said.split())
    return text if len(text) <= size else text[: size - 1] + "…"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="*", metavar="GLOB", help="names of cases")
    parser.add_argument("--verbose", action="store_true", help="print each outcome as it is known")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    chosen = [case for case in load() if fnmatch.fnmatch(case.name, options.cases)]
    began = time.perf_counter()
    found = run(chosen, verbose=options.verbose)
    finish(report(found, time.perf_counter() - began), as_json=options.json)


if __name__ == "__main__":
    main()
