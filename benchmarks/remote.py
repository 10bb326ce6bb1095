"""What does it cost to train on a worker instead of in the script's own process?

One worker against plain eager PyTorch, each on one thread, in turn. The published system (Yang 2018) takes 2.44 times
as long on a remote GPU as on a local one.

And what do encryption and acknowledgements cost, which messages to other hosts have? The same training over TCP with
and without each, in turn.

And what do checked arguments and zeroed memory cost a worker? The same training with and without both, in turn: as
a program, and as a script whose operators come one by one.

Each question has its part of four minutes, and fewer rounds where these are over; ``--long`` has all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable

from common import BATCH, MODELS, Budget, Peer, batches, finish, make, show, spread
from remote_channel import measure_channel
from remote_checks import measure_checks
from torch import nn

import onebox

STEPS = {"cnn": 20, "mlp": 120}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=5, help="0: do without the first question")
    parser.add_argument("--pool", default="cpu")
    parser.add_argument("--long", action="store_true", help="all rounds; ten minutes and more")
    parser.add_argument("--channel-rounds", type=int, default=30, help="0: do without the second question")
    parser.add_argument("--check-rounds", type=int, default=60, help="0: do without the third question")
    options = parser.parse_args()
    budget = Budget(long=options.long)
    result: dict[str, float] = {}
    if options.rounds:
        result |= compare(options.pool, options.rounds, budget)
    if options.channel_rounds:
        result |= measure_channel(options.channel_rounds, budget)
    if options.check_rounds:
        result |= measure_checks(options.check_rounds, budget)
    finish(result, as_json=options.json)


SHARES = {"cnn": 0.22, "mlp": 0.3}
"""Parts of the time after which no further round of a model begins; the next two questions go on from there."""


def compare(devices: str, rounds: int, budget: Budget) -> dict[str, float]:
    """Compare one worker with eager PyTorch, print a table, and return what belongs into the JSON object."""
    rows: list[list[str]] = []
    result: dict[str, float] = {}
    processor: list[float] = []
    with onebox.open(devices, threads=1) as pool:
        for name in MODELS:
            local, remote, client = measure(name, pool, budget.rounds(rounds, SHARES[name]))
            ratios = [ours / theirs for ours, theirs in zip(remote, local, strict=True)]
            processor += client
            result[f"{name}_ratio"] = round(statistics.median(ratios), 4)
            rows.append([name, spread(local, 2), spread(remote, 2), spread(ratios), spread(client, 2)])
    result["client_cpu_ms"] = round(statistics.median(processor), 4)
    show(
        f"One worker against eager PyTorch, batch {BATCH}, one thread each: median (least to most)",
        ["model", "local ms/step", "worker ms/step", "worker / local", "client CPU ms/step"],
        rows,
    )
    return result


def measure(name: str, pool: onebox.Pool, rounds: Iterable[int]) -> tuple[list[float], list[float], list[float]]:
    """Return milliseconds a step locally, on the worker, and of the client's own processor time."""
    local, remote, client = [], [], []
    steps = STEPS[name]
    data = batches(8, BATCH)
    model, optimizer = make(name)
    peer = Peer("eager", name)
    with onebox.Trainer(
        model, nn.functional.cross_entropy, optimizer, pool=pool, engine=onebox.Engine(trace=False)
    ) as trainer:

        def run(count: int) -> None:
            for step in range(count):
                trainer.step(*data[step % len(data)])
            trainer.wait()

        run(steps // 2)
        peer.start(steps // 2)
        peer.seconds()
        for _ in rounds:
            peer.start(steps)
            local.append(peer.seconds() / steps * 1e3)
            begin, used = time.perf_counter(), time.process_time()
            run(steps)
            remote.append((time.perf_counter() - begin) / steps * 1e3)
            client.append((time.process_time() - used) / steps * 1e3)
    peer.close()
    return local, remote, client


if __name__ == "__main__":
    main()
