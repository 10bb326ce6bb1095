"""Sharding of the optimizer: for each parameter, the holder that has its state and updates it alone. Pure.

The gradient of such a parameter is reduced to its owner only; the others receive the updated parameter. So optimizer
state is on one worker instead of on every replica, and as many bytes travel as in an all-reduce (Rajbhandari, Rasley,
Ruwase and He, ZeRO: memory optimizations toward training trillion parameter models, 2020). A parameter is owned as a
whole, so that optimizers that are not elementwise, such as Muon, work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from onebox.engine.partition.gradient_buckets import BUCKET_BYTES, fill_buckets
from onebox.plan_names import GradientCodec
from onebox.wire import TensorSpec
from onebox.wire.gradient_codecs import CODED_TYPES

Members = tuple[int, ...]


class GradientBucket(NamedTuple):
    """Gradients that are exchanged together.

    Args:
        names: Their parameters.
        owner: The only worker that receives the sums; ``None`` for all.
        codec: Lossy codec with which they travel.
    """

    names: tuple[str, ...]
    owner: int | None = None
    codec: GradientCodec = "none"


def assign_owners(
    replica_groups: Mapping[str, Sequence[Members]], sizes: Mapping[str, Sequence[int]]
) -> dict[str, Members]:
    """Return the owners of each parameter: one member of each of its replica groups.

    The largest are assigned first, each to the member with the fewest bytes so far (Graham, Bounds on multiprocessing
    timing anomalies, 1969); parameters with one holder are counted beforehand.

    Args:
        circles: Replica groups of each parameter.
        sizes: Bytes of the part that members of each of these groups hold.

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
    names: Sequence[str],
    specs: Mapping[str, TensorSpec],
    owner_of: Callable[[str], int | None],
    size_bytes: int = BUCKET_BYTES,
    codecs: Mapping[str, GradientCodec] = MappingProxyType({}),
    shards: Collection[str] = (),
) -> list[GradientBucket]:
    """Group gradients into buckets with one owner and one codec each, in the order in which they are complete.

    With a codec, gradients of shards are apart from those of which each rank has a copy: so copies are encoded alike.

    Args:
        names: Parameters, in the order in which their gradients are computed.
        specs: Spec of each gradient.
        owner_of: Returns the only worker that receives a sum; ``None`` for all.
        size_bytes: Approximate size of a bucket.
        codecs: Lossy codecs of gradients that are not exchanged as they are.
        shards: Parameters that are split.
    """
    groups: dict[tuple[int | None, GradientCodec, bool], list[str]] = {}
    for name in names:
        codec = codecs.get(name, "none") if specs[name].dtype in CODED_TYPES else "none"
        groups.setdefault((owner_of(name), codec, codec != "none" and name in shards), []).append(name)
    found = [
        GradientBucket(tuple(part), owner, codec)
        for (owner, codec, _), own in groups.items()
        for part in fill_buckets(own, specs, size_bytes)
    ]
    place = {name: number for number, name in enumerate(names)}
    return sorted(found, key=lambda bucket: place[bucket.names[-1]])
