"""Micro-batches in flight of each stage under ``async-1f1b``, enough that no device waits for messages. Pure.

With the number of ``1f1b``, a micro-batch is back when a device is ready for it, provided that messages take no time.
Where they do, every device waits once in each turn of the pipeline. A device that alternates forwards and backwards can
only run a late backward at its next place for one: a whole turn later for each hop whose messages, there and back, take
at most one turn, two turns later for at most two, and so on. So a stage that is to be always busy needs that many more
in flight for each hop behind it.
"""

from __future__ import annotations

import math

from onebox.plan.model.schedule import Routes
from onebox.plan.model.work import PlanWork

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
