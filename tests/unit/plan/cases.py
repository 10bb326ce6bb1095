"""Routes and work for tests of schedules: even ones, and random ones for property tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from onebox.plan import Action, Edge, Links, PlanWork, Routes, Schedule, StageWork, deal

LETTERS = {"F": "forward_s", "I": "input_s", "W": "weight_s"}


def even(devices: int, micro_batches: int, stages_per_device: int = 1, *, vee: bool = False) -> Routes:
    """Return routes of a chain with as many stages on each device; with ``vee`` they go there and back."""
    places = list(range(devices))
    rounds = [places[::-1] if vee and turn % 2 else places for turn in range(stages_per_device)]
    return tuple(((device,),) * micro_batches for row in rounds for device in row)


def work_for(
    routes: Routes,
    edges: Sequence[tuple[int, int]] | None = None,
    *,
    seconds: Sequence[tuple[float, float, float]] | None = None,
    update_s: float = 0.0,
    size_bytes: int = 0,
    links: Links | None = None,
    capacity: Mapping[int, int] | None = None,
    call_s: float = 0.0,
    **stage_bytes: int,
) -> PlanWork:
    """Return work on equal devices: one second for each of F, I, W unless said otherwise, over links without cost."""
    if edges is None:
        edges = [(stage, stage + 1) for stage in range(len(routes) - 1)]
    held = [sorted({device for replica in row for device in replica}) for row in routes]
    stages = []
    for devices, (forward, inputs, weight) in zip(held, seconds or [(1.0, 1.0, 1.0)] * len(routes), strict=True):
        stages.append(
            StageWork(
                forward_s=dict.fromkeys(devices, forward),
                input_s=dict.fromkeys(devices, inputs),
                weight_s=dict.fromkeys(devices, weight),
                update_s=dict.fromkeys(devices, update_s),
                **stage_bytes,
            )
        )
    return PlanWork(
        stages=tuple(stages),
        edges=tuple(Edge(source=a, target=b, forward_bytes=size_bytes, backward_bytes=size_bytes) for a, b in edges),
        links=links or equal_links({device for row in held for device in row}),
        capacity_bytes=capacity or {},
        call_s=call_s,
    )


def equal_links(devices: set[int], *, latency_s: float = 0.0, bandwidth_bps: float = float("inf")) -> Links:
    """Return equal links between all devices."""
    return Links(
        latency_s=dict.fromkeys(devices, dict.fromkeys(devices, latency_s)),
        bandwidth_bps=dict.fromkeys(devices, dict.fromkeys(devices, bandwidth_bps)),
    )


def table(text: str) -> Schedule:
    """Read a schedule from lines."""
    return Schedule.parse(text.split("\n"))


def edges_of(work: PlanWork) -> list[tuple[int, int]]:
    """Return the pairs of stages that are joined."""
    return [(edge.source, edge.target) for edge in work.edges]


class Case(NamedTuple):
    """Something to schedule.

    Args:
        routes: Who computes what.
        work: What it costs.
        sizes: Sizes of the micro-batches.
    """

    routes: Routes
    work: PlanWork
    sizes: tuple[float, ...]


@st.composite
def cases(draw: st.DrawFn, *, wide: bool = True) -> Case:
    """Draw a graph of stages, its replicas on some devices, times, links and bytes; with ``wide`` also split layers."""
    stages = draw(st.integers(1, 5))
    count = draw(st.integers(1, 6))
    numbers = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True))
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    edges = [pair for pair in pairs if draw(st.integers(0, 3)) < (3 if pair[1] == pair[0] + 1 else 1)]
    routes = []
    for _ in range(stages):
        order = draw(st.permutations(numbers))
        replicas = [(device,) for device in order[: draw(st.integers(1, len(order)))]]
        if wide and len(order) > 1 and draw(st.integers(0, 5)) == 0:
            replicas = [tuple(order[:2]), *((device,) for device in order[2:])]
        shares = [draw(st.floats(0.2, 1.0)) for _ in replicas]
        routes.append(tuple(replicas[turn] for turn in deal(count, shares)))
    work = _work(draw, tuple(routes), edges)
    sizes = [draw(st.sampled_from([1.0, 1.0, 0.5])) for _ in range(count)]
    return Case(tuple(routes), work, tuple(sizes))


def _work(draw: st.DrawFn, routes: Routes, edges: list[tuple[int, int]]) -> PlanWork:
    devices = sorted({device for row in routes for replica in row for device in replica})
    time = st.sampled_from([0.25, 1.0, 1.3, 2.0])
    size = st.integers(0, 20)
    stages = []
    for row in routes:
        members = sorted({device for replica in row for device in replica})
        times = {name: {device: draw(time) for device in members} for name in LETTERS.values()}
        kinds = ("saved_bytes", "late_bytes", "forward_work_bytes", "backward_work_bytes", "state_bytes")
        stages.append(
            StageWork(
                **times,
                update_s=dict.fromkeys(devices, draw(st.sampled_from([0.0, 0.5]))),  # also of those that might hold it
                gradient_bytes=draw(size),
                **{kind: draw(size) for kind in kinds},
            )
        )
    latency = {a: {b: draw(st.sampled_from([0.0, 0.1])) for b in devices} for a in devices}
    bandwidth = {a: {b: draw(st.sampled_from([5.0, 50.0, float("inf")])) for b in devices} for a in devices}
    capacity = {device: draw(st.integers(20, 200)) for device in devices if draw(st.booleans())}
    return PlanWork(
        stages=tuple(stages),
        edges=tuple(Edge(source=a, target=b, forward_bytes=draw(size), backward_bytes=draw(size)) for a, b in edges),
        links=Links(latency_s=latency, bandwidth_bps=bandwidth),
        capacity_bytes=capacity,
        call_s=draw(st.sampled_from([0.0, 0.01])),
    )


def last_action(row: Sequence[Action], kind: str) -> int:
    """Return the place of the last action of a kind in a row."""
    return max(turn for turn, action in enumerate(row) if action.kind == kind)
