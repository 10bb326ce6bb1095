"""What does it take to hand a tensor to another worker of the same host: through shared memory, or through sockets?

Both ways are two groups of the same two workers, one thread each, and take turns in every round.

- Messages: a tensor goes there, is summed up where it came, and the sum comes back. ``trip`` is the time of that by the
  sender's clock, ``cpu`` the processor time of all threads of both workers. ``trip_ratio_SIZE`` and ``cpu_ratio_SIZE``
  are shared memory over sockets.
- A pipeline: a training step of a small convolutional network in two stages whose boundary is 8 MiB a micro-batch, and
  comes back as a gradient. ``step_ratio`` is shared memory over sockets.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import finish, show, spread
from pipeline_models import Case
from pipeline_sides import Ours, in_turn, plan_for, ratios, segments_of
from torch import nn

import onebox
from onebox.cost.benchmark_kernels import filled
from onebox.pool import Pool, raise_first
from onebox.wire import Operator, Program, SlotArgument, TensorSpec, with_deaths
from onebox.wire.protocol.instructions import Ask, Call, Free, Receive, Send, Step
from onebox.wire.protocol.requests import Define, Instruction, Routine, Run, StoredProgram

SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "4 MiB": 4 << 20, "64 MiB": 64 << 20}
ROUND_BYTES = 128 << 20
"""Bytes that are sent in a round, in 10 to 200 messages."""

SCALAR = TensorSpec("float32", ())
WAYS = {"shared memory": True, "sockets": False}

WIDE = Case(
    make=lambda: [
        nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()),
        nn.Sequential(
            nn.MaxPool2d(2),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(2048, 10),
        ),
    ],
    loss=nn.functional.cross_entropy,
    inputs=lambda count: torch.randn(count, 3, 64, 64),
    classes=10,
    positions=1,
    micro_batch=8,
    count=6,
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with onebox.open("cpu*2", threads=1) as pool:
        result = messages(pool, options.rounds) | pipeline(pool, options.rounds)
    finish(result, as_json=options.json)


# ---- messages


def messages(pool: Pool, rounds: int) -> dict[str, float]:
    """Compare messages of all sizes."""
    groups = {}
    for way, pool.shared in WAYS.items():
        groups[way] = pool.form_group((0, 1), "workers")
    pool.shared = True
    rows, result = [], {}
    for name, size in SIZES.items():
        spec = TensorSpec("float32", (size // 4,))
        count = max(10, min(200, ROUND_BYTES // size))
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(-1, rounds):  # the first warms up
            for way, group in groups.items():
                measured = trips(pool, group, spec, count)
                if turn >= 0:
                    found[way].append(measured)
        key = name.replace(" ", "").lower()
        for place, what in enumerate(("trip", "cpu")):
            mine, theirs = ([figures[place] for figures in found[way]] for way in WAYS)
            result[f"{what}_ratio_{key}"] = round(statistics.median(ratios(mine, theirs)), 4)
        for way, figures in found.items():
            trip_s, cpu_s = zip(*figures, strict=True)
            rate = [size / seconds / 1e9 for seconds in trip_s]
            rows.append([name, way, spread(micros(trip_s), 0), spread(rate, 2), spread(micros(cpu_s), 0)])
    show(
        "A tensor there, summed up, and the sum back: median (least to most)",
        ["size", "way", "trip us", "GB/s", "cpu us"],
        rows,
    )
    return result


def micros(seconds: Sequence[float]) -> list[float]:
    """Return microseconds."""
    return [1e6 * each for each in seconds]


def trips(pool: Pool, group: int, spec: TensorSpec, count: int) -> tuple[float, float]:
    """Return seconds of a trip, and of the processor time that both workers take for it."""
    message, back, made, total, routine = (pool.new_number() for _ in range(5))
    there: tuple[Step, ...] = (
        Send(message, group, 1),
        Receive(back, SCALAR, group, 1),
        Ask("scalars", (back,)),
        Free((back,)),
    )
    here: tuple[Step, ...] = (
        Receive(message, spec, group, 0),
        Call(total, (message,), (back,)),
        Send(back, group, 0),
        Free((message, back)),
    )
    add = Operator("aten.sum.default", (SlotArgument(0),), {}, (1,), (SCALAR,))
    setups: list[list[Instruction]] = [
        [
            Define(made, StoredProgram(filled(spec))),
            Call(made, (), (message,)),
            Define(routine, Routine(there * count, 0)),
        ],
        [
            Define(total, StoredProgram(with_deaths(Program((spec,), (add,), (1,), 2)))),
            Define(routine, Routine(here * count, 0)),
        ],
    ]
    ready: list[Instruction] = [Ask("memory")]
    raise_first([pool.post(worker, [*setup, *ready], answer=True) for worker, setup in enumerate(setups)])
    before_s = processor_s(pool)
    answers = raise_first([pool.post(worker, [Run(routine, trace=True)], answer=True) for worker in (1, 0)])
    cpu_s = processor_s(pool) - before_s
    times = answers[1].times_ns
    raise_first([pool.post(0, [Free((message,), (made, routine)), *ready], answer=True)])
    raise_first([pool.post(1, [Free((), (total, routine)), *ready], answer=True)])
    return (times[-1] - times[0]) / 1e9 / count, cpu_s / count


def processor_s(pool: Pool) -> float:
    """Return the processor time of all threads of the workers so far."""
    tasks = [task for pid in pool.process_ids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# ---- a pipeline


def pipeline(pool: Pool, rounds: int) -> dict[str, Any]:
    """Compare training steps."""
    segments = segments_of(WIDE)
    with ExitStack() as stack:
        sides = {}
        for way, pool.shared in WAYS.items():
            ours = Ours(WIDE, pool, plan_for(WIDE, segments, "1f1b", 2), stack)
            ours.run(1)  # which forms its groups
            sides[way] = ours.run
        pool.shared = True
        found = in_turn(sides, rounds, steps=3, most_s=60.0)
    rows = [[way, spread([1e3 * each for each in times], 1)] for way, times in found.items()]
    show("A training step in two stages, 8 MiB between them: median (least to most)", ["way", "ms/step"], rows)
    return {"step_ratio": round(statistics.median(ratios(found["shared memory"], found["sockets"])), 4)}


if __name__ == "__main__":
    main()
