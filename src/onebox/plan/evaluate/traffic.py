"""Bytes that a step sends from device to device, and from group to group. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onebox.cost import DeviceGroups
from onebox.plan.model.cost_model import CostModel, stage_work
from onebox.plan.model.layout import layout_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem

Traffic = Mapping[tuple[int, int], float]
"""Bytes by sender and receiver, of devices or of groups."""


def value_traffic(problem: Problem, plan: Plan) -> Traffic:
    """Return the bytes of the values, and of their gradients, that the stages of a plan send each other in a step.

    Args:
        problem: The plan's problem.
        plan: The plan.
    """
    routes, parts = plan.routes(problem.batch), plan.micro_batches(problem.batch)
    largest = plan.micro_batch or max(part.size for part in parts)
    found: dict[tuple[int, int], float] = {}
    for edge in stage_work(problem, plan).edges:
        for part, (source, *_), (target, *_) in zip(parts, routes[edge.source], routes[edge.target], strict=True):
            sizes = {(source, target): edge.forward_bytes, (target, source): edge.backward_bytes}
            if source != target:
                for way, size_bytes in sizes.items():
                    found[way] = found.get(way, 0.0) + size_bytes * part.size / largest
    return found


def gradient_traffic(problem: Problem, plan: Plan) -> Traffic:
    """Return the bytes that the replicas of a plan's stages send each other to sum their gradients.

    Args:
        problem: The plan's problem.
        plan: The plan.
    """
    layout, links = layout_of(problem, plan), problem.links
    model = CostModel(replace(problem, sharded=plan.optimizer == "sharded"))
    work, _ = model.work(layout, plan.micro_batches(problem.batch))
    sums = [
        links.sum_traffic(same, stage.gradient_bytes, stage.travelling_bytes)
        for part, stage in zip(layout.parts, work.stages, strict=True)
        for same in zip(*part.replicas, strict=True)
    ]
    for tie in problem.ties:
        holders = (part.devices[0] for part in layout.parts if not set(tie.segments).isdisjoint(part.segments))
        sums.append(links.sum_traffic(tuple(dict.fromkeys(holders)), tie.parameter_bytes))
    return total_traffic(*sums)


def rank_traffic(problem: Problem, plan: Plan) -> Traffic:
    """Return the bytes that devices which split a stage's layers send each other in a step, in rings.

    Args:
        problem: The plan's problem.
        plan: The plan.
    """
    model, found = CostModel(problem), dict[tuple[int, int], float]()
    routes, parts = plan.routes(problem.batch), plan.micro_batches(problem.batch)
    for stage, row in zip(layout_of(problem, plan).parts, routes, strict=True):
        for part, ring in zip(parts, row, strict=True) if stage.ranks > 1 else ():
            both = model.messages(stage.segments, stage.ranks)
            sent = sum(way.fixed_bytes + way.sample_bytes * part.size for way in both)
            for pair in zip(ring, (*ring[1:], ring[0]), strict=True):
                found[pair] = found.get(pair, 0.0) + sent
    return found


def step_traffic(problem: Problem, plan: Plan) -> Traffic:
    """Return the bytes that a step of a plan sends from device to device."""
    values, gradients = value_traffic(problem, plan), gradient_traffic(problem, plan)
    return total_traffic(values, gradients, rank_traffic(problem, plan))


def total_traffic(*several: Traffic) -> Traffic:
    """Return the sum of several."""
    found: dict[tuple[int, int], float] = {}
    for traffic in several:
        for way, size_bytes in traffic.items():
            found[way] = found.get(way, 0.0) + size_bytes
    return found


def between_groups(traffic: Traffic, groups: DeviceGroups) -> Traffic:
    """Return the bytes from group to group, by their places.

    Args:
        traffic: The bytes from device to device.
        groups: Groups of the devices.

    Example:
        >>> between_groups({(0, 1): 5.0, (1, 2): 7.0, (0, 3): 1.0}, ((0, 1), (2, 3)))
        {(0, 1): 8.0}
    """
    home = {device: place for place, group in enumerate(groups) for device in group}
    return total_traffic(*({(home[a], home[b]): size} for (a, b), size in traffic.items() if home[a] != home[b]))
