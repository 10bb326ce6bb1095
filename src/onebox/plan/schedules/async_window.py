"""Windows: one period of a pipeline that never runs empty, as a table.

Under ``async-1f1b`` a device does not wait for the end of a step: it begins with the forwards of the next one while the
last gradients of this one are still on their way. Cut where a step's first forward begins, its infinite row consists of
equal windows: all forwards of a step, those of its backwards that are done by then, and, with negative numbers, the
remaining backwards of the step before, whose last micro-batch is -1.

The order follows the virtual time of an infinite pipeline of equal devices with instantaneous links: each forward and
backward is at its earliest start, and a device executes its actions in the order of these times. Such rows never
deadlock, whatever the routes, since every action has a later time than its inputs. A stage has as many micro-batches in
flight as it starts until its first gradient is back, as under ``1f1b``. The interval between steps is the least for
which no forward of a step comes after one of the next on any device, and a step's gradients are all there before the
next but one begins; so two versions of the weights are enough (Narayanan et al. 2021, arXiv:2006.09503, PipeDream-2BW).

With the number in flight of ``1f1b``, a micro-batch is back when a device is ready for it, provided that messages take
no time. Where they do, every device waits once in each turn of the pipeline. A device that alternates forwards and
backwards can only run a late backward at its next place for one: a whole turn later for each hop whose messages, there
and back, take at most one turn, two turns later for at most two, and so on. So a stage that is to be always busy needs
that many more in flight for each hop behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onebox.errors import UsageError
from onebox.plan.model.schedule import Action, Routes, Schedule
from onebox.plan.model.work import PlanWork
from onebox.plan.schedules.blocks import between, find_blocks, spelled_out

_TURN = 55440 * 3
"""Virtual time between two micro-batches; divisible, so that a forward is a third of a device's work."""


def steady_window(
    routes: Routes, edges: Sequence[tuple[int, int]] | None = None, in_flight: Sequence[int] = ()
) -> Schedule:
    """Return one steady window of ``async-1f1b``.

    Args:
        routes: Routes of the micro-batches of one step.
        edges: Pairs of source and target stage; ``None`` is a chain.
        in_flight: For each stage, the micro-batches in flight of each of its replicas; 0 for the rule. A stage has no
            fewer than the stages after it need, and a last stage's backward follows its forward at once.

    Raises:
        UsageError: An edge does not lead to a later stage, or ``in_flight`` is not one number a stage.

    Example:
        >>> two_stages = (((0,), (0,)), ((1,), (1,)))
        >>> steady_window(two_stages).lines()
        ('0: 0F0 0B-1 0F1 0B0', '1: 1F0 1B0 1F1 1B1')
    """
    if in_flight and (len(in_flight) != len(routes) or min(in_flight) < 0):
        raise UsageError(f"in_flight={tuple(in_flight)} of {len(routes)} stages: one number for each is needed, or 0")
    if edges is None:
        edges = [(stage, stage + 1) for stage in range(len(routes) - 1)]
    if any(not 0 <= source < target < len(routes) for source, target in edges):
        raise UsageError(f"edges {list(edges)}: each leads from a stage to a later one of {len(routes)}")
    blocks = find_blocks(routes)
    limits = [max(in_flight[block.start : block.stop], default=0) for block in blocks]
    rows = tuple(routes[block.start] for block in blocks)
    return spelled_out(Schedule(rows=_rows(rows, sorted(between(edges, blocks)), limits)), blocks)


