"""What it gains to look at links: the planner's plans against its plans for links that are all alike, predicted.

Both sides are the same search with the same time, on emulated clusters: what differs is what they are told of the
links. The first is told what would be measured, the second that all links are like the one in the middle; both plans
are then timed by the simulator with the true links. A chain of 24 uneven layers, several weights of what goes between
them; with and without replicas. Nothing is executed here, so the machine does not matter but for what a search can
look at in its time.

    python benchmarks/topology.py [--budget-s SECONDS] [--json]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random

from common import finish, show

from onebox.plan import ComputeTime, DeviceSpec, Links, Problem, Segment, SegmentValue, predict, search

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.clusters import CLUSTERS, Cluster

SPEED = {"quick": 1.0, "half": 0.5, "slow": 0.25}
LAYERS, BATCH, SIZES = 24, 32, (1, 2, 4)
CROSSING = (20_000, 200_000, 1_000_000)
"""About so many bytes a sample go from a layer to the next."""

PARAMETER_BYTES = 400_000
CALL_S = 1e-5


def problem_on(cluster: Cluster, crossing: int, *, replicable: bool) -> Problem:
    """Return what is to be planned."""
    draw = Random(0)
    latency_s, bandwidth_bps = cluster.matrix()
    return Problem(
        segments=tuple(_layer(f"layer{number}", draw.uniform(0.5e-3, 2e-3), draw) for number in range(LAYERS)),
        devices=tuple(DeviceSpec(number=number, type=kind) for number, kind in enumerate(cluster.kinds)),
        links=Links(latency_s=latency_s, bandwidth_bps=bandwidth_bps),
        batch=BATCH,
        micro_batches=SIZES,
        values=tuple(
            SegmentValue(source=number, consumers=(number + 1,), forward_bytes=size, backward_bytes=size)
            for number in range(LAYERS - 1)
            for size in [int(crossing * draw.choice([0.1, 0.3, 1, 3]))]
        ),
        call_s=CALL_S,
        schedules=("gpipe", "1f1b", "zb-h1"),
        replicable=replicable,
    )


def _layer(name: str, seconds: float, draw: Random) -> Segment:
    time = {kind: ComputeTime(fixed_s=2e-4 / speed, sample_s=seconds / speed) for kind, speed in SPEED.items()}
    size = int(PARAMETER_BYTES * draw.uniform(0.5, 2))
    return Segment(
        name=name, forward_s=time, input_s=time, weight_s=time, update_s={}, parameter_bytes=size, state_bytes=4 * size
    )


def blind(problem: Problem) -> Problem:
    """Return the problem with all links like the one in the middle."""
    numbers = [device.number for device in problem.devices]
    middle = [
        statistics.median(table[a][b] for a, b in permutations(numbers, 2))
        for table in (problem.links.latency_s, problem.links.bandwidth_bps)
    ]
    latency_s, bandwidth_bps = ({a: dict.fromkeys(numbers, value) for a in numbers} for value in middle)
    return replace(problem, links=Links(latency_s=latency_s, bandwidth_bps=bandwidth_bps))


def main() -> None:
    """Compare the two and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget-s", type=float, default=5.0, help="seconds of a search")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    rows, gains = [], {}
    for name, cluster in CLUSTERS.items():
        for crossing in CROSSING:
            for replicable in (False, True):
                problem = problem_on(cluster, crossing, replicable=replicable)
                ours = predict(problem, search(problem, budget_s=options.budget_s).plan)[0].step_s
                other = predict(problem, search(blind(problem), budget_s=options.budget_s).plan)[0].step_s
                gains[f"{name}, {crossing} bytes, {'' if replicable else 'no '}replicas"] = round(other / ours, 3)
                cells = [
                    f"{crossing / 1e3:.0f}",
                    "yes" if replicable else "no",
                    f"{1e3 * other:.0f}",
                    f"{1e3 * ours:.0f}",
                ]
                rows.append([name, *cells, f"{other / ours:.2f}"])
    show(
        f"PREDICTED steps on emulated clusters: {LAYERS} layers, batch {BATCH}; links not looked at, and looked at",
        ["cluster", "kB a sample", "replicas", "blind, ms", "by links, ms", "gain"],
        rows,
    )
    mean = math.exp(statistics.fmean(map(math.log, gains.values())))
    finish({"mean_gain": round(mean, 3), "least_gain": min(gains.values()), "gains": gains}, as_json=options.json)


if __name__ == "__main__":
    main()
