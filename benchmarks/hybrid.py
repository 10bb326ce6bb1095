"""Does a model train on a device that has a half, a third or a quarter of the memory that it takes, and at what price?

VGG-16 and ResNet-50 on pictures of 64 x 64, SGD with momentum, on a device with the CPU of its host beside it. The
device is a GPU where there is one, else a CPU worker; its budget is a part of the peak of the plain run, which keeps
all. Each plan that the planner chooses for a budget is run on a device that has no more than that (``trains``), where
its peak is counted and compared with what was predicted. Then all are timed in turn, in every round, without a budget,
which changes nothing but what is allowed:

- ``unlimited``: the plain run on the device;
- ``chosen``: what the planner found for the budget, on the device and the CPU beside it, or (``alone``) on the device
  alone, by its memory policies. Micro-batches are of 64 pictures, as in the other sides; smaller ones are allowed where
  they change nothing but the memory that a step takes, which is so without batch norm. With ``--smaller`` models that
  have it get rows of their own (``, smaller``), in which they are allowed, and which compute something else;
- the trivial policies, blind to budgets but for the last: each block recomputed; each segment offloaded, or swapped;
  and the first layers on the CPU, as few as it takes. ``ratio_to_best_trivial`` is the time over that of the quickest
  of those that fit, 1 where the plans are the same, and ``null`` where none fits;
- the rivals, in a process of their own with one thread: PyTorch, with ``torch.utils.checkpoint`` around each block, and
  with ``save_on_cpu``; see ``hybrid_rivals.py`` for what their peaks are. Nothing limits them: they are timed, and one
  looks at what they took.

The models are those of the papers; with ``--width 32`` they have half of the feature maps, and a step takes a third to
a quarter of the time. ``--rounds 0`` times nothing: it says what trains, in how much memory.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from common import Peer, finish, show, spread
from hybrid_models import DATA, WORKLOADS, workload
from hybrid_plans import Bench, Tried, same, told
from hybrid_rivals import SIDES
from pipeline_sides import Run, best, in_turn, ratios

import onebox
from onebox.errors import DataError
from onebox.plan import Plan

BUDGETS = {"1/2": Fraction(1, 2), "1/3": Fraction(1, 3), "1/4": Fraction(1, 4)}
"""Parts of the plain peak."""

PLAIN = "unlimited"
MIB = 1 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), choices=list(BUDGETS))
    parser.add_argument("--width", type=int, default=64, help="channels of the first group; 64 in the papers")
    parser.add_argument("--smaller", action="store_true", help="rows of smaller micro-batches of batch norm, too")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of CIFAR-10's archives")
    parser.add_argument("--quick", action="store_true", help="small models, random pixels: to try the benchmark out")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # what the planner measured at another time is not for today
        for name in options.models:
            try:
                result[name] = measure(name, options)
            except DataError as error:
                raise SystemExit(f"{error} Or try it without pictures: --quick") from None
    finish({**summary(result), **result}, as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the planner chose for a budget.

    Args:
        name: What it was allowed, in words.
        side: Under which name it is timed; that of a trivial policy if it is the same.
        plan: The plan; ``None`` where there is none.
        tried: How it went on a device that has no more.
    """

    name: str
    side: str
    plan: Plan | None
    tried: Tried


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a choice may be.

    Args:
        alone: Whether the device is alone.
        smaller: Whether micro-batches may be smaller than those of the other sides.
        name: What it is called, behind the budget.
    """

    alone: bool
    smaller: bool
    name: str


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compare all sides of a model; print a table and return the figures."""
    begin = time.monotonic()
    shares = {label: BUDGETS[label] for label in options.budgets}
    with ExitStack() as stack:
        bench = Bench(workload(name, width=options.width, quick=options.quick), options.device, options.data)
        more = ["--quick"] if options.quick else ["--width", str(options.width)]
        rivals = Peer(name, options.device, str(options.data), *more, script="hybrid_rivals.py")
        stack.callback(rivals.close)
        with bench.pool(alone=True) as pool:
            plain = bench.tried(pool, bench.plain())
        budgets = {label: int(plain.measured_bytes * share) for label, share in shares.items()}
        pool = stack.enter_context(bench.pool())
        plans = trivial(bench, pool, budgets)
        peaks = {side: bench.predicted(plan, pool.devices) for side, plan in plans.items()}
        choices = {
            (label, allowed): choose(bench, label, budget, plans, allowed)
            for label, budget in budgets.items()
            for allowed in ways(bench, smaller=options.smaller)
        }
        for choice in choices.values():
            if choice.plan is not None:
                plans.setdefault(choice.side, choice.plan)
                peaks.setdefault(choice.side, choice.tried.predicted_bytes)
        sides: dict[str, Run] = {side: runner(bench, pool, plan, stack) for side, plan in plans.items()}
        for rival in SIDES:
            peaks[f"torch {rival}"] = int(ask(rivals, f"{rival} peak"))
            sides[f"torch {rival}"] = lambda steps, rival=rival: ask(rivals, f"{rival} {steps}")  # type: ignore[misc]
        times = in_turn(sides, options.rounds, 1, most_s=math.inf) if options.rounds else {}
    table(name, options, bench, times, peaks, budgets, plain)
    for choice in choices.values():
        peak = f"{choice.tried.measured_bytes / MIB:.0f} MiB, " if choice.tried.trains else "does not train: "
        print(f"  {choice.name}: {'nothing fits' if choice.plan is None else peak + told(choice.plan)}")
    found: dict[str, dict[str, Any]] = {label: {} for label in budgets}
    for (label, allowed), choice in choices.items():
        figures = judged(choice, label, allowed.alone, times, peaks, budgets, plans)
        found[label] |= {allowed.name: figures} if allowed.name else figures
    error = max(off(choice.tried) for choice in choices.values())
    return {
        "width": bench.case.width,
        "plain_peak_mib": round(plain.measured_bytes / MIB, 1),
        "memory_error": round(max(error, off(plain)), 4),
        "seconds": round(time.monotonic() - begin),
        **found,
    }


