"""Location of a snapshot's parts: workers, slots and offsets. Pure.

A part is a tensor of the state, a shard of one, or an entry of its optimizer state. Each worker keeps a copy of the
parts that it holds. A part that only one worker holds, such as sharded optimizer state, is also sent to another worker,
its buddy; a part that only one host holds is sent to a worker on another host. So every part survives the loss of any
one worker or any one host. If no other worker is reachable, the client is the buddy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from onebox.engine.partition.sharding_spec import Members
from onebox.engine.state.moves import CLIENT, StateItem, StateLayout, WorkerStateSpec
from onebox.graph.shard.placements import Placement
from onebox.wire import TensorSpec
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import Extent, Number, layout


class SnapshotLocation(NamedTuple):
    """Location of a part: worker, slot, and offset of its first byte."""

    worker: int
    slot: int
    start: int


@dataclass(kw_only=True)
class SnapshotLayout:
    """Contents of a snapshot and the location of each part.

    Args:
        placements: Sharding of the names that are split.
        here: Slots on the client, by number.
    """

    placements: Mapping[str, Placement]
    here: dict[int, bytearray] = field(default_factory=dict)
    specs: dict[StateItem, TensorSpec] = field(default_factory=dict)
    numbers: dict[StateItem, Number] = field(default_factory=dict)
    places: dict[StateItem, list[SnapshotLocation]] = field(default_factory=dict)
    slots: set[tuple[int, int]] = field(default_factory=set)
    had: dict[StateItem, set[int]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts, counting each once."""
        return sum(spec.size_bytes for spec in self.specs.values())

    def add(self, item: StateItem, place: SnapshotLocation) -> None:
        """Record a copy of a part."""
        self.places.setdefault(item, []).append(place)
        if place.worker != CLIENT:
            self.slots.add((place.worker, place.slot))
        self.had.setdefault(item, set()).add(place.worker)

    def take(self, worker: int, slot: int, part: WorkerStateSpec, kept: SnapshotContents) -> dict[StateItem, int]:
        """Record a worker's copies in a slot; return the offset of each part."""
        listed = list(zip(part.tensors, kept.specs, strict=True))
        for entry in kept.entries:
            item = part.item(part.trained[entry.parameter], entry.key)
            if isinstance(entry.value, TensorSpec):
                listed.append((item, entry.value))
            else:
                self.numbers[item] = entry.value
        starts, _ = layout(spec for _, spec in listed)
        found = {}
        for (item, spec), start in zip(listed, starts, strict=True):
            self.specs[item] = spec
            self.add(item, SnapshotLocation(worker, slot, start))
            found[item] = start
        self.slots.add((worker, slot))
        return found

    def lose(self, workers: Collection[int]) -> None:
        """Record the loss of workers and all their copies."""
        for item, places in self.places.items():
            self.places[item] = [place for place in places if place.worker not in workers]
        self.slots = {(worker, slot) for worker, slot in self.slots if worker not in workers}

    def missing(self) -> StateItem | None:
        """Return a part of which no copy is left, if there is one."""
        return next((item for item, places in self.places.items() if not places), None)

    def unranked(self, item: StateItem) -> StateItem:
        """Return a part as :meth:`held` names it: scalar entries, which every shard has, have rank 0."""
        scalar = bool(item.key) and not self.specs[item._replace(rank=0)].shape
        return item._replace(rank=0) if scalar else item

    def held(self) -> tuple[StateLayout, dict[tuple[int, StateItem], SnapshotLocation]]:
        """Return the owners of all copies, and the location of each."""
        parts: dict[int, list[StateItem]] = {}
        located: dict[tuple[int, StateItem], SnapshotLocation] = {}
        for item, places in self.places.items():
            one = self.unranked(item)
            for place in places:
                if (place.worker, one) not in located:
                    located[place.worker, one] = place
                    parts.setdefault(place.worker, []).append(one)
        scalars = {(item.name, item.key) for item, spec in self.specs.items() if item.key and not spec.shape}
        return StateLayout(parts=parts, placements=self.placements, scalars=scalars), located

    def keys(self, name: str) -> list[str]:
        """Return the keys of a parameter's optimizer entries."""
        found = (item.key for item in (*self.specs, *self.numbers) if item.name == name and item.key)
        return list(dict.fromkeys(found))

    def number(self, item: StateItem) -> tuple[Number] | None:
        """Return the number of a scalar entry, in a tuple; ``None`` for a tensor."""
        for rank in (item.rank, 0):
            if (at := item._replace(rank=rank)) in self.numbers:
                return (self.numbers[at],)
        return None

    def has(self, name: str) -> bool:
        """Return whether it contains a parameter or buffer."""
        return StateItem(name, "", 0) in self.specs


