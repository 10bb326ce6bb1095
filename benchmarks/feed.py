"""How close does the feed come to its slowest stage, with stages that sleep, and with pictures and a network?

Four questions, each a table:

- 20 ms read | 20 ms process | 20 ms compute over 60 batches, in turn with torchdata.nodes and PyTorch's DataLoader.
  What cannot be undercut is (60 + 2) x 20 ms. Beside it, what the pipeline itself costs for each item and stage.
- How long a process that bounds the run sleeps between its batches, beside a loop that keeps the interpreter's lock.
  This is no clock's time but the scheduler's account of the process: a busy machine does not change it.
- CIFAR-10's JPEGs into a network on a CPU worker, and on emulated devices that sleep: the time of a step against that
  of the slowest stage alone, each stage by itself in the same round.
- What of a step's time its caller spends on bringing the batch on its way, with the feed's upload and without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from common import finish, show, spread
from feed_training import SIDES, Training
from torch.utils.data import DataLoader, Dataset

from onebox.feed.pipeline.runner import Pipeline, StageSpec

BATCHES = 60
STAGE_S = 0.020
IDEAL_S = (BATCHES + 2) * STAGE_S
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


NAPS = "nothing but naps, one after the other"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="steps of a round, each with a batch of pictures")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ONEBOX_TEST_DATA", DATA)))
    options = parser.parse_args()
    result = sleeping(options.rounds) | between_batches(options.rounds)
    if (options.data / "cifar10-train.tar").exists():
        result |= training(options.data, options.rounds, options.steps)
    else:
        print(f"no pictures: {options.data} has no cifar10-train.tar; --data names another folder")
    finish(result, as_json=options.json)


# ---- stages that sleep


def nap(item: int) -> int:
    """Be 20 ms of work that needs no core."""
    time.sleep(STAGE_S)
    return item


def nap_twice(item: int) -> int:
    """Read and process, one after the other, as a data set does."""
    return nap(nap(item))


class Napping(Dataset[int]):
    """A data set whose items, batches here, take 20 ms to read and 20 ms to process."""

    def __len__(self) -> int:
        """Batches."""
        return BATCHES

    def __getitem__(self, index: int) -> int:
        """Read and process one."""
        return nap_twice(index)


def consume(results: Iterable[Any]) -> None:
    """Compute on each for 20 ms."""
    count = 0
    for _ in results:
        time.sleep(STAGE_S)
        count += 1
    assert count == BATCHES


def naps() -> None:
    """Take as long as the ideal, but for what a nap is longer than it should be."""
    for _ in range(BATCHES + 2):
        time.sleep(STAGE_S)


def ours(by: Any) -> None:
    """Run the pipeline."""
    stages = [StageSpec("read", nap, 1, by), StageSpec("process", nap, 1, by)]
    with Pipeline(range(BATCHES), stages) as ready:
        consume(ready)


def nodes() -> None:
    """Run torchdata.nodes with a thread for each stage."""
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    read = ParallelMapper(IterableWrapper(range(BATCHES)), map_fn=nap, num_workers=1, method="thread")
    consume(Loader(ParallelMapper(read, map_fn=nap, num_workers=1, method="thread")))


def loader(workers: int) -> None:
    """Run PyTorch's DataLoader."""
    consume(DataLoader(Napping(), batch_size=None, num_workers=workers))


