"""Plans that the search finds for made-up problems, and what is predicted of plans that nobody searched for.

All of it is arithmetic of Python, the same on every machine. The search is bounded by what it simulates, and no clock
ends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from onebox import Plan
from tests.recorded.hashing import hash_of
from tests.recorded.inner import (
    POLICY,
    ComputeTime,
    DeviceSpec,
    Links,
    Problem,
    Segment,
    SegmentValue,
    Tie,
    canonical,
    named_schedule,
    predict,
    search,
)

NEVER_S = 1e6
EFFORT = 100_000
"""Actions to simulate: about a second."""

KINDS = {"quick": 1.0, "half": 0.5, "slow": 0.25}
"""Types of devices by their speed."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search for a plan.

    Args:
        seed: Of the problem.
        segments: How many there are.
        devices: Their types.
        hosts: How many hosts the devices are on; their links are slow.
        room: Memory of each device, as a part of what the whole model takes; ``None`` for no limit.
        tied: Whether the first and the last segment share a parameter.
        more: Further fields of the problem.
    """

    seed: int
    segments: int = 8
    devices: tuple[str, ...] = ("quick", "quick", "half")
    hosts: int = 1
    room: float | None = None
    tied: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def problem(self) -> Problem:
        """Return the problem."""
        random = Random(self.seed)
        segments = tuple(_segment(random, f"segment{index}") for index in range(self.segments))
        whole = sum(one.state_bytes + 8 * one.saved_bytes for one in segments)
        count = len(self.devices)
        sizes = [random.randrange(1, 10) * 10**4 for _ in range(self.segments - 1)]
        values = [
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=size, backward_bytes=size)
            for index, size in enumerate(sizes)
        ]
        values.append(
            SegmentValue(source=0, consumers=(2, self.segments - 1), forward_bytes=20_000, backward_bytes=20_000)
        )
        ties = (Tie(segments=(0, self.segments - 1), parameter_bytes=10**6, state_bytes=4 * 10**6),)
        host = [number * self.hosts // count for number in range(count)]
        return Problem(
            **{
                "segments": segments,
                "devices": tuple(
                    DeviceSpec(
                        number=number,
                        type=kind,
                        host=f"host{host[number]}",
                        capacity_bytes=None if self.room is None else int(self.room * whole),
                    )
                    for number, kind in enumerate(self.devices)
                ),
                "links": _links(host),
                "batch": 16,
                "micro_batches": (1, 2, 4, 8),
                "values": tuple(values),
                "ties": ties if self.tied else (),
                "call_s": 1e-5,
                **self.more,
            }
        )

    def __call__(self, folder: Path) -> dict[str, Any]:
        result = search(self.problem(), budget_s=NEVER_S, effort=EFFORT)
        return {
            "plan": canonical(result.plan),
            "step_s": result.simulation.step_s.hex(),
            "simulated": result.simulated,
            "candidates": len(result.candidates),
        }


def _segment(random: Random, name: str) -> Segment:
    def time(least_s: float, most_s: float) -> dict[str, ComputeTime]:
        sample_s = random.uniform(least_s, most_s)
        fixed_s = random.choice([0.0, 2e-4])
        return {kind: ComputeTime(fixed_s=fixed_s, sample_s=sample_s / speed) for kind, speed in KINDS.items()}

    state = random.randrange(1, 20) * 10**6
    saved = random.randrange(1, 10) * 10**5
    return Segment(
        name=name,
        forward_s=time(2e-4, 2e-3),
        input_s=time(2e-4, 2e-3),
        weight_s=time(1e-4, 1e-3),
        update_s={kind: state * 1e-11 / speed for kind, speed in KINDS.items()},
        parameter_bytes=state // 4,
        state_bytes=state,
        optimizer_bytes=state // 2,
        saved_bytes=saved,
        late_bytes=saved // 10,
        forward_work_bytes=saved // 2,
        backward_work_bytes=saved // 2,
    )


def _links(host: list[int]) -> Links:
    count = len(host)
    near = {a: {b: host[a] == host[b] for b in range(count)} for a in range(count)}
    return Links(
        latency_s={a: {b: 1e-5 if near[a][b] else 1e-3 for b in near[a]} for a in near},
        bandwidth_bps={a: {b: 5e9 if near[a][b] else 1e8 for b in near[a]} for a in near},
    )


def schedules(folder: Path) -> dict[str, Any]:
    """Record the tables of all named schedules, for routes of several shapes."""
    chain = tuple(tuple((stage,) for _ in range(6)) for stage in range(3))
    folded = tuple(tuple((device,) for _ in range(5)) for device in (0, 1, 1, 0))
    shared = (tuple((micro % 2,) for micro in range(5)), tuple((2,) for _ in range(5)))
    tables = {
        f"{name} {place}": named_schedule(name, routes).lines()
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
        for place, routes in enumerate((chain, folded, shared))
    }
    return {"plan": {name: hash_of(lines) for name, lines in tables.items()}}


def predictions(folder: Path) -> dict[str, Any]:
    """Record what is predicted of plans that nobody searched for: even cuts, with each schedule and policy."""
    problem = Search(seed=3, segments=4, devices=("quick", "half")).problem()
    found = {}
    for schedule in ("gpipe", "1f1b", "zb-h1", "interleaved", "zbv"):
        devices = (0, 1, 1, 0) if schedule == "zbv" else (0, 1, 0, 1) if schedule == "interleaved" else (0, 0, 1, 1)
        for policy in ("keep", "recompute", "offload", "swap"):
            stages = [
                {"segments": [one.name], "replicas": [[device]], "shares": [1.0], POLICY: policy}
                for one, device in zip(problem.segments, devices, strict=True)
            ]
            plan = Plan.from_json(json.dumps({"stages": stages, "micro_batch": 4, "schedule": schedule}))
            predicted, _ = predict(problem, plan)
            found[f"{schedule} {policy}"] = hash_of(
                [predicted.step_s, predicted.bubble, predicted.peak_bytes, predicted.stages_s]
            )
    return {"plan": found}


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "search: three devices": Search(seed=1),
    "search: two hosts": Search(seed=2, devices=("quick", "quick", "half", "half"), hosts=2),
    "search: little memory": Search(seed=3, room=0.3),
    "search: little memory, sharded, on the host": Search(
        seed=4, room=0.3, devices=("quick", "quick"), more={"sharded": True, "updates": ("device", "host")}
    ),
    "search: late gradients": Search(
        seed=5, devices=("quick", "half"), more={"staleness": 1, "schedules": ("1f1b", "zb-h1", "async-1f1b")}
    ),
    "search: late gradients, little memory": Search(
        seed=6, room=0.6, devices=("quick", "half"), more={"staleness": 1, "schedules": ("1f1b", "async-1f1b")}
    ),
    "search: tied, no replicas": Search(seed=7, tied=True, more={"replicable": False}),
    "search: eight devices": Search(seed=8, segments=12, devices=("quick",) * 4 + ("half",) * 4, hosts=2),
    "schedules": schedules,
    "predictions": predictions,
}
