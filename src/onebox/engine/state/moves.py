"""Planner of state transfers: the moves that lead from one layout of the training state to another. Pure.

A layout assigns parts of tensors to owners: workers, or the client. Uploads, downloads, changes by the user, migrations
and restored snapshots are moves between two layouts; :mod:`onebox.engine.state.move_executor` executes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from onebox.errors import UsageError
from onebox.graph.shard.placements import REPLICATE, Placement, Shard

CLIENT = -1
"""Stands for the client in place of a worker number."""

ENTRIES = "*"
"""Key that stands for all optimizer entries of a parameter."""

Region = Mapping[int, tuple[tuple[int, int], ...]]
"""Elements of a tensor: for each restricted dimension its ranges of indices, as start and end, in ascending order."""

Way = Literal["upload", "download", "peer", "relay"]
"""From the client, to the client, from worker to worker, or from worker to worker through the client."""


class StateItem(NamedTuple):
    """A part of the state.

    Args:
        name: The parameter or buffer.
        key: Key of an optimizer entry or of another version of the tensor (see
            :mod:`onebox.engine.partition.weight_versions`); empty for the tensor itself.
        rank: Rank of the shard if it is split; else 0.
    """

    name: str
    key: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class WorkerStateSpec:
    """The parts of the state on one worker.

    Args:
        names: Parameters and buffers, in copying order.
        trained: Parameters that its optimizer updates, in order.
        ranks: Its rank in the sharding of each split name.
        versions: Names with version keys, copied after ``names``.
    """

    names: tuple[str, ...]
    trained: tuple[str, ...]
    ranks: Mapping[str, int]
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def tensors(self) -> list[StateItem]:
        """Parts of the state that are buffers, in copying order."""
        return [*map(self.item, self.names), *(self.item(*version) for version in self.versions)]

    def item(self, name: str, key: str = "") -> StateItem:
        """Return the worker's part for a name."""
        return StateItem(name, key, self.ranks.get(name, 0))


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Owners of the parts of a state.

    Args:
        parts: The parts that each owner has or needs, in order.
        placements: Sharding of the names that are split, and of their entries.
        scalars: Names and keys of the entries that are not split with their parameter, such as step counts; they have
            rank 0 everywhere.
    """

    parts: Mapping[int, Sequence[StateItem]]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    scalars: Collection[tuple[str, str]] = ()

    def placement(self, item: StateItem) -> Placement:
        """Return the placement of a part's tensor."""
        return REPLICATE if (item.name, item.key) in self.scalars else self.placements.get(item.name, REPLICATE)

    def region(self, item: StateItem) -> Region:
        """Return the elements of the whole tensor that a part has."""
        return shard_region(self.placement(item), item.rank)

    def shards(self, item: StateItem) -> list[StateItem]:
        """Return all parts of a part's tensor."""
        placement = self.placement(item)
        ranks = len(placement.sizes) if isinstance(placement, Shard) else 1
        return [item._replace(rank=rank) for rank in range(ranks)]


class StateMove(NamedTuple):
    """One transfer.

    Args:
        source: The owner that has the elements.
        target: The owner that needs them.
        item: The part that the target needs.
        shard: The part of the source: the same one, unless the tensor is split differently.
        region: The elements of the whole tensor that both parts have; ``None`` if the parts are equal.
        way: The way that they take.
    """

    source: int
    target: int
    item: StateItem
    shard: StateItem
    region: Region | None
    way: Way


def plan_moves(
    before: StateLayout,
    after: StateLayout,
    *,
    sizes: Mapping[str, int] = MappingProxyType({}),
    hosts: Mapping[int, str] = MappingProxyType({}),
    between: Literal["peer", "relay"] = "peer",
) -> tuple[StateMove, ...]:
    """Return the moves that give each owner its parts: every missing element once, and no part that is already there.

    Of several possible sources the client is preferred, which needs no request, then one on the same host, and of these
    the one with the fewest bytes to send so far.

    Args:
        before: The present layout.
        after: The new layout.
        sizes: Bytes of each name; without them, sources are not balanced.
        hosts: Host of each worker.
        between: The way from worker to worker. Parts that are split differently cannot take the direct one.

    Returns:
        The moves, in the order of the new layout.

    Raises:
        UsageError: No owner has a part, or it would have to be split differently on the direct way.
    """
    owners: dict[StateItem, list[int]] = {}
    for owner, items in before.parts.items():
        for item in items:
            owners.setdefault(item, []).append(owner)
    load: Counter[int] = Counter()
    moves = []
    for target, items in after.parts.items():
        for item in items:
            for shard, region in find_sources(before, after, item):
                sources = owners.get(shard, [])
                if region is None and target in sources:
                    continue
                if not sources:
                    raise _nowhere(item, target)

                def costs(one: int, to: int = target) -> tuple[bool, bool, int, int]:
                    return one != CLIENT, hosts.get(one) != hosts.get(to), load[one], one

                source = min(sources, key=costs)
                way: Way = "upload" if source == CLIENT else "download" if target == CLIENT else between
                if way == "peer" and region is not None:
                    raise _nowhere(item, target)
                load[source] += sizes.get(item.name, 0)
                moves.append(StateMove(source, target, item, shard, region, way))
    return tuple(moves)


def _nowhere(item: StateItem, target: int) -> UsageError:
    return UsageError(
        f"the plan wants share {item.rank} of {item.name} on device {target}, and no device has that: a plan that "
        "takes over a run splits layers as the plan before did"
    )


def find_sources(before: StateLayout, after: StateLayout, item: StateItem) -> Iterator[tuple[StateItem, Region | None]]:
    """Yield the parts of one layout that make up a part of another, with the elements to take of each.

    Args:
        before: The layout of the result.
        after: The layout of the part.
        item: The part.
    """
    if before.placement(item) == after.placement(item):
        yield item, None
        return
    for shard in before.shards(item):
        region = intersect(before.region(shard), after.region(item))
        if region is not None:
            yield shard, region


def released(before: StateLayout, after: StateLayout) -> dict[int, tuple[StateItem, ...]]:
    """Return the parts of tensors of which an owner keeps nothing, if there are any, by owner."""
    found = {}
    for owner, items in sorted(before.parts.items()):
        kept = {item[:2] for item in after.parts.get(owner, ())}
        if gone := tuple(item for item in items if item[:2] not in kept):
            found[owner] = gone
    return found


def shard_region(placement: Placement, rank: int) -> Region:
    """Return the elements of a tensor that a rank has."""
    if not isinstance(placement, Shard):
        return {}
    starts = (block * placement.block + placement.start(rank) for block in range(placement.blocks))
    return {placement.dim: tuple((start, start + placement.sizes[rank]) for start in starts)}


def intersect(one: Region, other: Region) -> Region | None:
    """Return the elements in both of two regions; ``None`` if there are none."""
    found = {**one, **other}
    for dim in one.keys() & other.keys():
        pairs = ((max(a, c), min(b, d)) for a, b in one[dim] for c, d in other[dim])
        found[dim] = tuple((start, end) for start, end in pairs if start < end)
        if not found[dim]:
            return None
    return found


def local_start(region: Region, dim: int, index: int) -> int:
    """Return the position of an index of the whole tensor within a part that has it."""
    return sum(max(0, min(index, end) - start) for start, end in region.get(dim, ((0, index),)))