# ---- sides


def trivial(bench: Bench, pool: onebox.Pool, budgets: dict[str, int]) -> dict[str, Plan]:
    """Return the plain run and the policies that need no planner."""
    found = {
        PLAIN: bench.plain(),
        "all recomputed": bench.all_recomputed(),
        "all offloaded": bench.all_offloaded(),
        "all swapped": bench.all_swapped(),
    }
    for budget in budgets.values():
        first = bench.fewest_on_cpu(budget, pool.devices)
        if first is not None:
            found[f"first {first[0]} on the CPU"] = first[1]
    return found


def ways(bench: Bench, *, smaller: bool) -> list[Allowed]:
    """Return what choices may be: smaller micro-batches where they change nothing, or, beside the others, if asked."""
    free = not bench.looks_at_batches
    found = [Allowed(alone=False, smaller=free, name=""), Allowed(alone=True, smaller=free, name="alone")]
    if smaller and not free:
        found += [replace(one, smaller=True, name=f"{one.name} smaller".strip()) for one in found]
    return found


def choose(bench: Bench, label: str, budget: int, plans: dict[str, Plan], allowed: Allowed) -> Choice:
    """Let the planner choose for a budget, and run what it chose under that budget."""
    name = ", ".join([label, *allowed.name.split()])
    with bench.pool(budget, alone=allowed.alone) as pool:
        plan = bench.chosen(pool, smaller=allowed.smaller)
    if plan is None:
        none = Tried(trains=False, predicted_bytes=0, measured_bytes=0)
        return Choice(name=name, side="", plan=None, tried=none)
    with bench.pool(budget, alone=allowed.alone) as pool:
        tried = bench.tried(pool, plan)
    known = (side for side, other in plans.items() if same(plan, other))
    return Choice(name=name, side=next(known, f"chosen {name}"), plan=plan, tried=tried)


