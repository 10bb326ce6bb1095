"""A new plan for what is left when devices have gone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onebox.errors import PlanError
from onebox.plan import Plan, Stage


def plan_without(plan: Plan, gone: Collection[int], idle: Sequence[int], batch: int) -> Plan:
    """Return a plan that does the same without some devices.

    Replicas on them are dropped where their stage has others; else devices that the plan does not use take their
    places. Micro-batches stay as they are.

    Args:
        plan: The plan.
        gone: Devices that are no more.
        idle: Devices that the plan does not use.
        batch: Samples of a batch; where the plan has a micro-batch for each replica, their size stays the largest.

    Raises:
        PlanError: A stage has nobody left who could compute it.
    """
    if not set(gone) & set(plan.devices):
        return plan
    spare = [device for device in idle if device not in gone]
    stages = []
    for number, stage in enumerate(plan.stages):
        kept = [
            (replica, share)
            for replica, share in zip(stage.replicas, stage.shares, strict=True)
            if not set(replica) & set(gone) and share > 0
        ]
        if not kept:
            places = {device: spare.pop(0) for device in stage.replicas[0] if device in gone and spare}
            if not all(device in places for device in stage.replicas[0] if device in gone):
                raise PlanError(
                    f"stage {number} was on device {', '.join(map(str, stage.replicas[0]))}, which has gone, and no "
                    "other device is free for it: open a pool of the devices that are left, make a plan for it, and "
                    "resume from the last checkpoint",
                    stage=number,
                )
            kept = [(tuple(places.get(device, device) for device in stage.replicas[0]), 1.0)]
        stages.append(
            Stage(
                segments=stage.segments,
                replicas=tuple(replica for replica, _ in kept),
                shares=tuple(share for _, share in kept),
            )
        )
    size = plan.micro_batch or max(part.size for part in plan.micro_batches(batch))
    schedule = "1f1b" if plan.schedule in ("table", "auto") else plan.schedule  # those two were made for the old one
    return Plan(stages=tuple(stages), micro_batch=size, schedule=schedule, sync=plan.sync)
