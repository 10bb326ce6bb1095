"""Scripts that torchrun, accelerate, Lightning and transformers start: whether they work, and what they take.

Each case of ``tests/launchers`` is run on virtual devices and by the plain script on the CPU with as many processes, in
turn. A round is the whole command, with imports and, on virtual devices, the opening of the pool.

``planned even`` and ``planned uneven`` compare planned steps with ``nn.DataParallel``, both of the ``Trainer`` of
transformers with the same model and batch, on two CPU workers of equal speed and of speeds 1 and 1/3 (emulated: a
slowed-down worker waits after each piece of work). They are compared by the median step, of which the first ones, with
captures, do not count.

By default each framework has one case, and all have one round; ``--long`` has all cases, three times.
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

from tests.launchers.cases import BIN, CASES, FOLDER, Case, Outcome, difference, result_of, run

POOLS = {"even": "cpu*2", "uneven": "cpu,cpu@0.333"}
"""Devices on which planned steps are compared with ``nn.DataParallel``."""

FIRST_STEPS = 3
"""Steps that do not count: captures, and the measuring of devices."""

TOLERANCE = 1e-4
"""Of a loss in float32 after some steps of AdamW."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, help="1; with --long 3")
    parser.add_argument("--only", default="", help="cases in whose titles this is")
    parser.add_argument("--long", action="store_true", help="all cases; half an hour")
    parser.add_argument("--steps", type=int, default=23, help="of each round of planned steps and of DataParallel")
    parser.add_argument("--width", type=int, default=256, help="of the model of these")
    options = parser.parse_args()
    if options.steps <= FIRST_STEPS:
        parser.error(f"--steps {options.steps}: the first {FIRST_STEPS} do not count; give more")
    rounds = (3 if options.long else 1) if options.rounds is None else options.rounds
    cases = [case for case in (CASES if options.long or options.only else usual()) if options.only in case.title]
    pools = [name for name in POOLS if options.only in f"planned {name}"]
    if not cases and not pools:
        parser.error(f"--only {options.only!r}: there is no such case; the cases are {titles()}")
    rows, found = [], []
    for case in cases:
        result = measure(case, rounds)
        found.append(result)
        seconds = (spread(result["seconds"]), spread(result["cpu_seconds"])) if result["works"] else ("", "")
        shown = [f"{result[name]:.3g}" if name in result else "" for name in ("loss_difference", "over_cpu")]
        rows.append([case.title, "yes" if result["works"] else result["error"], *shown, *seconds])
    if cases:
        show(
            "Scripts of launchers on virtual devices",
            ["case", "works", "loss difference", "over CPU", "seconds", "seconds on the CPU"],
            rows,
        )
    planned = {name: compare(name, rounds, options.steps, options.width) for name in pools}
    if planned:
        show(
            "Planned steps over DataParallel, both with transformers' Trainer",
            [
                "devices (emulated where uneven)",
                "works",
                "loss difference",
                "planned / DataParallel",
                "step, ms",
                "DataParallel's",
            ],
            [shown_comparison(POOLS[name], each) for name, each in planned.items()],
        )
    packages = sorted({"torch", *(package for case in cases for package in case.packages)})
    if planned:
        packages = sorted({*packages, "transformers", "accelerate"})
    result = {
        "failed": sum(not each["works"] for each in (*found, *planned.values())),
        **{f"planned_over_dataparallel_{name}": each.get("ratio") for name, each in planned.items()},
        "rows": [*found, *planned.values()],
        "versions": {package: version(package) for package in packages},
    }
    finish(result, as_json=options.json)


def usual() -> list[Case]:
    """Return a case of each framework: the first with two devices, or with one."""
    found: dict[str, Case] = {}
    for case in sorted(CASES, key=lambda case: case.devices != 2):
        found.setdefault(case.framework, case)
    return list(found.values())


def titles() -> str:
    """Return the titles of all cases."""
    return ", ".join([*(case.title for case in CASES), *(f"planned {name}" for name in POOLS)])


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


def compare(name: str, rounds: int, steps: int, width: int) -> dict[str, Any]:
    """Compare planned steps with ``nn.DataParallel`` on one kind of pool, in turn; return the row."""
    row: dict[str, Any] = {"case": f"planned {name}", "devices": 2, "works": False}
    script = [str(FOLDER / "planned_script.py"), "--steps", str(steps), "--width", str(width)]
    lines = {
        "planned": [sys.executable, *script, "--pool", POOLS[name]],
        "dataparallel": [str(BIN / "onebox"), "run", "--pool", POOLS[name], "--threads", "1", *script],
    }
    steps_s: dict[str, list[float]] = {side: [] for side in lines}
    losses: dict[str, list[float]] = {}
    try:
        for _ in range(rounds):
            for side, line in lines.items():
                found = result_of(f"planned {name}: {side}", line, {})
                steps_s[side].append(statistics.median(found["steps_s"][FIRST_STEPS - 1 :]))
                losses[side] = found["losses"]
    except RuntimeError as error:
        return row | {"error": str(error)[:200]}
    row["loss_difference"] = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if row["loss_difference"] > TOLERANCE:
        return row | {"error": f"losses differ by more than {TOLERANCE:g}"}
    ratios = [ours / theirs for ours, theirs in zip(*steps_s.values(), strict=True)]
    return row | {"works": True, "ratio": statistics.median(ratios), "ratios": ratios, "steps_s": steps_s}


def shown_comparison(pool: str, row: dict[str, Any]) -> list[str]:
    """Return a comparison as a row of a table."""
    if not row["works"]:
        return [pool, row["error"], *[""] * 4]
    times = [spread([1e3 * step_s for step_s in side], 0) for side in row["steps_s"].values()]
    return [pool, "yes", f"{row['loss_difference']:.2g}", spread(row["ratios"]), *times]


if __name__ == "__main__":
    main()
