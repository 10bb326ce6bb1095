"""How well do unmodified scripts use devices of different speed?

``nn.DataParallel`` over four uneven pools of emulated devices, once it has found a division, against
the same script on the fastest device of the pool alone, in turn. The CNN is that of PyTorch's MNIST example.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Budget, batches, finish, make, show, spread
from torch import nn

import onebox

POOLS = ("cpu,cpu@0.25", "cpu,cpu@0.05", "cpu,cpu@0.5,cpu@0.25", "cpu@0.25,cpu")
"""The pools; the model is on the first device of each, which is the slowest one of the last pool."""

BATCH = 32

FIRST = 60
"""Steps in which a division is found."""

STEPS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--long", action="store_true", help="all rounds, however long they take")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    finish(data_parallel(options.rounds, Budget(long=options.long)), as_json=options.json)


def data_parallel(rounds: int, budget: Budget) -> dict[str, Any]:
    """Compare nn.DataParallel with the fastest device alone."""
    rows, worst = list[list[str]](), 0.0
    for number, pool in enumerate(POOLS, 1):
        with onebox.open(pool, threads=1) as opened:
            fastest = max(opened.devices, key=lambda device: device.speed).number
            sides = [training("vgpu:0", parallel=True), training(f"vgpu:{fastest}", parallel=False)]
            for side in sides:
                side(FIRST)
            times: list[list[float]] = [[], []]
            for _ in budget.rounds(rounds, number / len(POOLS), least=3):
                for side, of_side in zip(sides, times, strict=True):
                    of_side.append(side(STEPS))
        ratios = [ours / alone for ours, alone in zip(*times, strict=True)]
        rows.append([pool, *(spread(each, 1) for each in times), spread(ratios)])
        worst = max(worst, statistics.median(ratios))
    show(
        f"nn.DataParallel over uneven devices, CNN, batch {BATCH}, SGD: ms/step, median (least to most)",
        ["pool", "DataParallel", "fastest alone", "ratio"],
        rows,
    )
    return {"dataparallel_over_fastest": round(worst, 4)}


def training(device: str, *, parallel: bool) -> Callable[[int], float]:
    """Return a function that trains for some steps, the last of which reads its loss, and returns the ms of one."""
    model = make("cnn")[0].to(device)
    called = nn.DataParallel(model) if parallel else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ((images, labels),) = batches(1, BATCH)

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(called(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        loss.item()
        return (time.perf_counter() - begin) / steps * 1e3

    return run


if __name__ == "__main__":
    main()
