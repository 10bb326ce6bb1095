"""Does the planner split layers over devices where that pays, and only there?

Two nets of linear layers on two workers of this machine. Of the large one with a small batch a step reads and sums
mostly weights: replicas would exchange all of them, a pipeline would leave one device idle. Of the small one with a
larger batch it is the other way round. For each, the plan of ``make_plan`` is compared with the best plan of whole
layers (``split_layers=False``), with data parallel training and with one device alone: all train in turn, several
rounds, and the fastest round counts, since other programs of the machine only make rounds slower.

    python benchmarks/split_layers.py [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from common import finish, show, spread
from torch import Tensor, nn

import onebox
from onebox.plan import Plan

LAYERS, CLASSES, STEPS = 4, 10, 5
NETS = {"large layers, batch 16": (3072, 16), "small layers, batch 256": (256, 256)}


def net(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a net of linear layers of one width, and SGD with momentum."""
    torch.manual_seed(0)
    body = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*body, nn.Linear(width, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def data(width: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return a random batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, width, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)


def timed(plan: Plan, width: int, batch: int, pool: onebox.Pool, stack: ExitStack) -> Callable[[], float]:
    """Return a function that trains some steps of a plan and returns the seconds of one."""
    model, optimizer = net(width)
    engine = onebox.Engine(trace=False, check_every=0)
    loss, given = nn.functional.cross_entropy, data(width, batch)
    trainer = stack.enter_context(onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan, engine=engine))

    def run() -> float:
        begin_s = time.perf_counter()
        for _ in range(STEPS):
            trainer.step(*given)
        trainer.wait()
        return (time.perf_counter() - begin_s) / STEPS

    run()
    return run


def compared(name: str, rounds: int) -> dict[str, float]:
    """Plan for a net, train it by each plan, print a table, and return whether it was split and what that gained."""
    width, batch = NETS[name]
    with ExitStack() as stack:
        pool = stack.enter_context(onebox.open("cpu*2", threads=1))
        model, optimizer = net(width)
        job = (model, nn.functional.cross_entropy, optimizer, *data(width, batch))
        plans = {
            "chosen": onebox.make_plan(*job, pool=pool).plan,
            "chosen of whole layers": onebox.make_plan(*job, pool=pool, split_layers=False).plan,
            "data parallel": Plan.data_parallel([0, 1], [1.0, 1.0]),
            "one device": Plan.data_parallel([0], [1.0]),
        }
        runs = {label: timed(plan, width, batch, pool, stack) for label, plan in plans.items()}
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(rounds):
            for label, run in runs.items():
                times[label].append(run())
    best = {label: min(found) for label, found in times.items()}
    rows = []
    for label, plan in plans.items():
        expected = "-" if plan.predicted is None else f"{1e3 * plan.predicted.step_s:.1f}"
        rows.append([label, plan.describe(), expected, spread([1e3 * one for one in times[label]], 1)])
    show(name, ["plan", "", "predicted ms", "ms of a step"], rows)
    return {
        "split": float(plans["chosen"].split),
        "over_whole": round(best["chosen of whole layers"] / best["chosen"], 4),
        "over_data_parallel": round(best["data parallel"] / best["chosen"], 4),
        "over_one_device": round(best["one device"] / best["chosen"], 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each plan, in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    large, small = (compared(name, options.rounds) for name in NETS)
    result = {f"large_{key}": value for key, value in large.items()} | {"small_split": small["split"]}
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
