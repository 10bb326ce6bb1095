"""Sharding spec: the workers that hold each parameter and buffer under a plan, and those that must agree. Pure.

Every device of every stage that reads a parameter or contributes to its gradient holds it; replicas of a stage, and
stages that share a tied weight, are the same case. The gradient is summed over the holders, and each of them updates
the parameter. Where the layers of a stage are split, each rank holds its shard, and equal ranks of all replicas form a
group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from onebox.cost import AllReduceAlgorithm, DeviceGroups, choose_all_reduce
from onebox.engine.partition.hierarchical_reduction import group_leaders, subgroups
from onebox.engine.partition.optimizer_sharding import assign_owners
from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.graph.shard.placements import REPLICATE, Placement, Shard, local_spec
from onebox.plan import Plan
from onebox.plan_names import GradientCodec
from onebox.wire import TensorSpec

Members = tuple[int, ...]
"""Workers of a group, in the plan's order."""


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """Holders of each parameter and buffer.

    Args:
        devices: The workers of the plan.
        holders: For each parameter and buffer of the programs, the workers that hold it or a shard of it.
        replica_groups: For each of them, its replica groups: all holders, or those of equal rank.
        stages: Replicas of each stage.
        placements: Placements of the names that are split.
        ranks: For each worker, its rank in its replica.
        silent: For each parameter that several stages hold, the workers that must not add their gradient, because
            another rank of their replica adds the same.
        owners: For each parameter that one member of each replica group updates alone, that member, in the order of the
            groups; other parameters are updated by all holders.
        ways: Reduction algorithms of the groups that may use others than a flat ring, which is the first of them if it
            is one of them.
        codecs: Lossy codecs of the gradients that are not exchanged as they are.
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
    codecs: Mapping[str, GradientCodec] = field(default_factory=dict)

    def held_by(self, worker: int, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names, of those given, that a worker holds, in order."""
        return tuple(name for name in names if worker in self.holders.get(name, ()))

    def stepped_by(self, worker: int, trained: Iterable[str]) -> tuple[str, ...]:
        """Return the trained parameters that a worker's optimizer updates, in order."""
        held = self.held_by(worker, trained)
        return tuple(name for name in held if name not in self.owners or worker in self.owners[name])

    def handed_out(self, worker: int, trained: Iterable[str]) -> tuple[str, ...]:
        """Return the trained parameters that a worker holds and another one updates, in order."""
        stepped = set(self.stepped_by(worker, trained))
        return tuple(name for name in self.held_by(worker, trained) if name not in stepped)

    def owner(self, members: Members, name: str) -> int | None:
        """Return the member of a group that updates a parameter alone; ``None`` if all do."""
        return self.owners[name][self.replica_groups[name].index(members)] if name in self.owners else None

    def owned_by(self, worker: int, trained: Iterable[str]) -> tuple[str, ...]:
        """Return the trained parameters whose gradients and updates a worker reports.

        Each parameter or shard is reported by exactly one worker.
        """
        return tuple(name for name in trained if worker in self._answering(name))

    def _answering(self, name: str) -> Members:
        owners = self.owners.get(name)
        if owners is None:
            return self.sources(name)
        return owners if isinstance(self.placements.get(name), Shard) else owners[:1]

    def sources(self, name: str) -> Members:
        """Return the workers whose shards form the whole, in the order of their ranks; one worker if it is not
        split.
        """
        if isinstance(self.placements.get(name), Shard):
            return tuple(members[0] for members in self.replica_groups[name])
        return self.holders.get(name, ())[:1]

    def circle(self, worker: int, name: str) -> Members:
        """Return the workers that hold the same part of a name as a worker."""
        return next(members for members in self.replica_groups[name] if worker in members)

    def placement(self, name: str) -> Placement:
        """Return the placement of a parameter or buffer."""
        return self.placements.get(name, REPLICATE)

    def share(self, worker: int, name: str) -> int:
        """Return the index of a worker's shard of a name; 0 if it is not split."""
        return self.ranks.get(worker, 0) if isinstance(self.placements.get(name), Shard) else 0

    def spec(self, worker: int, name: str, whole: TensorSpec) -> TensorSpec:
        """Return the spec of a worker's part of a tensor."""
        return local_spec(whole, self.placement(name), self.ranks.get(worker, 0))

    def parted(self, names: Iterable[str]) -> bool:
        """Return whether some worker holds only a part of one of the names."""
        return any(self.replica_groups[name] != (self.devices,) for name in names)

    def parts(self, members: Members, size_bytes: int) -> DeviceGroups:
        """Return the parts of a hierarchical reduction of a group; one part for a flat reduction.

        Args:
            members: The group.
            size_bytes: Bytes on each member.
        """
        return choose_all_reduce(self.ways[members], size_bytes).parts if members in self.ways else (members,)

    def always_in_parts(self, members: Members) -> bool:
        """Return whether all reductions of a group that are for all members are hierarchical."""
        return members in self.ways and all(len(way.parts) > 1 for way in self.ways[members])

    def broadcast_groups(self, worker: int, members: Members) -> list[Members]:
        """Return the groups in which a worker takes part, in order, when the first member of a group broadcasts to all;
        in each the first member is the source.
        """
        if not self.always_in_parts(members):
            return [members]
        parts = self.ways[members][0].parts
        own = next(part for part in parts if worker in part)
        return [group for group in (group_leaders(parts), own) if worker in group and len(group) > 1]

    @property
    def shared_groups(self) -> list[Members]:
        """Return the groups that take part in reductions of other groups."""
        return subgroups(way for ways in self.ways.values() for way in ways)

    def members(self, worker: int, stage: int) -> Members:
        """Return the workers that compute the same part of a stage as a worker, on other micro-batches."""
        rank = self.ranks.get(worker, 0)
        found = {replica[rank] for replica in self.stages[stage]}
        return tuple(device for device in self.devices if device in found)

    def groups(self, trained: Iterable[str], changed: Iterable[str]) -> list[Members]:
        """Return the communication groups, the largest first: that of all workers, which vote on each step, and the
        others without those that always reduce in parts.

        Args:
            trained: Parameters whose gradients are summed.
            changed: Buffers that change with the data.
        """
        summed = {members for name in (*trained, *changed) for members in self.replica_groups[name]}
        whole = {members for name in self.owners for members in self.replica_groups[name]}
        found = {members for members in summed if members in whole or not self.always_in_parts(members)}
        found |= {replica for stage in self.stages for replica in stage}
        found |= {*self.shared_groups}
        found.add(all_workers_group(self.devices, found))
        return sorted((members for members in found if len(members) > 1), key=lambda members: (-len(members), members))


