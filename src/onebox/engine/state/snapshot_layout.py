"""Where the parts of a snapshot lie: on which workers, in which slots. Pure.

A part is a tensor of the state, or a share of one that is split, or an entry of what the optimizer remembers of it.
Each worker keeps a copy of what it holds. What only one worker holds, such as what a sharded optimizer remembers, is
sent to another one besides, its buddy; and what only one host holds, to a worker on another host. So the loss of any
one worker, or of any one host, leaves every part somewhere. Where there is no other worker, or none that can be reached
from that one, the client is the buddy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from onebox.engine.partition.sharding_spec import Members
from onebox.graph.shard.placements import Placement
from onebox.wire import TensorSpec
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import Extent, Number, layout

CLIENT = -1
"""Stands in the place of a worker for the client."""


class StateItem(NamedTuple):
    """A part of the state.

    Args:
        name: The parameter or buffer.
        key: Of an entry that the optimizer remembers of it, or of another version of it (see
            :mod:`onebox.engine.partition.weight_versions`); empty for the tensor itself.
        rank: Whose share, where it is split; else 0.
    """

    name: str
    key: str
    rank: int


class SnapshotLocation(NamedTuple):
    """Where a part lies: the worker, its slot, and the first byte."""

    worker: int
    slot: int
    start: int


@dataclass(frozen=True, kw_only=True)
class WorkerStateSpec:
    """What a worker has of the state.

    Args:
        names: Parameters and buffers, in the order in which they are copied.
        trained: Parameters that its optimizer steps, in their order.
        ranks: Its rank, of those names that are split.
        versions: Names, each with the key of a version, that are copied behind these.
    """

    names: tuple[str, ...]
    trained: tuple[str, ...]
    ranks: Mapping[str, int]
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def tensors(self) -> list[StateItem]:
        """The parts of the state that are buffers, in the order in which they are copied."""
        return [*map(self.item, self.names), *(self.item(*version) for version in self.versions)]

    def item(self, name: str, key: str = "") -> StateItem:
        """Return the part of the state that it has of a name."""
        return StateItem(name, key, self.ranks.get(name, 0))


@dataclass(kw_only=True)
class SnapshotLayout:
    """A snapshot: what it is made of, and where each part of that lies.

    Args:
        placements: Of the names that are split.
        here: The slots that lie with the client, by their numbers.
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
        """Bytes of all parts, each counted once."""
        return sum(spec.size_bytes for spec in self.specs.values())

    def add(self, item: StateItem, place: SnapshotLocation) -> None:
        """Take note of a copy of a part."""
        self.places.setdefault(item, []).append(place)
        if place.worker != CLIENT:
            self.slots.add((place.worker, place.slot))
        self.had.setdefault(item, set()).add(place.worker)

    def take(self, worker: int, slot: int, part: WorkerStateSpec, kept: SnapshotContents) -> dict[StateItem, int]:
        """Take note of what a worker has copied to a slot; return where each of its parts begins."""
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
        """Take note that workers, and all that they kept, are lost."""
        for item, places in self.places.items():
            self.places[item] = [place for place in places if place.worker not in workers]
        self.slots = {(worker, slot) for worker, slot in self.slots if worker not in workers}

    def missing(self) -> StateItem | None:
        """Return a part that lies nowhere any more, if there is one."""
        return next((item for item, places in self.places.items() if not places), None)

    def at(self, worker: int, item: StateItem) -> SnapshotLocation | None:
        """Return where a worker has a part."""
        return next((place for place in self.places[item] if place.worker == worker), None)

    def keys(self, name: str) -> list[str]:
        """Return under which keys the optimizer remembers something of a parameter."""
        found = (item.key for item in (*self.specs, *self.numbers) if item.name == name and item.key)
        return list(dict.fromkeys(found))

    def number(self, item: StateItem) -> tuple[Number] | None:
        """Return the number that an entry is, in a tuple; ``None`` where it is a tensor."""
        for rank in (item.rank, 0):
            if (at := item._replace(rank=rank)) in self.numbers:
                return (self.numbers[at],)
        return None

    def has(self, name: str) -> bool:
        """Tell whether it holds a parameter or buffer."""
        return StateItem(name, "", 0) in self.specs


def join_runs(
    starts: Mapping[StateItem, int], specs: Mapping[StateItem, TensorSpec], wanted: Callable[[StateItem], bool]
) -> list[Extent]:
    """Return which bytes of a slot hold some parts.

    Args:
        starts: Where each part in the slot begins, in their order.
        specs: What each is.
        wanted: Tells which.
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
    """Return where some parts begin when the runs that hold them lie one behind the other."""
    found = {}
    for item, start in starts.items():
        if wanted(item):
            end = 0
            for first, size in runs:
                if first <= start < first + size:
                    found[item] = end + start - first
                end += size
            found.setdefault(item, 0)  # one without bytes lies anywhere
    return found


@dataclass(frozen=True, kw_only=True)
class BuddyTransfer:
    """What a worker sends to another one so that it is not the only one who has it.

    Args:
        buddy: To whom; :data:`CLIENT` where there is no worker for it.
        names: Whose parts.
        remembered: Of which besides only what the optimizer remembers.
    """

    buddy: int
    names: frozenset[str]
    remembered: frozenset[str] = frozenset()

    def has(self, item: StateItem) -> bool:
        """Tell whether a part is sent."""
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
    """Return who sends what to whom.

    Args:
        circles: For each name the sets of workers that hold the same of it.
        sizes: Bytes of each name.
        workers: All workers, those that hold nothing too, in the order in which they are preferred.
        hosts: Of each worker.
        owners: For each name of which only some have what the optimizer remembers, those.
        reachable: Whether workers reach each other.

    Returns:
        For each worker that has to what it sends, and to whom.
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
