"""Decisions of the re-plan controller as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.plan.model.plan import Plan
from onebox.plan.model.shares import apportion
from onebox.plan.model.stage import Stage

_FEW_NAMES = 3
"""Maximum number of segments that are listed; more are given by the first, the last and their number."""

_FEW_WAYS = 3
"""Maximum number of listed moves of segments; more are given by their number."""


def describe_change(before: Plan, after: Plan, names: Sequence[str], batch: int) -> str:
    """Describe the change from one plan to another.

    Args:
        before: The plan in force.
        after: The plan from then on.
        names: All segments in order, for a plan of one stage.
        batch: Samples of a step.
    """
    parts = _segments_text(_holders(before, names), _holders(after, names))
    for number, (one, other) in enumerate(zip(before.stages, after.stages, strict=False)):
        if one.shares != other.shares and not parts:
            parts.append(_shares_text(number, other, after, batch))
    if (before.schedule, before.table) != (after.schedule, after.table) and not parts:
        named = "a new order" if after.schedule == "table" else f"the order of {after.schedule}"
        parts.append(f"actions go in {named}")
    if before.in_flight != after.in_flight and not parts:
        depth = ", ".join(map(str, after.in_flight)) or "as few as can be"
        parts.append(f"stages have other numbers of micro-batches in flight ({depth})")
    return "; ".join(parts)


def describe_cost(moved_bytes: int, cost_s: float) -> str:
    """Describe the cost of a change."""
    size = f"{moved_bytes / 1e6:.0f} MB" if moved_bytes >= 1e6 else f"{moved_bytes / 1e3:.0f} kB"
    return f"({size}, about {cost_s:.1f} s)" if moved_bytes else f"(about {cost_s:.1f} s)"


def _holders(plan: Plan, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the devices of each segment."""
    return {
        name: tuple(device for replica in stage.replicas for device in replica)
        for stage in plan.stages
        for name in (stage.segments or names)
    }


def _segments_text(before: dict[str, tuple[int, ...]], after: dict[str, tuple[int, ...]]) -> list[str]:
    ways: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, devices in after.items():
        left = tuple(device for device in before[name] if device not in devices)
        come = tuple(device for device in devices if device not in before[name])
        if come or left:
            ways.setdefault((left, come), []).append(name)
    if len(ways) > _FEW_WAYS:
        touched = sorted({device for left, come in ways for device in (*left, *come)})
        return [f"{sum(map(len, ways.values()))} segments move between devices {', '.join(map(str, touched))}"]
    return [_move_text(names, left, come) for (left, come), names in ways.items()]


def _move_text(names: Sequence[str], left: Sequence[int], come: Sequence[int]) -> str:
    what = ", ".join(names) if len(names) <= _FEW_NAMES else f"{names[0]} … {names[-1]} ({len(names)})"
    verb = ("segment {} moves" if len(names) == 1 else "segments {} move").format(what)
    ends = [f"{word} {_devices(devices)}" for word, devices in (("from", left), ("to", come)) if devices]
    return " ".join((verb, *ends))


def _shares_text(number: int, stage: Stage, plan: Plan, batch: int) -> str:
    units = len(plan.micro_batches(batch)) if plan.micro_batch is not None else batch
    dealt = apportion(units, stage.shares)
    what = "micro-batches" if plan.micro_batch is not None else "samples"
    each = ", ".join(f"{replica[0]}: {many}" for replica, many in zip(stage.replicas, dealt, strict=True))
    where = f"the replicas of stage {number}" if len(plan.stages) > 1 else "the devices"
    return f"{where} compute other shares of {units} {what} ({each})"


def _devices(numbers: Sequence[int]) -> str:
    return ("device " if len(numbers) == 1 else "devices ") + ", ".join(map(str, numbers))