def all_workers_group(devices: Members, groups: Container[Members]) -> Members:
    """Return all workers of a plan as one group.

    They are in the plan's order if that group reduces anything; else in numerical order, so that another plan on the
    same workers has the same group.

    Args:
        devices: The workers, in the order of the plan.
        groups: The groups that perform reductions, at least.
    """
    return devices if devices in groups else tuple(sorted(devices))


def find_sharding_spec(plan: Plan, parts: PhasePrograms) -> ShardingSpec:
    """Return the sharding spec of a plan, given the parts of its stages."""
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
    codecs: dict[str, GradientCodec] = {}
    for name, found in needed.items():
        members = {device for stage in found for replica in stages[stage] for device in replica}
        holders[name] = tuple(device for device in plan.devices if device in members)
        replica_groups[name] = (holders[name],)
        if len(chosen := {plan.stages[stage].gradients for stage in found}) == 1:
            codecs[name] = chosen.pop()
        if len(found) == 1:
            (stage,) = found
            same = zip(*stages[stage], strict=True)  # equal sets are one group: their members have one order
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
        codecs={name: codec for name, codec in codecs.items() if codec != "none"},
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
    """Return the spec of each parameter's gradient, if it has one."""
    backwards = [part for phase, part in parts.programs.phases.items() if phase.kind == "B"]
    return {
        str(port.name): spec for part in backwards for port, spec in part.specs().items() if port.kind == "gradient"
    }
