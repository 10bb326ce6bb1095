"""Holdings: which worker holds which parameter and buffer under a plan, and which workers must agree. Pure.

A parameter is held by every device of every stage that reads it or makes a part of its gradient: the replicas of a
stage, and the stages that a tied weight is in, are the same case. Its gradient is summed over its holders, and each of
them steps it. Where the layers of a stage are split, each rank holds its share, and the same ranks of all replicas sum
theirs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from onebox.cost import AllReduceAlgorithm, DeviceGroups, choose_all_reduce
from onebox.engine.partition.hierarchical_reduction import subgroups
from onebox.engine.partition.optimizer_sharding import assign_owners
from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.graph.shard.placements import REPLICATE, Placement, Shard, local_spec
from onebox.plan import Plan
from onebox.wire import TensorSpec

Members = tuple[int, ...]
"""Workers of a group, in the order of the plan."""


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """Who holds what.

    Args:
        devices: The workers of the plan.
        holders: For each parameter and buffer that the programs name, the workers that hold it or a share of it.
        circles: For each of them, the sets of workers that hold the same: its holders, or the same ranks.
        stages: For each stage, its replicas.
        placements: Of those that are split.
        ranks: For each worker, its rank in the replica that it is in.
        silent: For each parameter that several stages hold, the workers that are not to add their gradient, because
            another rank of their replica adds the same.
        owners: For each parameter that one member of each circle steps alone, that member, in the order of the
            circles; the others are stepped by all who hold them.
        ways: How circles may sum up that may do other than in one ring.
    """

    devices: Members
    holders: Mapping[str, Members]
    replica_groups: Mapping[str, tuple[Members, ...]]
    stages: tuple[tuple[Members, ...], ...]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    silent: Mapping[str, frozenset[int]] = field(default_factory=dict)
    owners: Mapping[str, Members] = field(default_factory=dict)
    ways: Mapping[Members, tuple[AllReduceAlgorithm, ...]] = field(default_factory=dict)

    def held_by(self, worker: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return which of some names a worker holds, in their order."""
        return tuple(name for name in names if worker in self.holders.get(name, ()))

    def stepped_by(self, worker: int, trained: Iterable[str]) -> tuple[str, ...]:
        """Return which of the trained parameters a worker's optimizer steps, in their order."""
        held = self.held_by(worker, trained)
        return tuple(name for name in held if name not in self.owners or worker in self.owners[name])

    def handed_out(self, worker: int, trained: Iterable[str]) -> tuple[str, ...]:
        """Return which of the trained parameters a worker holds and another one steps, in their order."""
        stepped = set(self.stepped_by(worker, trained))
        return tuple(name for name in self.held_by(worker, trained) if name not in stepped)

    def owner(self, members: Members, name: str) -> int | None:
        """Return which member of a circle steps a parameter alone; ``None`` where all do."""
        return self.owners[name][self.replica_groups[name].index(members)] if name in self.owners else None

    def owned_by(self, worker: int, trained: Iterable[str]) -> tuple[str, ...]:
        """Return which of the trained parameters a worker answers for when it is asked about gradients and updates.

        Each of them, or each share of it, has one worker that does.
        """
        return tuple(name for name in trained if worker in self._answering(name))

    def _answering(self, name: str) -> Members:
        owners = self.owners.get(name)
        if owners is None:
            return self.sources(name)
        return owners if isinstance(self.placements.get(name), Shard) else owners[:1]

    def sources(self, name: str) -> Members:
        """Return the workers whose shares are the whole, in the order of their ranks; one where it is not split."""
        if isinstance(self.placements.get(name), Shard):
            return tuple(members[0] for members in self.replica_groups[name])
        return self.holders.get(name, ())[:1]

    def circle(self, worker: int, name: str) -> Members:
        """Return the workers that hold what a worker holds of a name."""
        return next(members for members in self.replica_groups[name] if worker in members)

    def placement(self, name: str) -> Placement:
        """Return how a parameter or buffer is placed."""
        return self.placements.get(name, REPLICATE)

    def share(self, worker: int, name: str) -> int:
        """Return which share a worker holds of a name; 0 where it is not split."""
        return self.ranks.get(worker, 0) if isinstance(self.placements.get(name), Shard) else 0

    def spec(self, worker: int, name: str, whole: TensorSpec) -> TensorSpec:
        """Return what a worker holds of something."""
        return local_spec(whole, self.placement(name), self.ranks.get(worker, 0))

    def parted(self, names: Iterable[str]) -> bool:
        """Tell whether some worker does not hold the whole of some name."""
        return any(self.replica_groups[name] != (self.devices,) for name in names)

    def parts(self, members: Members, size_bytes: int) -> DeviceGroups:
        """Return which parts of a circle sum up first; one where all do at once.

        Args:
            members: The circle.
            size_bytes: Bytes that each member has.
        """
        return choose_all_reduce(self.ways[members], size_bytes).parts if members in self.ways else (members,)

    @property
    def shared_groups(self) -> list[Members]:
        """Return the groups that have a part in the sums of circles."""
        return subgroups(way for ways in self.ways.values() for way in ways)

    def members(self, worker: int, stage: int) -> Members:
        """Return the workers that compute what a worker computes of a stage, on other micro-batches."""
        rank = self.ranks.get(worker, 0)
        found = {replica[rank] for replica in self.stages[stage]}
        return tuple(device for device in self.devices if device in found)

    def groups(self, trained: Iterable[str], changed: Iterable[str], *, everybody: bool) -> list[Members]:
        """Return the sets of workers that exchange anything, the largest first.

        Args:
            trained: Parameters whose gradients are summed.
            changed: Buffers that change with the data.
            everybody: Whether all workers of the plan exchange something: values between stages, or a norm.
        """
        found = {members for name in (*trained, *changed) for members in self.replica_groups[name]}
        found |= {replica for stage in self.stages for replica in stage}
        found |= {*self.shared_groups}
        if everybody:
            found.add(all_workers_group(self.devices, found))
        return sorted((members for members in found if len(members) > 1), key=lambda members: (-len(members), members))


