"""Two emulated hosts of two devices: they are seen, and what goes over the uplink is what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import (
    ComputeTime,
    DeviceSpec,
    Links,
    Plan,
    Problem,
    Segment,
    SegmentValue,
    predict,
    search,
    stage_work,
)
from onebox.pool import Link, Pool
from onebox.pool.network.profile import measure_pool

WIDTHS = (64, 256, 16, 256, 64)
BATCH, MICRO_BATCH = 16, 2
UPLINK = Link(latency_s=1e-3, bandwidth_bps=20e6)
HOST = {0: "a", 1: "b", 2: "a", 3: "b"}
"""Neighbours in number are in different hosts."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    links = {(one, other): UPLINK for one in (0, 2) for other in (1, 3)}
    with onebox.open("sim*4", threads=1, links=links) as opened:
        yield opened


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(WIDTHS)))


def problem_of(links: Links) -> Problem:
    """Return what a planner is told: the names and bytes of the real model, and times that are emulated."""
    example = torch.zeros(MICRO_BATCH, WIDTHS[0]), torch.zeros(MICRO_BATCH, WIDTHS[-1])
    names = TracedModel(capture(network(), nn.functional.mse_loss, example), backward=True).segments
    time = {"sim": ComputeTime(sample_s=1e-3)}
    return Problem(
        segments=tuple(Segment(name=name, forward_s=time, input_s=time, weight_s=time, update_s={}) for name in names),
        devices=tuple(DeviceSpec(number=number, type="sim") for number in HOST),
        links=links,
        batch=BATCH,
        micro_batches=(MICRO_BATCH,),
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=4 * width, backward_bytes=4 * width)
            for index, width in enumerate(WIDTHS[1:-1])
        ),
        call_s=1e-4,
        schedules=("1f1b",),
        replicable=False,
    )


def uplink_bytes(pool: Pool, plan: Plan) -> int:
    """Return the bytes that go between hosts in a step, counted by what workers send, and the widths of the layers."""
    loss, model = nn.functional.mse_loss, network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0
    with onebox.Trainer(model, loss, optimizer, pool=pool, plan=plan) as trainer:
        trainer.step(torch.zeros(BATCH, WIDTHS[0]), torch.zeros(BATCH, WIDTHS[-1]))
        trainer.wait()
        cuts, layers = [], 0
        for stage in plan.stages:
            layers += len(stage.segments)
            cuts.append(WIDTHS[layers])
        home = {stage.replicas[0][0]: number for number, stage in enumerate(plan.stages)}
        for event in trainer.events():
            if event.step == 0 and event.name.startswith("send of stage"):
                target = int(event.name.split()[-1])
                if HOST[event.worker] != HOST[target]:
                    total += 4 * MICRO_BATCH * cuts[min(home[event.worker], home[target])]
    return total


def planned_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes that a plan lets go between hosts in a step."""
    devices = [stage.replicas[0][0] for stage in plan.stages]
    edges = stage_work(problem, plan).edges
    across = [edge for edge in edges if HOST[devices[edge.source]] != HOST[devices[edge.target]]]
    return sum(edge.forward_bytes + edge.backward_bytes for edge in across) * (BATCH // MICRO_BATCH)


def test_links_that_are_alike_have_the_speeds_of_one(pool: Pool) -> None:
    profile = measure_pool(pool)
    links = {(a, b): profile.link(a, b) for a, row in profile.latency_s.items() for b in row}
    assert len(links) == 12
    (apart,) = {links[pair] for pair in links if HOST[pair[0]] != HOST[pair[1]]}
    assert apart == pytest.approx((UPLINK.latency_s, UPLINK.bandwidth_bps))
    (near,) = set(links.values()) - {apart}
    assert near[0] < 1e-6 and near[1] > 1e12, "between others a message takes no time"


@pytest.mark.feature("Plans: Plan with slow links between hosts")
def test_what_goes_over_the_uplink_is_what_the_plan_says_and_less_than_with_eyes_shut(pool: Pool) -> None:
    profile = measure_pool(pool)
    assert [(0, 2), (1, 3)] in map(sorted, profile.groups)
    problem = problem_of(Links(latency_s=profile.latency_s, bandwidth_bps=profile.bandwidth_bps))
    plan = search(problem, effort=100_000).plan
    assert len(plan.stages) == 4
    stages = tuple(replace(stage, replicas=((number,),)) for number, stage in enumerate(plan.stages))
    by_number = replace(plan, stages=stages)
    assert uplink_bytes(pool, plan) == planned_bytes(problem, plan) == 2 * 4 * BATCH * 16
    assert uplink_bytes(pool, by_number) == planned_bytes(problem, by_number) == 2 * 4 * BATCH * (256 + 16 + 256)
    assert predict(problem, plan)[0].step_s < predict(problem, by_number)[0].step_s