def sleeping(rounds: int) -> dict[str, float]:
    """Compare with others on stages that sleep."""
    sides: dict[str, Callable[[], None]] = {
        NAPS: naps,
        "onebox, threads": lambda: ours("threads"),
        "onebox, processes": lambda: ours("processes"),
        "torchdata.nodes": nodes,
        "DataLoader, 2 workers": lambda: loader(2),
        "DataLoader, 1 worker": lambda: loader(1),
        "DataLoader, no worker": lambda: loader(0),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        names = list(sides)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            sides[name]()
            found[name].append(time.perf_counter() - begin)
    rows = [[name, spread(times), spread([each / IDEAL_S for each in times])] for name, times in found.items()]
    title = (
        f"20 ms read | 20 ms process | 20 ms compute, {BATCHES} batches, ideal {IDEAL_S:.2f} s: median (least to most)"
    )
    show(title, ["side", "seconds", "over the ideal"], rows)
    costs = {
        by: [item_us(by, count) for _ in range(rounds)] for by, count in (("threads", 10_000), ("processes", 2_000))
    }
    rows = [[f"by {by}", spread(values, 1)] for by, values in costs.items()]
    show("Nothing to do in two stages: median (least to most)", ["stages", "µs for an item and stage"], rows)
    beside = [mine / least for mine, least in zip(found["onebox, threads"], found[NAPS], strict=True)]
    over = {name: round(statistics.median(times) / IDEAL_S, 4) for name, times in found.items()}
    return {
        "over_ideal": over["onebox, threads"],
        "over_naps": round(statistics.median(beside), 4),
        "over_ideal_processes": over["onebox, processes"],
        "nodes_over_ideal": over["torchdata.nodes"],
        "loader_over_ideal": over["DataLoader, 2 workers"],
        "item_us": round(statistics.median(costs["threads"]), 1),
        "item_us_processes": round(statistics.median(costs["processes"]), 1),
    }


def item_us(by: Any, count: int) -> float:
    """Return what an item costs in a stage that does nothing, with two such stages."""
    stages = [StageSpec("read", lambda item: item, 1, by), StageSpec("process", lambda item: item, 1, by)]
    with Pipeline(range(count), stages) as ready:
        next(ready)
        begin = time.perf_counter()
        for _ in ready:
            pass
        return (time.perf_counter() - begin) / (count - 1) / len(stages) * 1e6


# ---- a process beside a loop that computes


def compute(for_s: float) -> None:
    """Compute for a while, without a release of the interpreter's lock."""
    end_s = time.thread_time() + for_s
    while time.thread_time() < end_s:
        pass


def files(number: int) -> tuple[tuple[int, bytes], ...]:
    """Read a batch of 200 short files."""
    return tuple((index, bytes(900)) for index in range(200))


def process_files(samples: tuple[tuple[int, bytes], ...]) -> int:
    """Process a batch for 10 ms."""
    compute(0.010)
    return len(samples)


def between_batches(rounds: int) -> dict[str, float]:
    """Measure how long the process sleeps for each batch."""
    found = [asleep_ms(100) for _ in range(rounds)]
    rows = [["10 ms of processing | 4 ms of the loop", spread(found, 2)]]
    show("A process that bounds the run, beside a loop: median (least to most)", ["batch", "ms asleep"], rows)
    return {"process_asleep_ms": round(statistics.median(found), 3)}


def asleep_ms(count: int) -> float:
    """Return how long the process sleeps for each batch: the time in which it neither runs nor waits for a core."""
    stages = [StageSpec("read", files), StageSpec("process", process_files, 1, "processes")]
    with Pipeline(range(count + 20), stages) as ready:
        for _ in range(10):
            next(ready)
        child = max(psutil.Process().children(recursive=True), key=lambda each: each.cpu_times().user)
        before = account_s(child.pid)
        for _ in range(count):
            next(ready)
            compute(0.004)
        after = account_s(child.pid)
    passed_s, scheduled_s = (end - begin for begin, end in zip(before, after, strict=True))
    return (passed_s - scheduled_s) / count * 1e3


def account_s(process: int) -> tuple[float, float]:
    """Return the time, and for how long of it a process ran or waited for a core."""
    running_ns, waiting_ns, _ = Path(f"/proc/{process}/schedstat").read_text().split()
    return time.perf_counter(), (int(running_ns) + int(waiting_ns)) / 1e9


# ---- pictures and a network


def training(data: Path, rounds: int, steps: int) -> dict[str, float]:
    """Compare steps that are fed with the slowest stage alone."""
    torch.set_num_threads(1)
    rows, shares = [], []
    result: dict[str, float] = {}
    for side in SIDES:
        with ExitStack() as stack:
            case = Training(side, data, stack)
            case.warm(steps)
            turns = [case.measure(steps, turn) for turn in range(rounds)]
        over = [one.fed_s / max(one.alone_s.values()) for one in turns]
        alone = [spread([1e3 * one.alone_s[name] for one in turns], 1) for name in ("read", "process", "compute")]
        rows.append([side.name, *alone, spread([1e3 * one.fed_s for one in turns], 1), spread(over)])
        shares.append(
            [side.name, *(spread([getattr(one, name) for one in turns], 4) for name in ("share", "own_share"))]
        )
        result[f"over_slowest_{side.key}"] = round(statistics.median(over), 4)
        result[f"upload_share_{side.key}"] = round(statistics.median(one.share for one in turns), 4)
    columns = ["side", "read, ms", "process, ms", "compute, ms", "fed step, ms", "fed / slowest alone"]
    show("CIFAR-10's JPEGs into a network: median (least to most)", columns, rows)
    columns = ["side", "with the feed's upload", "without"]
    show("Share of a step's time that its caller spends on uploading: median (least to most)", columns, shares)
    return {
        "over_slowest_stage": max(value for key, value in result.items() if key.startswith("over_slowest_")),
        "upload_share": max(value for key, value in result.items() if key.startswith("upload_share_")),
        **result,
    }


if __name__ == "__main__":
    main()
