"""Blocks: for a schedule, consecutive stages that the same devices compute are one stage.

A model whose parts have different fates is many stages on few devices, even on one. A schedule that took each of them
for a stage of a pipeline would keep as many micro-batches in flight as there are stages, for nothing. So a schedule is
made for blocks, and spelled out for their stages: forward of a block is that of its stages in order, backward that of
its stages from the last to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

from onebox.plan.schedule import Action, Routes, Schedule
from onebox.plan.schedules import named_schedule
from onebox.plan.synthesis import auto_schedule
from onebox.plan.work import Edge, StageWork, Work

Blocks = tuple[range, ...]
"""The stages of each block."""


def find_blocks(routes: Routes, *, twice: bool = False) -> Blocks:
    """Divide stages into blocks.

    Args:
        routes: Who computes what.
        twice: Whether each device is to have two blocks, if it can: the stages of a device that has but one are halved
            then, as where a schedule in the shape of a V turns.

    Example:
        >>> a, b = ((0,), (0,)), ((1,), (1,))
        >>> find_blocks((a, a, b, b, a))
        (range(0, 2), range(2, 4), range(4, 5))
        >>> find_blocks((a, a, b, b, a), twice=True)
        (range(0, 2), range(2, 3), range(3, 4), range(4, 5))
    """
    starts = [stage for stage in range(len(routes)) if not stage or routes[stage] != routes[stage - 1]]
    runs = [range(a, b) for a, b in zip(starts, [*starts[1:], len(routes)], strict=True)]
    if not twice:
        return tuple(runs)
    devices = [{device for replica in routes[run.start] for device in replica} for run in runs]
    found: list[range] = []
    for place, run in enumerate(runs):
        others = set[int]().union(*devices[:place], *devices[place + 1 :])
        middle = (run.start + run.stop) // 2
        alone = len(run) > 1 and not devices[place] & others
        found += [range(run.start, middle), range(middle, run.stop)] if alone else [run]
    return tuple(found)


def block_schedule(name: str, routes: Routes, *, edges: Sequence[tuple[int, int]] | None = None) -> Schedule:
    """Make a schedule that is known by name for blocks of stages; see :func:`~onebox.plan.named_schedule`.

    Args:
        name: One of :data:`~onebox.plan.NAMED`.
        routes: Who computes what.
        edges: Which stage gives values to which; ``None`` is a chain.

    Raises:
        UsageError: There is no such schedule, or an edge does not lead to a later stage.

    Example:
        >>> one_device = (((0,), (0,)), ((0,), (0,)))
        >>> block_schedule("1f1b", one_device).lines()
        ('0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1',)
    """
    blocks = find_blocks(routes, twice=name == "zbv")
    if len(blocks) == len(routes):
        return named_schedule(name, routes, edges=edges)
    between = None if edges is None else sorted(_between(edges, blocks))
    return spelled_out(named_schedule(name, _routes(routes, blocks), edges=between), blocks)


def auto_block_schedule(
    routes: Routes, work: Work, sizes: Sequence[float] | None = None, *, budget_s: float = 0.25
) -> Schedule:
    """Make a schedule for measured times, transfers and memory, for blocks of stages.

    Args:
        routes: Who computes what.
        work: Times, bytes, edges, links, and the memory of the devices.
        sizes: Size of each micro-batch, as a fraction of the plan's; ``None`` stands for 1 each.
        budget_s: See :func:`~onebox.plan.auto_schedule`.

    Raises:
        UsageError: Routes and work do not fit together.
    """
    blocks = find_blocks(routes)
    if len(blocks) == len(routes):
        return auto_schedule(routes, work, sizes, budget_s=budget_s)
    if len(blocks) == 1:  # every order takes as long, and this one the least memory
        return block_schedule("1f1b", routes)
    whole = auto_schedule(_routes(routes, blocks), merged(work, blocks), sizes, budget_s=budget_s)
    return spelled_out(whole, blocks)


def spelled_out(schedule: Schedule, blocks: Blocks) -> Schedule:
    """Return the schedule of stages that a schedule of their blocks stands for."""

    def stages(row: Sequence[Action]) -> Iterator[Action]:
        for kind, block, micro_batch in row:
            own = blocks[block]
            for stage in own if kind == "F" else reversed(own):
                yield Action(kind, stage, micro_batch)

    return Schedule(rows={device: tuple(stages(row)) for device, row in schedule.rows.items()})


def merged(work: Work, blocks: Blocks) -> Work:
    """Return what blocks of stages cost.

    While forward of one of its stages runs, later ones have saved nothing yet, and while its backward runs, they have
    given that back: so much less does it need on top of all that the block saves.

    Args:
        work: What the stages cost.
        blocks: From :func:`find_blocks`.
    """
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    where = _where(blocks)
    for edge in work.edges:
        ends = where[edge.source], where[edge.target]
        if ends[0] != ends[1]:
            forward, backward = edges.get(ends, (0, 0))
            edges[ends] = forward + edge.forward_bytes, backward + edge.backward_bytes
    return replace(
        work,
        stages=tuple(_merged(work.stages[block.start : block.stop]) for block in blocks),
        edges=tuple(
            Edge(source=a, target=b, forward_bytes=forward, backward_bytes=backward)
            for (a, b), (forward, backward) in sorted(edges.items())
        ),
    )


def _merged(stages: Sequence[StageWork]) -> StageWork:
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(StageWork)):
        values = [getattr(stage, name) for stage in stages]
        found[name] = _summed(values) if name.endswith("_s") else sum(values)
    saved = accumulate(stage.saved_bytes for stage in stages)
    later = [found["saved_bytes"] - until for until in saved]
    for name in ("forward_work_bytes", "backward_work_bytes"):
        found[name] = max(0, *(getattr(stage, name) - less for stage, less in zip(stages, later, strict=True)))
    return StageWork(**found)


def _summed(times: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the sums of what is known of a device for all stages."""
    return {device: sum(time[device] for time in times) for device in times[0] if all(device in time for time in times)}


def _routes(routes: Routes, blocks: Blocks) -> Routes:
    return tuple(routes[block.start] for block in blocks)


def _where(blocks: Blocks) -> list[int]:
    """Return the block of each stage."""
    return [number for number, block in enumerate(blocks) for _ in block]


def _between(edges: Sequence[tuple[int, int]], blocks: Blocks) -> set[tuple[int, int]]:
    where = _where(blocks)
    ends = {(where[source], where[target]) for source, target in edges}
    return {(source, target) for source, target in ends if source != target}
