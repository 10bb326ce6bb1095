"""How much of what two cores can do do two workers reach, and does DistributedDataParallel?

The batch grows with the workers (200 samples each, as in the published experiment). Each system is measured against
itself: two workers that train one model, against two independent copies on one thread each, which is the machine's own
ceiling at that moment. All are run in turn in every round.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from common import BATCH, MODELS, Peer, batches, finish, make, show, spread
from torch import nn

import onebox

STEPS = {"cnn": 12, "mlp": 80}
SIDES = ("onebox, two copies", "onebox, 2 workers", "eager, two copies", "DDP on Gloo, 2 ranks")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    rows, result = [], {}
    for name in options.models:
        rates = measure(name, options.rounds)
        ours = shares(rates["onebox, 2 workers"], rates["onebox, two copies"])
        ddp = shares(rates["DDP on Gloo, 2 ranks"], rates["eager, two copies"])
        ratio = shares(rates["onebox, 2 workers"], rates["DDP on Gloo, 2 ranks"])
        prefix = "" if name == "cnn" else f"{name}_"
        result[f"{prefix}share_of_ceiling"] = round(statistics.median(ours), 4)
        result[f"{prefix}ddp_share_of_ceiling"] = round(statistics.median(ddp), 4)
        result[f"{prefix}over_ddp"] = round(statistics.median(ratio), 4)
        rows += [[name, side, spread(rates[side], 0), ""] for side in SIDES]
        rows[-3][3], rows[-1][3] = spread(ours), spread(ddp)
        rows.append([name, "onebox / DDP", "", spread(ratio)])
    title = f"Two workers, batch {BATCH} each, one thread each: median (least to most)"
    show(title, ["model", "side", "samples/s", "share of its own ceiling"], rows)
    finish(result, as_json=options.json)


def shares(part: list[float], whole: list[float]) -> list[float]:
    """Return the ratios of two series, round by round."""
    return [p / w for p, w in zip(part, whole, strict=True)]


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Return samples per second of each side, a figure a round."""
    steps = STEPS[name]
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        sides = dict(
            zip(
                SIDES,
                (copies(name, stack), workers(name, stack), eager(name, stack), ddp(name, stack)),
                strict=True,
            )
        )
        for run in sides.values():
            run(steps // 2)
        for _ in range(rounds):
            for side, run in sides.items():
                rates[side].append(2 * BATCH * steps / run(steps))
    return rates


def trainer(name: str, spec: str, stack: ExitStack) -> onebox.Trainer:
    """Return a trainer on a pool of its own."""
    model, optimizer = make(name)
    pool = stack.enter_context(onebox.open(spec, threads=1))
    return stack.enter_context(
        onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, engine=onebox.Engine(trace=False))
    )


def steps_of(one: onebox.Trainer, size: int) -> Callable[[int], None]:
    """Return what runs so many steps of a trainer."""
    data = batches(8, size)

    def run(count: int) -> None:
        for step in range(count):
            one.step(*data[step % len(data)])
        one.wait()

    return run


def timed(run: Callable[[int], None]) -> Callable[[int], float]:
    """Return what runs so many steps and says how many seconds they took."""

    def measured(count: int) -> float:
        begin = time.perf_counter()
        run(count)
        return time.perf_counter() - begin

    return measured


def workers(name: str, stack: ExitStack) -> Callable[[int], float]:
    """Two workers that train one model."""
    return timed(steps_of(trainer(name, "cpu*2", stack), 2 * BATCH))


def copies(name: str, stack: ExitStack) -> Callable[[int], float]:
    """Two workers of which each trains a model of its own."""
    runs = [steps_of(trainer(name, "cpu", stack), BATCH) for _ in range(2)]

    def run(count: int) -> None:
        threads = [threading.Thread(target=one, args=(count,)) for one in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(run)


def eager(name: str, stack: ExitStack) -> Callable[[int], float]:
    """Two processes of which each trains a model of its own."""
    return peers(stack, [("eager", name)] * 2)


def ddp(name: str, stack: ExitStack) -> Callable[[int], float]:
    """Two ranks of DistributedDataParallel."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return peers(stack, [("ddp", name, str(rank), "2", port) for rank in range(2)])


def peers(stack: ExitStack, commands: list[tuple[str, ...]]) -> Callable[[int], float]:
    """Start peers and return what runs so many steps on all and says how long the slowest took."""
    started = [Peer(*command) for command in commands]
    for peer in started:
        stack.callback(peer.close)

    def run(count: int) -> float:
        for peer in started:
            peer.start(count)
        return max(peer.seconds() for peer in started)

    return run


if __name__ == "__main__":
    main()