def runner(bench: Bench, pool: onebox.Pool, plan: Plan, stack: ExitStack) -> Run:
    """Return what runs steps of a plan and says how many seconds they took."""
    trainer = stack.enter_context(bench.trainer(pool, plan))

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            trainer.step(*bench.data)
        trainer.wait()
        return time.perf_counter() - begin

    return run


def ask(peer: Peer, command: str) -> float:
    """Return what a peer answers to a command."""
    peer.start(command)
    return peer.seconds()


# ---- what came of it


def judged(
    choice: Choice,
    label: str,
    alone: bool,
    times: dict[str, list[float]],
    peaks: dict[str, int],
    budgets: dict[str, int],
    plans: dict[str, Plan],
) -> dict[str, Any]:
    """Return the figures of a budget."""
    if choice.plan is None or not times:
        bare = {"trains": choice.tried.trains, "ratio_to_unlimited": None, "ratio_to_best_trivial": None}
        return bare if choice.plan is None else {**bare, "plan": told(choice.plan)}

    def over(side: str) -> float:
        return round(statistics.median(ratios(times[choice.side], times[side])), 4)

    fits = [side for side in plans if side.startswith(("all", "first")) and peaks[side] <= budgets[label]]
    fits = [side for side in fits if not (alone and side.startswith("first"))]
    quickest = best(times, fits) if fits else None
    return {
        "trains": choice.tried.trains,
        "ratio_to_unlimited": over(PLAIN),
        "ratio_to_best_trivial": over(quickest) if quickest else None,
        "best_trivial": quickest,
        "ratio_to_recompute_all": over("all recomputed"),
        **{f"ratio_to_torch_{rival}": over(f"torch {rival}") for rival in SIDES},
        "plan": told(choice.plan),
    }


def off(tried: Tried) -> float:
    """Return by which part a predicted peak was wrong; 0 where there is nothing to compare."""
    return abs(tried.predicted_bytes / tried.measured_bytes - 1) if tried.measured_bytes else 0.0


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the targets' figures: the worst of all models and budgets."""
    budgets = [model[label] for model in result.values() for label in BUDGETS if label in model]
    every = [*budgets, *(found for budget in budgets for found in budget.values() if isinstance(found, dict))]
    known = [one["ratio_to_best_trivial"] for one in every if one["ratio_to_best_trivial"] is not None]
    return {
        "quarter_trains": all(model["1/4"]["trains"] for model in result.values() if "1/4" in model),
        "quarter_trains_alone": all(model["1/4"]["alone"]["trains"] for model in result.values() if "1/4" in model),
        "worst_ratio_to_best_trivial": max(known, default=None),
        "memory_error": max(model["memory_error"] for model in result.values()),
    }


def table(
    name: str,
    options: argparse.Namespace,
    bench: Bench,
    times: dict[str, list[float]],
    peaks: dict[str, int],
    budgets: dict[str, int],
    plain: Tried,
) -> None:
    """Print what each side took."""
    rows = []
    for side, peak_bytes in peaks.items():
        seconds = times.get(side)
        fits = [label for label, budget in budgets.items() if peak_bytes <= budget]
        rows.append(
            [
                side,
                f"{peak_bytes / MIB:.0f}",
                f"{peak_bytes / plain.measured_bytes:.2f}",
                fits[-1] if fits else "-",
                spread(seconds, 2) if seconds else "-",
                spread(ratios(seconds, times[PLAIN]), 2) if seconds else "-",
            ]
        )
    case = bench.case
    show(
        f"{name}, width {case.width}, {case.batch} pictures in micro-batches of {case.micro_batch}, on "
        f"{options.device}, one thread each: median (least to most)",
        ["side", "peak, MiB", "/ plain", "fits", "step, s", "/ unlimited"],
        rows,
    )


if __name__ == "__main__":
    main()
