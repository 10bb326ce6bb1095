"""A pool's topology beside a plan: groups of near devices, and the traffic between them."""

from __future__ import annotations

from onebox.plan import Plan, Problem
from onebox.plan.evaluate.traffic import between_groups, value_traffic
from onebox.plan.model.device_groups import near
from onebox.sizes import size_text


def topology_line(problem: Problem, plan: Plan) -> str:
    """Describe the groups of near devices; empty where all devices are near.

    Args:
        problem: The plan's problem.
        plan: The plan.
    """
    groups = near(problem)[0]
    if len(groups) < 2:
        return ""
    told = "; ".join(" ".join(map(str, group)) for group in groups)
    across = size_text(cross_group_bytes(problem, plan))
    return (
        f"devices near to each other, by their links: {told}; between these go {across} of values and their gradients"
    )


def cross_group_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes of activations and their gradients sent between groups of near devices in a step.

    Args:
        problem: The plan's problem.
        plan: The plan.
    """
    return round(sum(between_groups(value_traffic(problem, plan), near(problem)[0]).values()))
