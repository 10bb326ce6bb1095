"""Plan repair: the same plan without lost devices, as long as its shape can be kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from onebox.plan import Plan, Stage

Replica = tuple[int, ...]


def reduced_plan(plan: Plan, gone: Collection[int], idle: Sequence[int], batch: int) -> Plan | None:
    """Return a plan with the same stages and micro-batches without some devices, or ``None`` if there is none.

    Replicas on lost devices are dropped if their stage has others. For a stage without any replica left, replacements
    are, in this order: devices that the plan does not use, the rest of replicas that were split, and replicas of the
    stages that have most. A stage whose layers are split, and for which there are too few devices, is split over fewer.

    Args:
        plan: The plan.
        gone: Lost devices.
        idle: Devices that the plan does not use.
        batch: Samples of a batch; if the plan has one micro-batch for each replica, their size stays the maximum.

    Example:
        >>> reduced_plan(Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=4), {1}, [], 16).devices
        (0,)
    """
    lost = frozenset(gone)
    if not lost & set(plan.devices):
        return plan
    kept = [
        [pair for pair in zip(stage.replicas, stage.shares, strict=True) if not lost & set(pair[0]) and pair[1] > 0]
        for stage in plan.stages
    ]
    bare = [number for number, pairs in enumerate(kept) if not pairs]
    wanted = {number: _least_hurt(plan.stages[number], lost) for number in bare}
    spare = _Spare(plan, lost, idle, kept, [replica for replica in wanted.values() if len(replica) > 1])
    for number, replica in wanted.items():
        places = [device if device not in lost else spare.take(device) for device in replica]
        found = tuple(device for device in places if device is not None)
        if not found:
            return None
        kept[number] = [(found, 1.0)]
    stages = tuple(_stage(stage, pairs) for stage, pairs in zip(plan.stages, kept, strict=True))
    size = plan.micro_batch or max(part.size for part in plan.micro_batches(batch))
    schedule = "1f1b" if plan.schedule in ("table", "auto") else plan.schedule  # those two were made for the old one
    sync = plan.sync if all(stage.ranks == 1 for stage in stages) else "workers"
    return replace(plan, stages=stages, micro_batch=size, schedule=schedule, table=(), sync=sync, predicted=None)


def _least_hurt(stage: Stage, lost: frozenset[int]) -> Replica:
    return min(stage.replicas, key=lambda replica: len(lost & set(replica)))


def _stage(stage: Stage, pairs: Sequence[tuple[Replica, float]]) -> Stage:
    total = sum(share for _, share in pairs)
    replicas = tuple(replica for replica, _ in pairs)
    return replace(stage, replicas=replicas, shares=tuple(share / total for _, share in pairs))


class _Spare:
    """Replacement devices; each replaces one lost device in all its stages.

    Args:
        plan: The plan.
        lost: Lost devices.
        idle: Devices that the plan does not use.
        kept: For each stage the intact replicas, with their shares; replicas lent to others are removed.
        mended: Replicas to restore.
    """

    def __init__(
        self,
        plan: Plan,
        lost: frozenset[int],
        idle: Sequence[int],
        kept: list[list[tuple[Replica, float]]],
        mended: Sequence[Replica],
    ) -> None:
        used = {device for pairs in kept for replica, _ in pairs for device in replica}
        used |= {device for replica in mended for device in replica}
        rest = [device for device in plan.devices if device not in used]
        self._free = [device for device in (*idle, *rest) if device not in lost]
        self._kept = kept
        self._places: dict[int, int] = {}

    def take(self, device: int) -> int | None:
        """Return the replacement for a lost device, or ``None``."""
        if device not in self._places:
            if not self._free:
                self._lend()
            if not self._free:
                return None
            self._places[device] = self._free.pop(0)
        return self._places[device]

    def _lend(self) -> None:
        """Take a replica from the stage that has most, one that is not part of another stage."""
        held = [device for pairs in self._kept for replica, _ in pairs for device in replica]
        for pairs in sorted(self._kept, key=len, reverse=True):
            for place in reversed(range(len(pairs))):
                if len(pairs) > 1 and all(held.count(device) == 1 for device in pairs[place][0]):
                    self._free.extend(pairs.pop(place)[0])
                    return
