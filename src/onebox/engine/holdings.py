"""Holdings: which worker holds which parameter and buffer under a plan, and which workers must agree. Pure.

A parameter is held by every device of every stage that reads it or makes a part of its gradient: the replicas of a
stage, and the stages that a tied weight is in, are the same case. Its gradient is summed over its holders, and each of
them steps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onebox.graph import ModelPrograms
from onebox.plan import Plan

Members = tuple[int, ...]
"""Workers of a group, in the order of the plan."""


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Who holds what.

    Args:
        devices: The workers of the plan.
        holders: For each parameter and buffer that the programs name, the workers that hold it.
        stages: For each stage, the workers of its replicas.
        makers: For each parameter, the stages that make a part of its gradient.
    """

    devices: Members
    holders: Mapping[str, Members]
    stages: tuple[Members, ...]
    makers: Mapping[str, tuple[int, ...]]

    def held_by(self, worker: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return which of some names a worker holds, in their order."""
        return tuple(name for name in names if worker in self.holders.get(name, ()))

    def owned_by(self, worker: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return which of some names a worker is the first holder of; each name has one."""
        return tuple(name for name in names if self.holders.get(name, (-1,))[0] == worker)

    def groups(self, trained: Iterable[str], changed: Iterable[str], *, everybody: bool) -> list[Members]:
        """Return the sets of workers that exchange anything, the largest first.

        Args:
            trained: Parameters whose gradients are summed.
            changed: Buffers that change with the data.
            everybody: Whether all workers of the plan exchange something: values between stages, or a norm.
        """
        found = {self.holders[name] for name in (*trained, *changed)}
        if everybody:
            found.add(self.devices)
        return sorted((members for members in found if len(members) > 1), key=lambda members: (-len(members), members))


def find_holdings(plan: Plan, model: ModelPrograms) -> Holdings:
    """Return who holds what under a plan, given the programs of its stages."""
    parts = [{d for replica in stage.replicas for d in replica} for stage in plan.stages]
    stages = tuple(tuple(d for d in plan.devices if d in part) for part in parts)  # one order for equal sets
    needed: dict[str, set[int]] = {}
    makers: dict[str, set[int]] = {}
    for phase, part in model.phases.items():
        for port in (*part.inputs, *part.outputs):
            if port.kind in ("parameter", "buffer", "update", "gradient"):
                needed.setdefault(str(port.name), set()).update(stages[phase.stage])
            if port.kind == "gradient":
                makers.setdefault(str(port.name), set()).add(phase.stage)
    return Holdings(
        devices=plan.devices,
        holders={name: tuple(d for d in plan.devices if d in found) for name, found in needed.items()},
        stages=stages,
        makers={name: tuple(sorted(found)) for name, found in makers.items()},
    )
