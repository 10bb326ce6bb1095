"""Scripts that torchrun, accelerate, Lightning and transformers start: whether they work, and what they take.

Each case of ``tests/launchers`` is run on virtual devices and by the plain script on the CPU with as many processes, in
turn. A round is the whole command, with imports and, on virtual devices, the opening of the pool.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import finish, show, spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.launchers.cases import CASES, Case, Outcome, difference, run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases in whose titles this is")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.title]
    if not cases:
        parser.error(f"--only {options.only!r}: there is no such case; the cases are {titles()}")
    rows, found = [], []
    for case in cases:
        result = measure(case, options.rounds)
        found.append(result)
        seconds = (spread(result["seconds"]), spread(result["cpu_seconds"])) if result["works"] else ("", "")
        shown = [f"{result[name]:.3g}" if name in result else "" for name in ("loss_difference", "over_cpu")]
        rows.append([case.title, "yes" if result["works"] else result["error"], *shown, *seconds])
    show(
        "Scripts of launchers on virtual devices",
        ["case", "works", "loss difference", "over CPU", "seconds", "seconds on the CPU"],
        rows,
    )
    packages = sorted({"torch", *(package for case in cases for package in case.packages)})
    result = {
        "failed": sum(not each["works"] for each in found),
        "rows": found,
        "versions": {package: version(package) for package in packages},
    }
    finish(result, as_json=options.json)


def titles() -> str:
    """Return the titles of all cases."""
    return ", ".join(case.title for case in CASES)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Run a case on both sides in turn; return its row."""
    row: dict[str, Any] = {"case": case.title, "devices": case.devices, "works": False}
    ours: list[Outcome] = []
    plain: list[Outcome] = []
    try:
        for _ in range(rounds):
            ours.append(run(case, virtual=True))
            plain.append(run(case, virtual=False))
        row["loss_difference"] = max(difference(*each) for each in zip(ours, plain, strict=True))
    except RuntimeError as error:
        return row | {"error": str(error)[:200]}
    if row["loss_difference"] > case.tolerance:
        return row | {"error": f"losses differ by more than {case.tolerance:g}"}
    seconds, cpu_seconds = ([each.seconds for each in side] for side in (ours, plain))
    return row | {
        "works": True,
        "over_cpu": statistics.median(seconds) / statistics.median(cpu_seconds),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


if __name__ == "__main__":
    main()
