"""Blocks: consecutive stages on the same devices, which a schedule treats as one stage.

Activation policies divide a model into many stages on few devices, even on one device. A schedule that treated each of
them as a pipeline stage would keep as many micro-batches in flight as there are stages, without any gain. So a schedule
is made for blocks and expanded to their stages: the forward of a block is that of its stages in order, its backward
that of its stages from last to first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from onebox.plan.model.schedule import Action, Routes, Schedule
from onebox.plan.model.stage import Stage
from onebox.plan.schedules.named import named_schedule
from onebox.plan_names import SCHEDULE_TRAITS

StageBlocks = tuple[range, ...]
"""The stages of each block."""


def block_numbers(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the block number of each stage; a block is consecutive stages with the same replicas and shares."""
    places = [(stage.replicas, stage.shares) for stage in stages]
    return tuple(accumulate(int(number > 0 and place != places[number - 1]) for number, place in enumerate(places)))


def find_blocks(routes: Routes, *, twice: bool = False) -> StageBlocks:
    """Divide stages into blocks.

    Args:
        routes: Routes of the micro-batches.
        twice: Whether to give each device two blocks where possible: the stages of a device with one block are halved,
            as at the turn of a V-shaped schedule.

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
    """Make a named schedule for blocks of stages; see :func:`~onebox.plan.named_schedule`.

    Args:
        name: One of :data:`~onebox.plan.NAMED`.
        routes: Routes of the micro-batches.
        edges: Pairs of source and target stage; ``None`` is a chain.

    Raises:
        UsageError: There is no such schedule, or an edge does not lead to a later stage.

    Example:
        >>> one_device = (((0,), (0,)), ((0,), (0,)))
        >>> block_schedule("1f1b", one_device).lines()
        ('0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1',)
    """
    blocks = find_blocks(routes, twice=name in SCHEDULE_TRAITS and SCHEDULE_TRAITS[name].mirrored)
    if len(blocks) == len(routes):
        return named_schedule(name, routes, edges=edges)
    ends = None if edges is None else sorted(between(edges, blocks))
    return spelled_out(named_schedule(name, tuple(routes[block.start] for block in blocks), edges=ends), blocks)


def spelled_out(schedule: Schedule, blocks: StageBlocks) -> Schedule:
    """Expand a schedule of blocks to the schedule of their stages."""

    def stages(row: Sequence[Action]) -> Iterator[Action]:
        for kind, block, micro_batch in row:
            own = blocks[block]
            for stage in own if kind == "F" else reversed(own):
                yield Action(kind, stage, micro_batch)

    return Schedule(rows={device: tuple(stages(row)) for device, row in schedule.rows.items()})


def between(edges: Sequence[tuple[int, int]], blocks: StageBlocks) -> set[tuple[int, int]]:
    """Return the pairs of source and target block."""
    where = [number for number, block in enumerate(blocks) for _ in block]
    ends = {(where[source], where[target]) for source, target in edges}
    return {(source, target) for source, target in ends if source != target}
