"""Prediction of islands from their compiled plans: what outer steps exchange, and how long steps take. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.engine.compile.compiler import Compiler
from onebox.engine.islands.outer_layout import (
    due_fragments,
    fragments_of,
    outer_buckets,
    outer_parts,
    travels_coded,
)
from onebox.engine.islands.outer_optimizer import averaged_buffers
from onebox.errors import UsageError
from onebox.plan import Links, Plan
from onebox.plan.evaluate.islands import IslandsPrediction, OuterSchedule, OuterSum, outer_step_s, outer_traffic
from onebox.plan.model.problem import HOST_UPDATE_S
from onebox.trainer_options import Outer
from onebox.wire.gradient_codecs import encoded_bytes
from onebox.wire.program import ITEM_BYTES


def outer_schedule(compilers: Sequence[Compiler], outer: Outer) -> OuterSchedule:
    """Return the outer steps of islands.

    Args:
        compilers: The compiler of each island's plan.
        outer: The outer optimizer.

    Raises:
        UsageError: Islands split a parameter differently.
    """
    first, holdings, count = compilers[0], [compiler.holdings for compiler in compilers], len(compilers)
    averaged = {*first.trained, *averaged_buffers(first)}
    names = [name for name in first.state.tensors if name in averaged]
    specs = {name: first.state.spec(name) for name in names}
    parts = outer_parts(holdings, names)
    fragments = []
    for own in map(set, fragments_of(names, outer.fragments)):
        sums = []
        for bucket in outer_buckets([part for part in parts if part.name in own], specs, set(first.trained)):
            leader = bucket.leaders[0]
            size = sum(holdings[0].spec(leader, name, specs[name]).size_bytes for name in bucket.names)
            sent = size
            if travels_coded(bucket, specs, outer, count):
                # each leader sends its codes to all others: as much as half of all in a ring, which is passed twice
                encoded = encoded_bytes(outer.compression, size, ITEM_BYTES[specs[bucket.names[0]].dtype])
                sent = encoded * count // 2
            sums.append(OuterSum(groups=bucket.groups, size_bytes=size, travelling_bytes=sent))
        fragments.append(tuple(sums))
    steps = range(outer.every + 1, 2 * outer.every + 1)
    begins = tuple(due_fragments(step, outer.every, outer.fragments) for step in steps)
    return OuterSchedule(begins=begins, overlap=outer.overlap, fragments=tuple(fragments))


def predict_islands(plans: Sequence[Plan], outer: OuterSchedule, links: Links) -> IslandsPrediction:
    """Predict a run of islands.

    The outer optimizer's computing is assumed to take as long as that of an optimizer in a host's memory.

    Args:
        plans: The plan of each island, with its prediction for its part of the batch.
        outer: The outer steps.
        links: Links between all devices.

    Raises:
        UsageError: A plan has no prediction.
    """
    predictions = [plan.predicted for plan in plans if plan.predicted is not None]
    if len(predictions) < len(plans):
        raise UsageError("a plan of an island has no prediction; onebox.make_plan(islands=...) returns plans with one")
    islands_s = tuple(each.step_s for each in predictions)
    held: dict[int, int] = {}
    for each in (each for own in outer.fragments for each in own):
        for leader in each.leaders:
            held[leader] = held.get(leader, 0) + each.size_bytes
    update_s = [HOST_UPDATE_S * max((held.get(device, 0) for device in plan.devices), default=0) for plan in plans]
    step_s, sums_s = outer_step_s(islands_s, outer, links, update_s)
    return IslandsPrediction(
        batch=sum(each.batch for each in predictions),
        step_s=step_s,
        islands_s=islands_s,
        sums_s=sums_s,
        traffic=outer_traffic(outer, links),
    )
