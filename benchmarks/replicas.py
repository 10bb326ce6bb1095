"""What do replicas gain by sharing out the optimizer's state, and by summing up in each host first?

(a) Two workers of this machine train one MLP with AdamW: each with all of the optimizer's state, and with half of it.
(b) Emulated: two hosts of two devices that compute nothing, joined by Gigabit Ethernet; a step is the sums of its
gradients, in one ring over all four and in each host first. Expected are the times that the planner counts with.

Both sides of each part are run in turn in every round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from common import finish, show, spread
from torch import nn

import onebox
from onebox.cost import AllReduceAlgorithm, all_reduce_algorithms
from onebox.engine.compile import compiler
from onebox.engine.partition.hierarchical_reduction import known_links
from onebox.pool import Link

WIDTH, LAYERS, BATCH = 1024, 6, 64
STEPS = 12
ETHERNET = Link(latency_s=100e-6, bandwidth_bps=125e6)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    result = {**shared_out(options.rounds), **hosts(options.rounds)}
    finish(result, as_json=options.json)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return an MLP of 25 MB and its optimizer, which remembers twice as much."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters())


def trainer(pool: onebox.Pool, stack: ExitStack, *, sharded: bool = False) -> onebox.Trainer:
    """Return a trainer."""
    model, optimizer = make()
    return stack.enter_context(
        onebox.Trainer(
            model,
            nn.functional.mse_loss,
            optimizer,
            pool=pool,
            plan=onebox.DataParallel(shares="equal", shard_optimizer=sharded),
            engine=onebox.Engine(trace=False, check_every=0),
        )
    )


def timed(one: onebox.Trainer, batch: int) -> Callable[[], float]:
    """Return what runs some steps and says how many seconds one of them took."""
    data = torch.ones(batch, WIDTH), torch.zeros(batch, WIDTH)

    def run() -> float:
        begin_s = time.perf_counter()
        for _ in range(STEPS):
            one.step(*data)
        one.wait()
        return (time.perf_counter() - begin_s) / STEPS

    run()
    return run


def shared_out(rounds: int) -> dict[str, float]:
    """Compare replicated and shared out states."""
    with ExitStack() as stack:
        sides = {}
        for name, sharded in (("replicated", False), ("shared out", True)):
            pool = stack.enter_context(onebox.open("cpu*2", threads=1))
            one = trainer(pool, stack, sharded=sharded)
            sides[name] = one, timed(one, BATCH)
        used = {name: max(memory.used_bytes for memory in one.memory()) for name, (one, _) in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, (_, run) in sides.items():
                times[name].append(run())
    ratios = [before / after for before, after in zip(times["replicated"], times["shared out"], strict=True)]
    rows = [[name, f"{used[name] / 1e6:.1f}", spread([1e3 * one for one in times[name]], 1)] for name in sides]
    show("(a) AdamW on two workers", ["optimizer's state", "MB held by each", "ms of a step"], rows)
    return {
        "sharded_bytes": round(used["shared out"] / used["replicated"], 4),
        "sharded_speed": round(statistics.median(ratios), 4),
    }


def hosts(rounds: int) -> dict[str, float]:
    """Compare sums in one ring and in each host first."""
    links = {(a, b): ETHERNET for a in (0, 1) for b in (2, 3)}
    find, used = compiler.find_reductions, dict[Any, tuple[AllReduceAlgorithm, ...]]()

    def seen(*given: Any, **named: Any) -> dict[Any, tuple[AllReduceAlgorithm, ...]]:
        used.update(find(*given, **named))
        return used

    with ExitStack() as stack:
        sides = {}
        stack.callback(setattr, compiler, "find_reductions", find)
        for name, chosen in (("one ring", lambda *given, **named: {}), ("each host first", seen)):
            compiler.find_reductions = chosen
            pool = stack.enter_context(onebox.open("sim*4", links=links))
            sides[name] = timed(trainer(pool, stack), 4 * BATCH)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, run in sides.items():
                times[name].append(run())
    size_bytes = sum(parameter.nbytes for parameter in make()[0].parameters())
    ((members, (*_, near)),) = used.items()
    known = known_links(pool.devices, pool.links)
    assert known is not None
    ring = all_reduce_algorithms(known.latency_s, known.bandwidth_bps, members)[0]
    expected = {"one ring": ring.time.at(size_bytes), "each host first": near.time.at(size_bytes)}
    ratios = [before / after for before, after in zip(times["one ring"], times["each host first"], strict=True)]
    rows = [[name, spread([1e3 * one for one in times[name]], 1), f"{1e3 * expected[name]:.1f}"] for name in sides]
    show("(b) two hosts of two devices, emulated", ["sums", "ms of a step", "expected of one sum of all"], rows)
    return {
        "hosts_speed": round(statistics.median(ratios), 4),
        "hosts_speed_expected": round(expected["one ring"] / expected["each host first"], 4),
    }


if __name__ == "__main__":
    main()
