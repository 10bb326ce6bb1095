"""How planning grows: seconds, memory and quality of a search for models and clusters of growing size.

Each problem is drawn from a seed: a chain of uneven segments, a quarter of which repeats an earlier one; hosts of four
devices each, which differ in speed, in memory and in their links, and none of which holds the whole model where there
are eight or more. Each row is a search in a process of its own: seconds of processor, peak memory beyond that of the
problem, the actions of the plan that is returned (three for each micro-batch on each of its devices), and the least
step that any plan can have over the predicted one. Nothing is executed here.

    python benchmarks/growth_plans.py [--sizes 20x4 100x16] [--seeds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from common import finish, show

from onebox.plan import ComputeTime, DeviceSpec, Links, Problem, Segment, SegmentValue, search
from onebox.plan.evaluate.bounds import least_step

SIZES = ("20x4", "100x16", "200x64", "1000x64", "1000x256")
BUDGET_S = {"20x4": 1.0, "100x16": 1.0, "200x64": 10.0, "1000x64": 10.0, "1000x256": 30.0}
"""Seconds that a search of each size is given."""

SPEEDS = (1.0, 0.8, 0.5, 0.25)
EACH_HOST = 4
REPEATED = 0.25
"""Part of the segments that equal the one before the last."""

SAMPLES_EACH = 32
"""Samples of a step for each device."""

CALL_S = 1e-5
LIMIT_S = 1200.0
"""Seconds after which a search is given up."""


def random_problem(segments: int, devices: int, seed: int) -> Problem:
    """Return a random uneven problem.

    Args:
        segments: Number of segments.
        devices: Number of devices.
        seed: Seed.
    """
    draw = Random(seed)
    made: list[Segment] = []
    for number in range(segments):
        again = made[-2] if number > 1 and draw.random() < REPEATED else None
        made.append(_segment(f"segment{number}", draw, again))
    whole = sum(one.state_bytes for one in made)
    held = (0.6, 0.8, 1.2) if devices < 2 * EACH_HOST else (0.15, 0.25, 0.4)
    specs: list[DeviceSpec] = []
    for host in range(-(-devices // EACH_HOST)):
        speed, capacity = draw.choice(SPEEDS), int(whole * draw.choice(held))
        specs += [
            DeviceSpec(number=number, type="gpu", host=f"h{host}", capacity_bytes=capacity, speed=speed)
            for number in range(host * EACH_HOST, min(devices, (host + 1) * EACH_HOST))
        ]
    batch = SAMPLES_EACH * devices
    return Problem(
        segments=tuple(made),
        devices=tuple(specs),
        links=_links(devices, draw),
        batch=batch,
        micro_batches=tuple(size for size in (1, 2, 4, 8, 16, 32) if size <= batch),
        values=tuple(
            SegmentValue(source=number, consumers=(number + 1,), forward_bytes=size, backward_bytes=size)
            for number in range(segments - 1)
            for size in [int(draw.choice([1, 2, 4]) * 1e5)]
        ),
        call_s=CALL_S,
    )


def _segment(name: str, draw: Random, again: Segment | None) -> Segment:
    if again is not None:
        seconds, size, saved = again.forward_s["gpu"].sample_s, again.parameter_bytes, again.saved_bytes
    else:
        seconds, size = draw.uniform(0.5e-3, 2e-3), int(draw.uniform(0.5e6, 2e6))
        saved = int(draw.uniform(1e5, 3e5))
    time_s = ComputeTime(fixed_s=2e-5, sample_s=seconds)
    return Segment(
        name=name,
        forward_s={"gpu": time_s},
        input_s={"gpu": time_s},
        weight_s={"gpu": time_s},
        update_s={"gpu": size * 2e-11},
        parameter_bytes=size,
        state_bytes=4 * size,
        optimizer_bytes=2 * size,
        saved_bytes=saved,
    )


def _links(devices: int, draw: Random) -> Links:
    """Return PCIe within a host, and Ethernet of 10 Gbit/s between hosts, of 1 Gbit/s to some."""
    of = [number // EACH_HOST for number in range(devices)]
    wired = [1.1e9 if draw.random() < 0.8 else 1.15e8 for _ in range(of[-1] + 1)]
    latency: dict[int, dict[int, float]] = {}
    bandwidth: dict[int, dict[int, float]] = {}
    for a in range(devices):
        latency[a] = {b: 2e-5 if of[a] == of[b] else 1e-4 for b in range(devices)}
        bandwidth[a] = {b: 8e9 if of[a] == of[b] else min(wired[of[a]], wired[of[b]]) for b in range(devices)}
    return Links(latency_s=latency, bandwidth_bps=bandwidth)


def measured(size: str, seed: int) -> dict[str, Any]:
    """Search for a plan of one problem, here.

    Args:
        size: Segments and devices, such as ``100x16``.
        seed: Seed of the problem.
    """
    segments, devices = map(int, size.split("x"))
    problem = random_problem(segments, devices, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, wall = time.process_time(), time.monotonic()
    result = search(problem, budget_s=BUDGET_S.get(size, 5.0), clock=time.process_time)
    spent_s = time.process_time() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    replicas = [stage.replicas for stage in result.plan.stages]
    return {
        "size": size,
        "seed": seed,
        "processor_s": round(spent_s, 2),
        "wall_s": round(time.monotonic() - wall, 2),
        "of_bound": round(least_step(problem) / result.simulation.step_s, 4),
        "step_s": result.simulation.step_s,
        "peak_bytes": (after - before) * 1024,
        "actions": 3 * len(result.plan.micro_batches(problem.batch)) * sum(map(len, replicas)),
        "simulated": result.simulated,
        "plan": result.plan.describe().splitlines()[0],
    }


def plan_rows(sizes: Sequence[str] = SIZES, seeds: Sequence[int] = (0, 1, 2)) -> list[dict[str, Any]]:
    """Search for a plan of each problem, one after the other, each in a process of its own.

    Args:
        sizes: Segments and devices of each problem.
        seeds: Seeds for each size.
    """
    rows = []
    for size in sizes:
        for seed in seeds:
            run = [sys.executable, str(Path(__file__).resolve()), "--one", size, str(seed)]
            done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=LIMIT_S)
            if done.returncode:
                raise SystemExit(f"the search of {size} with seed {seed} failed:\n{done.stderr}")
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="segments and devices, such as 100x16")
    parser.add_argument("--seeds", type=int, default=3, help="number of problems of each size")
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "SEED"), help="search for one plan in this process")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]))))
        return
    rows = plan_rows(options.sizes, range(options.seeds))
    cells = []
    for size in options.sizes:
        own = [row for row in rows if row["size"] == size]
        spent, near = [row["processor_s"] for row in own], [row["of_bound"] for row in own]
        most = max(row["peak_bytes"] for row in own)
        each = statistics.median(row["peak_bytes"] / row["actions"] for row in own)
        cells.append(
            [
                size,
                f"{BUDGET_S.get(size, 5.0):g}",
                f"{statistics.median(spent):.1f} ({min(spent):.1f} to {max(spent):.1f})",
                f"{statistics.median(near):.3f} ({min(near):.3f} to {max(near):.3f})",
                f"{most / 1e6:.0f}",
                f"{each:.0f}",
            ]
        )
    show(
        "Searches for a plan: median of problems (least to most)",
        [
            *("segments x devices", "budget, s", "processor, s", "least step over predicted", "peak memory, MB"),
            "bytes for each action of the plan",
        ],
        cells,
    )
    finish({"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