def all_workers_group(devices: Members, groups: Container[Members]) -> Members:
    """Return all workers of a plan as a group.

    In the order of the plan where all of them sum something; else in that of their numbers, so that another plan on the
    same workers has the same group.

    Args:
        devices: The workers, in the order of the plan.
        groups: The groups that sum something, at least.
    """
    return devices if devices in groups else tuple(sorted(devices))


def find_sharding_spec(plan: Plan, parts: PhasePrograms) -> ShardingSpec:
    """Return who holds what under a plan, given the parts of its stages."""
    needed: dict[str, set[int]] = {}
    for phase, program in parts.programs.phases.items():
        for port in (*program.inputs, *program.outputs):
            if port.kind in ("parameter", "rounded", "buffer", "update", "gradient"):
                needed.setdefault(str(port.name), set()).add(phase.stage)
    stages = tuple(stage.replicas for stage in plan.stages)
    ranks = {d: rank for stage in stages for replica in stage if len(replica) > 1 for rank, d in enumerate(replica)}
    holders: dict[str, Members] = {}
    replica_groups: dict[str, tuple[Members, ...]] = {}
    silent: dict[str, frozenset[int]] = {}
    for name, found in needed.items():
        members = {device for stage in found for replica in stages[stage] for device in replica}
        holders[name] = tuple(device for device in plan.devices if device in members)
        replica_groups[name] = (holders[name],)
        if len(found) == 1:
            (stage,) = found
            same = zip(*stages[stage], strict=True)  # equal sets are one group: its members have one order
            replica_groups[name] = tuple(tuple(device for device in plan.devices if device in each) for each in same)
        else:
            later = {device for stage in found for replica in stages[stage] for device in replica[1:]}
            silent[name] = frozenset(later)
    found_all = ShardingSpec(
        devices=plan.devices,
        holders=holders,
        replica_groups=replica_groups,
        stages=stages,
        placements=parts.placements,
        ranks=ranks,
        silent=silent,
    )
    if plan.optimizer == "replicated":
        return found_all
    specs = _gradients(parts)
    replica_groups = {name: replica_groups[name] for name in specs}
    sizes = {
        name: [found_all.spec(members[0], name, specs[name]).size_bytes for members in own]
        for name, own in replica_groups.items()
    }
    return replace(found_all, owners=assign_owners(replica_groups, sizes))


def _gradients(parts: PhasePrograms) -> dict[str, TensorSpec]:
    """Return what the gradient of each parameter is that has one."""
    backwards = [part for phase, part in parts.programs.phases.items() if phase.kind == "B"]
    return {
        str(port.name): spec for part in backwards for port, spec in part.specs().items() if port.kind == "gradient"
    }
