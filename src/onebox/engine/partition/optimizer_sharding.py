"""Sharding of the optimizer: which holder of a parameter has what is remembered of it, and steps it alone. Pure.

The gradient of such a parameter is summed for its owner only; the others get the parameter when it has been stepped. So
what the optimizer remembers is on one worker instead of on every replica, and as many bytes travel as in a sum for all
(Rajbhandari, Rasley, Ruwase and He, ZeRO: memory optimizations toward training trillion parameter models, 2020). A
parameter is owned as a whole, so that optimizers that look at it as a whole, such as Muon, step it as they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from onebox.engine.partition.gradient_buckets import fill_buckets
from onebox.wire import TensorSpec

Members = tuple[int, ...]


class GradientBucket(NamedTuple):
    """Gradients that travel together.

    Args:
        names: Their parameters.
        owner: The only worker that gets the sums; ``None`` where all do.
    """

    names: tuple[str, ...]
    owner: int | None = None


def assign_owners(
    replica_groups: Mapping[str, Sequence[Members]], sizes: Mapping[str, Sequence[int]]
) -> dict[str, Members]:
    """Return the owner of each parameter: for each of its circles one of the members.

    The largest go first, each to the member that has fewest bytes so far (Graham, Bounds on multiprocessing timing
    anomalies, 1969); what has one holder only counts beforehand.

    Args:
        circles: For each parameter the sets of workers that hold the same of it.
        sizes: Bytes of what the members of each of these sets hold.

    Example:
        >>> assign_owners({"a": [(0, 1)], "b": [(0, 1)], "c": [(0, 1)]}, {"a": [5], "b": [3], "c": [3]})
        {'a': (0,), 'b': (1,), 'c': (1,)}
    """
    loads: dict[int, int] = {}
    owners: dict[tuple[str, int], int] = {}
    left: list[tuple[int, int, int, str]] = []
    for place, (name, own) in enumerate(replica_groups.items()):
        for number, members in enumerate(own):
            size_bytes = sizes[name][number]
            if len(members) > 1:
                left.append((-size_bytes, place, number, name))
                continue
            owners[name, number] = members[0]
            loads[members[0]] = loads.get(members[0], 0) + size_bytes
    for negative, _, number, name in sorted(left):
        members = replica_groups[name][number]
        owner = min(members, key=lambda worker: (loads.get(worker, 0), members.index(worker)))
        owners[name, number] = owner
        loads[owner] = loads.get(owner, 0) - negative
    return {name: tuple(owners[name, number] for number in range(len(own))) for name, own in replica_groups.items()}


def buckets_by_owner(
    names: Sequence[str], specs: Mapping[str, TensorSpec], owner_of: Callable[[str], int | None]
) -> list[GradientBucket]:
    """Group gradients into buckets, each of one owner, in the order in which they are complete.

    Args:
        names: Parameters, in the order in which their gradients are made.
        specs: What each gradient is.
        owner_of: The only worker that gets the sum of one; ``None`` where all do.
    """
    groups: dict[int | None, list[str]] = {}
    for name in names:
        groups.setdefault(owner_of(name), []).append(name)
    found = [GradientBucket(tuple(part), owner) for owner, own in groups.items() for part in fill_buckets(own, specs)]
    place = {name: number for number, name in enumerate(names)}
    return sorted(found, key=lambda bucket: place[bucket.names[-1]])
