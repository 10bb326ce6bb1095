"""How much of PyTorch runs on a virtual device, and gives the same there as on the CPU?

PyTorch's own databases of operators, modules and optimizers (``torch.testing._internal``) are the trials: every sample
of every operator, forward and backward; every input of every module and optimizer. Samples are made on the CPU, copied
to the device, run on both, and compared. A trial that the CPU refuses is skipped. Operators on their own input
(``add_``), into tensors that are there (``out=``), and on inputs with gaps have shares of their own. By default every
third case is tried, an operator, module or optimizer with one element type; ``--long`` tries all.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from common import finish, show
from coverage_shards import DTYPES, KINDS, Case, Tally, names_of, run_cases

BAD = ("failed", "unsupported", "wrong", "crashed")


def cases(
    kinds: Sequence[str] = KINDS,
    dtypes: Sequence[str] = DTYPES,
    pattern: str = "*",
    *,
    seed: int = 0,
    limit: int | None = None,
    repeat: int = 1,
) -> list[Case]:
    """Return what there is to run.

    Args:
        kinds: Databases and variants, of :data:`~coverage_shards.KINDS`.
        dtypes: Element types, of :data:`~coverage_shards.DTYPES`.
        pattern: Shell pattern for the names.
        seed: Of the samples.
        limit: The most trials of a case.
        repeat: How often each trial runs on the device.
    """
    found = []
    for kind in kinds:
        used = [dtype for dtype in dtypes if dtype.startswith("float") or kind not in ("moduleinfo", "optimizerinfo")]
        found += [
            Case(kind=kind, name=name, dtype=dtype, seed=seed, limit=limit, repeat=repeat)
            for name in names_of(kind)
            if fnmatch.fnmatch(name, pattern)
            for dtype in used
        ]
    return found


def share(tallies: Sequence[Tally], kind: str) -> float | None:
    """Return which part of the trials of a kind passed; those that the CPU refuses do not count."""
    counts = _counts(tallies, kind)
    tried = sum(counts.values()) - counts["skipped"]
    return counts["passed"] / tried if tried else None


def _counts(tallies: Sequence[Tally], kind: str) -> Counter[str]:
    return Counter(outcome for tally in tallies if tally.case.kind == kind for _, outcome, _ in tally.outcomes)


def report(tallies: Sequence[Tally], seconds: float) -> dict[str, Any]:
    """Print what did not pass, and totals; return the figures."""
    rows = []
    for tally in tallies:
        if any(tally.count(outcome) for outcome in BAD):
            counts = [str(tally.count(outcome) or "") for outcome in ("passed", *BAD)]
            rows.append([f"{tally.case.kind} {tally.case.name} {tally.case.dtype}", *counts, _short(tally.message())])
    show("Trials that did not pass", ("what", "passed", *BAD, "first error"), rows)
    totals = []
    for kind in KINDS:
        counts, part = _counts(tallies, kind), share(tallies, kind)
        if part is not None:
            row = [counts[outcome] for outcome in ("passed", *BAD, "skipped")]
            totals.append([kind, *map(str, row), f"{100 * part:.2f} %"])
    show(f"All trials, {seconds:.0f} s", ("database", "passed", *BAD, "skipped", "share passed"), totals)
    result: dict[str, Any] = {}
    for kind in KINDS:
        part = share(tallies, kind)
        if part is not None:
            result[kind] = round(part, 5)
    for outcome in ("wrong", "crashed"):
        result[outcome] = sum(tally.count(outcome) for tally in tallies)
    return result


def _short(message: str, size: int = 100) -> str:
    return message if len(message) <= size else message[: size - 1] + "…"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="databases and variants")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="element types")
    parser.add_argument("--ops", default="*", metavar="GLOB", help="names of operators, modules and optimizers")
    parser.add_argument("--shard", metavar="I/N", help="every N-th case, from the I-th: 0/3; with --long 0/1")
    parser.add_argument("--long", action="store_true", help="all cases; seven minutes and more")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--limit", type=int, help="the most trials of an operator and type, chosen at random")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each trial on the device, all compared")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, each with a pool of its own")
    parser.add_argument("--pool", default="cpu", help="device of each pool; none tries the CPU against itself")
    parser.add_argument("--verbose", action="store_true", help="print each case as it ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    first, step = map(int, (options.shard or ("0/1" if options.long else "0/3")).split("/"))
    how = {"seed": options.seed, "limit": options.limit, "repeat": options.repeat}
    chosen = cases(options.kinds, options.dtypes, options.ops, **how)[first::step]

    def told(tally: Tally) -> None:
        if options.verbose:
            counts = {outcome: tally.count(outcome) for outcome in ("passed", "skipped", *BAD) if tally.count(outcome)}
            print(tally.case.kind, tally.case.name, tally.case.dtype, counts, f"{tally.seconds:.1f} s", tally.message())

    began = time.perf_counter()
    tallies = run_cases(chosen, options.pool, options.jobs, told)
    finish(report(tallies, time.perf_counter() - began), as_json=options.json)


if __name__ == "__main__":
    main()