def join_runs(
    starts: Mapping[StateItem, int], specs: Mapping[StateItem, TensorSpec], wanted: Callable[[StateItem], bool]
) -> list[Extent]:
    """Return the byte ranges of a slot that hold selected parts.

    Args:
        starts: Offset of each part in the slot, in order.
        specs: Spec of each part.
        wanted: Selects parts.
    """
    runs: list[Extent] = []
    for item, start in starts.items():
        _, size = layout([specs[item]])
        if not wanted(item):
            continue
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((start, size))
    return [run for run in runs if run[1]]


def behind_runs(
    starts: Mapping[StateItem, int], runs: Sequence[Extent], wanted: Callable[[StateItem], bool]
) -> dict[StateItem, int]:
    """Return the offsets of selected parts after their byte ranges have been concatenated."""
    found = {}
    for item, start in starts.items():
        if wanted(item):
            end = 0
            for first, size in runs:
                if first <= start < first + size:
                    found[item] = end + start - first
                end += size
            found.setdefault(item, 0)  # an empty part has no definite place
    return found


@dataclass(frozen=True, kw_only=True)
class BuddyTransfer:
    """Parts that a worker sends to another worker for redundancy.

    Args:
        buddy: The receiver; :data:`CLIENT` if there is no worker for it.
        names: Names whose parts are sent.
        remembered: Further names of which only the optimizer state is sent.
    """

    buddy: int
    names: frozenset[str]
    remembered: frozenset[str] = frozenset()

    def has(self, item: StateItem) -> bool:
        """Return whether a part is sent."""
        return item.name in self.names or bool(item.key and item.name in self.remembered)


def find_buddies(
    replica_groups: Mapping[str, Iterable[Members]],
    sizes: Mapping[str, int],
    workers: Sequence[int],
    hosts: Mapping[int, str],
    *,
    owners: Mapping[str, Iterable[int]] = MappingProxyType({}),
    reachable: bool = True,
) -> dict[int, BuddyTransfer]:
    """Return the redundancy transfers of each worker.

    Args:
        circles: For each name, the sets of workers that hold the same part of it.
        sizes: Bytes of each name.
        workers: All workers, including those that hold nothing, in order of preference.
        hosts: Host of each worker.
        owners: For each name whose optimizer state is on some workers only, those workers.
        reachable: Whether workers can connect to each other.

    Returns:
        The transfer of each worker that has to send parts.
    """
    several = len({hosts[worker] for worker in workers}) > 1
    exposed: dict[int, set[str]] = {}
    for name, sets in replica_groups.items():
        for members in sets:
            where = {hosts[member] for member in members}
            if len(where) > 1 or (len(members) > 1 and not several):
                continue
            exposed.setdefault(members[0], set()).add(name)
    remembered: dict[int, set[str]] = {}
    for name, alone in owners.items():
        for worker in alone:
            if name not in exposed.get(worker, ()):
                remembered.setdefault(worker, set()).add(name)
    load = dict.fromkeys(workers, 0)
    order = {worker: place for place, worker in enumerate(workers)}
    found = {}
    for worker in sorted({*exposed, *remembered}, key=lambda one: order[one]):
        names, more = frozenset(exposed.get(worker, ())), frozenset(remembered.get(worker, ()))
        others = [other for other in workers if other != worker] if reachable else []
        far = [other for other in others if hosts[other] != hosts[worker]]
        if not others:
            found[worker] = BuddyTransfer(buddy=CLIENT, names=names, remembered=more)
            continue
        after = {other: (order[other] - order[worker]) % len(workers) for other in others}
        buddy = min(far or others, key=lambda other: (load[other], after[other]))
        load[buddy] += max(1, sum(sizes[name] for name in names | more))
        found[worker] = BuddyTransfer(buddy=buddy, names=names, remembered=more)
    return found