def _rows(routes: Routes, edges: Sequence[tuple[int, int]], in_flight: Sequence[int]) -> dict[int, tuple[Action, ...]]:
    """Return the rows of blocks, sorted by virtual time."""
    count = len(routes[0])
    forward, backward = _times(routes, edges, in_flight)
    held: dict[int, list[int]] = {}
    for stage, row in enumerate(routes):
        for device in sorted({device for replica in row for device in replica}):
            held.setdefault(device, []).append(stage)
    begin = {device: min(forward[stage] for stage in stages) for device, stages in held.items()}
    last = (count - 1) * _TURN
    step = count * _TURN
    for device, stages in held.items():
        step = max(step, last + 2 + max(forward[stage] for stage in stages) - begin[device])
        step = max(step, (last + max(backward[stage] for stage in stages) - begin[device]) // 2 + 1)
    rows = {}
    for device, stages in held.items():
        timed: list[tuple[int, Action]] = []
        for stage in stages:
            for micro_batch in (number for number in range(count) if device in routes[stage][number]):
                timed.append((micro_batch * _TURN + forward[stage], Action("F", stage, micro_batch)))
                when = micro_batch * _TURN + backward[stage]
                late = when >= begin[device] + step
                number = micro_batch - count if late else micro_batch
                timed.append((when - step * late, Action("B", stage, number)))
        rows[device] = tuple(action for _, action in sorted(timed, key=lambda one: (one[0], one[1].stage)))
    return rows


def _times(routes: Routes, edges: Sequence[tuple[int, int]], in_flight: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return when forward and backward of the first micro-batch of each stage begin, in virtual time.

    A device that has several stages spends an equal part of its turn on each, and one of `r` replicas has `r` turns for
    a micro-batch; forward takes a third of that. The backward of a last stage follows at once. Another stage begins as
    many forwards as it has turns until its first backward has passed the stages after it, and its backward follows the
    last of these.
    """
    count = len(routes)
    devices = [{device for replica in row for device in replica} for row in routes]
    held = [max(sum(device in other for other in devices) for device in own) for own in devices]
    replicas = [len(set(row)) for row in routes]
    took = [max(1, _TURN // 3 * many // shared) for many, shared in zip(replicas, held, strict=True)]
    after: list[list[int]] = [[] for _ in routes]
    for source, target in edges:
        after[source].append(target)
    forward = [0] * count
    for stage in range(count):
        for target in after[stage]:
            forward[target] = max(forward[target], forward[stage] + took[stage])
    backward = [0] * count
    ended = [0] * count
    for stage in range(count - 1, -1, -1):
        least = max((backward[target] + 1 for target in after[stage]), default=0)
        back = max((ended[target] for target in after[stage]), default=forward[stage] + took[stage])
        turn = replicas[stage] * _TURN
        held_back = in_flight[stage] or -(-(back + 2 * took[stage] - forward[stage]) // turn)
        last = forward[stage] + (held_back - 1) * turn + took[stage]
        wanted = forward[stage] + 1 if not after[stage] else last if in_flight[stage] else max(back, last)
        backward[stage] = max(wanted, least)
        ended[stage] = max(back, backward[stage]) + 2 * took[stage]
    return forward, backward


_NEGLIGIBLE = 0.02
"""Round-trip message time, as a part of a turn, up to which waiting costs less than the memory of a deeper pipeline."""


def depths(routes: Routes, work: PlanWork) -> tuple[int, ...]:
    """Return the micro-batches in flight of each replica of each stage; empty where the schedule's rule suffices.

    Args:
        routes: Routes of the micro-batches of one step.
        work: Times, edges and links.

    Example:
        >>> from dataclasses import replace
        >>> from onebox.plan.simulate.instance import unit_work
        >>> from onebox.plan.model.work import Edge
        >>> routes = (((0,),), ((1,),), ((2,),))
        >>> depths(routes, unit_work(routes))
        ()
    """
    replicas = [tuple(dict.fromkeys(row)) for row in routes]
    busy_s: dict[int, float] = {}
    for stage, own in enumerate(replicas):
        cost = work.stages[stage]
        for device in (device for replica in own for device in replica):
            seconds = cost.forward_s[device] + cost.input_s[device] + cost.weight_s[device]
            busy_s[device] = busy_s.get(device, 0.0) + seconds / len(own)
    turn_s = max(busy_s.values(), default=0.0)
    if turn_s <= 0:
        return ()
    needed, late = [1] * len(routes), False
    for stage in range(len(routes) - 1, -1, -1):
        for edge in (edge for edge in work.edges if edge.source == stage and edge.forward_bytes):
            if replicas[stage] == replicas[edge.target]:
                needed[stage] = max(needed[stage], needed[edge.target])
                continue
            there_s = max(
                work.links.seconds(a[0], b[0], edge.forward_bytes) + work.links.seconds(b[0], a[0], edge.backward_bytes)
                for a in replicas[stage]
                for b in replicas[edge.target]
            )
            turns = math.ceil(there_s / turn_s) if there_s > _NEGLIGIBLE * turn_s else 0
            late = late or turns > 0
            needed[stage] = max(needed[stage], needed[edge.target] + 1 + turns)
    if not late:
        return ()
    return tuple(-(-count // len(own)) for count, own in zip(needed, replicas, strict=True))
