"""Does a run that is hit by 200 faults at random moments end with the parameters of an undisturbed one?

A small model with dropout is trained for 2,000 steps on three workers of this machine, once undisturbed, then with
workers killed or stopped at moments drawn from a seed; data-parallel and as a pipeline. Both runs must end with the
same bits. The seed is printed first; with ``--seed`` the same faults are drawn again. Killed and stopped are the
workers that the pool has at that moment, while a step is under way; one that is hit while it starts counts, too.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import torch
from common import finish, show
from torch import Tensor, nn

import onebox
from onebox.graph import TracedModel, capture
from onebox.plan import Plan, Stage

WORKERS = 3
MICRO_BATCH = 4
SAMPLES = 12
LATE_S = 0.01
"""A fault comes up to so long after a step has been begun: a step takes about as long."""

Faults = dict[int, list[tuple[int, signal.Signals, float]]]
"""From a step to who is hit in it, by what, and how long after its beginning."""


def main() -> None:
    """Train, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn if not given")
    parser.add_argument("--plans", default="data-parallel,pipeline")
    options = parser.parse_args()
    logging.getLogger("onebox").setLevel(logging.ERROR)  # a line for each recovery
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    result: dict[str, Any] = {"seed": seed, "steps": options.steps, "equal": True}
    for name in options.plans.split(","):
        faults = drawn(random.Random(f"{seed}/{name}"), options.steps, options.faults)
        expected, _, undisturbed_s = train(name, options.steps, {})
        found, told, disturbed_s = train(name, options.steps, faults)
        equal = all(torch.equal(found[key], expected[key]) for key in expected)
        result[name] = told | {"seconds": disturbed_s, "undisturbed_s": undisturbed_s, "equal": equal}
        result["equal"] &= equal
        cells = [*map(str, told.values()), f"{undisturbed_s:.0f}", f"{disturbed_s:.0f}", "yes" if equal else "NO"]
        show(f"{name}: {options.steps} steps", [*told, "undisturbed s", "disturbed s", "same bits"], [cells])
    finish(result, as_json=options.json)
    sys.exit(not result["equal"])


def drawn(draw: random.Random, steps: int, faults: int) -> Faults:
    """Draw who is hit when: four of five are killed, the others stopped, which takes seconds to be noticed."""
    found: Faults = {}
    for _ in range(faults):
        kind = signal.SIGSTOP if draw.random() < 0.2 else signal.SIGKILL
        found.setdefault(draw.randrange(1, steps), []).append(
            (draw.randrange(WORKERS), kind, draw.uniform(0.0, LATE_S))
        )
    return found


def train(name: str, steps: int, faults: Faults) -> tuple[dict[str, Tensor], dict[str, int], float]:
    """Train; return the parameters, what happened, and the seconds that it took."""
    model, loss, optimizer = parts()
    told: Counter[str] = Counter(killed=0, stopped=0, missed=0)
    start_s = time.monotonic()
    with (
        onebox.open(f"cpu*{WORKERS}", threads=1) as pool,
        onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan(name), seed=1, recover=True) as trainer,
    ):
        for step in range(steps):
            trainer.step(*batch(step))
            for worker, kind, late_s in faults.get(step, ()):
                time.sleep(late_s)
                told[hit(pool.process_ids[worker], kind)] += 1
        weights = trainer.tensors()
        told["recoveries"] = len(trainer.recoveries)
        told["steps redone"] = sum(recovery.redone for recovery in trainer.recoveries)
    return weights, dict(told), time.monotonic() - start_s


def hit(process: int, kind: signal.Signals) -> str:
    """Send a signal to a worker; return what became of it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, kind)
        return "stopped" if kind == signal.SIGSTOP else "killed"
    return "missed"


def parts() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return the model, its loss and its optimizer, the same each time."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    model = body.double()
    return model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 8] and targets [B] of a step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    x_BD = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return x_BD, torch.randint(0, 4, (SAMPLES,), generator=generator)


def plan(name: str) -> Plan:
    """Return a plan by its name."""
    if name == "data-parallel":
        return Plan.data_parallel(range(WORKERS), [1.0] * WORKERS, micro_batch=MICRO_BATCH, sync="workers")
    model, loss, _ = parts()
    names = TracedModel(capture(model, loss, batch(0)), backward=True).segments
    bounds = [len(names) * place // WORKERS for place in range(WORKERS + 1)]
    stages = tuple(
        Stage(segments=names[bounds[device] : bounds[device + 1]], replicas=((device,),), shares=(1.0,))
        for device in range(WORKERS)
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule="1f1b")


if __name__ == "__main__":
    main()
