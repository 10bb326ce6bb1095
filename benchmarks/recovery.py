"""What does the loss of a worker cost, and what do the snapshots cost that make it cheap?

A model with dropout is trained on two workers, data-parallel and as a pipeline of two stages, and a worker is killed in
the middle: seconds from the signal to the end of the next step that the loop asks for, and steps that were done again.
The share of the snapshots is measured beside, for either plan: two trainers on pools of their own, one with recovery
and one without, run the same steps in turn, and their times are compared round by round.

There are fewer rounds where four minutes are over; ``--long`` has all of them.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from common import BATCH, Budget, batches, finish, make, show, spread
from torch import nn

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage

WARM_STEPS = 12
STEPS = {"cnn": 24, "mlp": 120}
KINDS = ("data parallel", "pipeline")

LOSSES_SHARE, SNAPSHOT_SHARES, LEAST = 0.35, {"data parallel": 0.65, "pipeline": 1.0}, 3
"""Parts of the time after which no further round begins, but for the least."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--long", action="store_true", help="all rounds, however long they take")
    parser.add_argument("--model", default="cnn", choices=list(STEPS))
    options = parser.parse_args()
    logging.getLogger("onebox").setLevel(logging.ERROR)
    budget = Budget(long=options.long)
    losses = measure_losses(options.model, budget.rounds(options.rounds, LOSSES_SHARE, least=LEAST))
    costs = {
        kind: measure_snapshots(options.model, kind, budget.rounds(options.rounds, share, least=LEAST))
        for kind, share in SNAPSHOT_SHARES.items()
    }
    rows = [
        [kind, spread([s for s, _ in losses[kind]], 2), spread([float(redone) for _, redone in losses[kind]], 0)]
        for kind in KINDS
    ]
    title = f"A worker of two is killed, batch {2 * BATCH}: median (least to most)"
    show(title, ["plan", "seconds to the next step", "steps done again"], rows)
    rows = [
        [kind, spread(cost.shares, 4), f"{cost.every[0]} to {cost.every[-1]}", f"{cost.kept_bytes / 1e6:.1f} MB"]
        for kind, cost in costs.items()
    ]
    title = f"Snapshots, {STEPS[options.model]} steps a round: median (least to most)"
    show(title, ["plan", "share of the time of a step", "steps apart", "kept by a worker"], rows)
    result: dict[str, float] = {
        "data_parallel_s": round(statistics.median(s for s, _ in losses["data parallel"]), 3),
        "pipeline_s": round(statistics.median(s for s, _ in losses["pipeline"]), 3),
        "snapshot_share": round(max(statistics.median(cost.shares) for cost in costs.values()), 4),
        "data_parallel_steps_redone": statistics.median(redone for _, redone in losses["data parallel"]),
        "pipeline_steps_redone": statistics.median(redone for _, redone in losses["pipeline"]),
    }
    for kind, cost in costs.items():
        name = kind.replace(" ", "_")
        result[f"{name}_snapshot_share"] = round(statistics.median(cost.shares), 4)
        result[f"{name}_kept_bytes"] = cost.kept_bytes
        result[f"{name}_steps_apart"] = statistics.median(cost.every)
    finish(result, as_json=options.json)


def trainer(name: str, kind: str, stack: ExitStack, *, recover: bool) -> onebox.Trainer:
    """Return a trainer on two workers of its own."""
    model, optimizer = make(name)
    pool = stack.enter_context(onebox.open("cpu*2", threads=1))
    loss = nn.functional.cross_entropy
    plan = Plan.data_parallel([0, 1], [1.0, 1.0])
    if kind == "pipeline":
        names = TracedModel(capture(model, loss, batches(1, 8)[0]), backward=True).segments
        half = len(names) // 2
        stages = tuple(
            Stage(segments=own, replicas=((device,),), shares=(1.0,))
            for device, own in enumerate((names[:half], names[half:]))
        )
        plan = Plan(stages=stages, micro_batch=BATCH // 2)
    return stack.enter_context(
        onebox.Trainer(
            model,
            loss,
            optimizer,
            pool=pool,
            plan=plan,
            recovery=onebox.Recovery() if recover else None,
            engine=onebox.Engine(trace=False),
        )
    )


def run(one: onebox.Trainer, data: Sequence[Any], steps: int) -> float:
    """Run steps and return how many seconds they took."""
    begin = time.perf_counter()
    for step in range(steps):
        one.step(*data[step % len(data)])
    one.wait()
    return time.perf_counter() - begin


def measure_losses(name: str, rounds: Iterable[int]) -> dict[str, list[tuple[float, int]]]:
    """Return for each kind of plan seconds to the next step and steps done again, a pair a round."""
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}
    data = batches(8, 2 * BATCH)
    with ExitStack() as stack:
        trainers = {kind: trainer(name, kind, stack, recover=True) for kind in KINDS}
        for one in trainers.values():
            run(one, data, WARM_STEPS)
        for turn in rounds:
            for kind, one in trainers.items():
                run(one, data, 3 + 2 * turn)  # the loss comes at another distance from a snapshot each time
                running = one.step(*data[0])
                begin = time.perf_counter()
                os.kill(one.pool.process_ids[turn % 2], signal.SIGKILL)
                running.item()
                one.step(*data[1]).item()
                found[kind].append((time.perf_counter() - begin, one.recoveries[-1].redone))
                assert len(one.recoveries) == turn + 1
    return found


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What snapshots cost.

    Args:
        shares: Which share of a step's time recovery took, a figure a round.
        every: How many steps snapshots were apart, in ascending order.
        kept_bytes: What a worker kept at the end, at most: two snapshots of its own part, and of another's.
    """

    shares: list[float]
    every: list[int]
    kept_bytes: int


def measure_snapshots(name: str, kind: str, rounds: Iterable[int]) -> Cost:
    """Return what the snapshots of a kind of plan cost."""
    shares, every = [], []
    data = batches(8, 2 * BATCH)
    with ExitStack() as stack:
        plain = trainer(name, kind, stack, recover=False)
        kept = trainer(name, kind, stack, recover=True)
        for one in (plain, kept):
            run(one, data, WARM_STEPS)
        for turn in rounds:
            order = (plain, kept) if turn % 2 else (kept, plain)
            took = {one: run(one, data, STEPS[name]) for one in order}
            shares.append(took[kept] / took[plain] - 1.0)
            every.append(kept.snapshots_apart)
        return Cost(shares=shares, every=sorted(every), kept_bytes=max(one.kept_bytes for one in kept.memory()))


if __name__ == "__main__":
    main()
