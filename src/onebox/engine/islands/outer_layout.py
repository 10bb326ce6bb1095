"""Layout of the outer step: what is averaged between islands, by which workers, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from onebox.engine.memory.initial_contents import StateBytes
from onebox.engine.partition.gradient_buckets import fill_buckets
from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.errors import UsageError
from onebox.graph.shard.placements import Shard
from onebox.trainer_options import Outer
from onebox.wire import TensorSpec
from onebox.wire.gradient_codecs import CODED_TYPES, encoded_bytes, padded_elements
from onebox.wire.program import ITEM_BYTES

OUTER_BUCKET_BYTES = 8 << 20
"""Approximate bytes of a bucket: a tenth of a second of 600 Mbit/s, so that round trips matter little."""


@dataclass(frozen=True, kw_only=True)
class OuterPart:
    """A parameter or buffer, or a shard of one, that islands average.

    Args:
        name: Its name.
        groups: For each island, the workers that hold it; the first of them is its leader there.
        split: Whether it is a shard.
    """

    name: str
    groups: tuple[Members, ...]
    split: bool = False

    @property
    def leaders(self) -> Members:
        """The workers that average it and hold its global value: one of each island."""
        return tuple(members[0] for members in self.groups)


@dataclass(frozen=True, kw_only=True)
class OuterBucket:
    """Parts that travel together: held by the same workers, and of one element type.

    Shards travel apart from the rest, of which all ranks hold copies: so these are encoded alike.

    Args:
        names: Their names.
        groups: As of each :class:`OuterPart`.
        trained: Whether they are parameters, which the outer optimizer updates; else buffers, which are averaged.
    """

    names: tuple[str, ...]
    groups: tuple[Members, ...]
    trained: bool

    @property
    def leaders(self) -> Members:
        """The workers that average them: one of each island."""
        return tuple(members[0] for members in self.groups)


def outer_parts(holdings: Sequence[ShardingSpec], names: Sequence[str]) -> tuple[OuterPart, ...]:
    """Return the parts of parameters and buffers that islands average.

    Args:
        holdings: Sharding of the state in each island.
        names: Parameters and buffers.

    Raises:
        UsageError: Islands split one of them differently.
    """
    found = []
    for name in names:
        circles = [own.replica_groups[name] for own in holdings]
        for island, (own, circle) in enumerate(zip(holdings, circles, strict=True)):
            if own.placement(name) != holdings[0].placement(name) or len(circle) != len(circles[0]):
                raise UsageError(
                    f"island 0 has {name} in {len(circles[0])} part(s) and island {island} in {len(circle)}: islands "
                    "whose plans split layers have to split them alike; give them such plans, or none that splits"
                )
        split = isinstance(holdings[0].placement(name), Shard)
        found += [OuterPart(name=name, groups=groups, split=split) for groups in zip(*circles, strict=True)]
    return tuple(found)


def outer_buckets(
    parts: Sequence[OuterPart], specs: Mapping[str, TensorSpec], trained: Collection[str]
) -> tuple[OuterBucket, ...]:
    """Return the buckets in which parts travel, in the order in which all workers exchange them.

    Args:
        parts: The parts.
        specs: The spec of each name, or of its largest shard.
        trained: Names of the parameters among them.
    """
    alike: dict[tuple[tuple[Members, ...], bool, bool], list[str]] = {}
    for part in parts:
        alike.setdefault((part.groups, part.name in trained, part.split), []).append(part.name)
    return tuple(
        OuterBucket(names=tuple(names), groups=groups, trained=updated)
        for (groups, updated, _), own in alike.items()
        for names in fill_buckets(own, specs, OUTER_BUCKET_BYTES)
    )


def fragments_of(names: Sequence[str], count: int) -> tuple[tuple[str, ...], ...]:
    """Divide parameters and buffers into fragments by their modules, every ``count``-th module into one fragment.

    The strided pattern of Streaming DiLoCo (arXiv:2501.18512, section 2.2), with the modules that own parameters as its
    layers.

    Args:
        names: In the order of the model.
        count: Number of fragments; those of a model with fewer modules are empty.

    Example:
        >>> fragments_of(["model.0.weight", "model.0.bias", "model.1.weight", "model.2.weight"], 2)
        (('model.0.weight', 'model.0.bias', 'model.2.weight'), ('model.1.weight',))
    """
    modules = {module: place for place, module in enumerate(dict.fromkeys(name.rpartition(".")[0] for name in names))}
    return tuple(
        tuple(name for name in names if modules[name.rpartition(".")[0]] % count == fragment)
        for fragment in range(count)
    )


def due_fragments(steps: int, every: int, fragments: int) -> tuple[int, ...]:
    """Return the fragments that are synchronised after a number of steps.

    Example:
        >>> [due_fragments(steps, 4, 2) for steps in range(1, 9)]
        [(), (1,), (), (0,), (), (1,), (), (0,)]
    """
    return tuple(f for f in range(fragments) if steps and (steps - f * every // fragments) % every == 0)


def global_sharding(parts: Sequence[OuterPart], holdings: Sequence[ShardingSpec]) -> ShardingSpec:
    """Return the sharding of the global values: their leaders hold them.

    Args:
        parts: The parts.
        holdings: Sharding of the state in each island.
    """
    groups: dict[str, tuple[Members, ...]] = {}
    for part in parts:
        groups[part.name] = (*groups.get(part.name, ()), part.leaders)
    holders = {name: tuple(dict.fromkeys(worker for own in found for worker in own)) for name, found in groups.items()}
    leaders = {worker for own in holders.values() for worker in own}
    return ShardingSpec(
        devices=tuple(worker for own in holdings for worker in own.devices if worker in leaders),
        holders=holders,
        replica_groups=groups,
        stages=(),
        placements={name: spec for name, spec in holdings[0].placements.items() if name in groups},
        ranks={worker: rank for own in holdings for worker, rank in own.ranks.items() if worker in leaders},
    )


def travels_coded(bucket: OuterBucket, specs: Mapping[str, TensorSpec], options: Outer, islands: int) -> bool:
    """Return True if a bucket travels in a lossy codec.

    Args:
        bucket: The bucket.
        specs: The spec of each name.
        options: Options of the outer optimizer.
        islands: Number of islands that exchange it.
    """
    coded = bucket.trained and specs[bucket.names[0]].dtype in CODED_TYPES
    return coded and options.compression != "none" and islands > 1


def outer_bytes(
    holdings: ShardingSpec,
    names: Sequence[str],
    trained: Collection[str],
    specs: Mapping[str, TensorSpec],
    options: Outer,
    islands: int,
    *,
    sums: bool,
) -> dict[int, StateBytes]:
    """Return the bytes of global values and of the outer optimizer's state on the workers of an island.

    Where islands are cut differently, residuals may take some blocks more.

    Args:
        holdings: Sharding of the state in the island.
        names: What islands average, in the order of the model.
        trained: Parameters among it, which the outer optimizer updates.
        specs: The spec of each of them.
        options: Options of the outer optimizer.
        islands: Number of islands.
        sums: Whether sums are kept before they are applied.
    """
    found: dict[int, StateBytes] = {}
    for own in map(set, fragments_of(names, options.fragments)):
        for bucket in outer_buckets(outer_parts([holdings], [n for n in names if n in own]), specs, trained):
            (leader,), dtype = bucket.leaders, specs[bucket.names[0]].dtype
            size_bytes = sum(holdings.spec(leader, name, specs[name]).size_bytes for name in bucket.names)
            state_bytes = sums_bytes = size_bytes
            if bucket.trained:
                state_bytes += size_bytes * bool(options.momentum)
                if travels_coded(bucket, specs, options, islands):
                    encoded = encoded_bytes(options.compression, size_bytes, ITEM_BYTES[dtype])
                    state_bytes += padded_elements(size_bytes // ITEM_BYTES[dtype], 1) * ITEM_BYTES[dtype]
                    sums_bytes = max(size_bytes, (islands + 1) * encoded)
            before = found.get(leader, StateBytes())
            on_host = state_bytes if options.state == "host" and bucket.trained else 0
            on_device = state_bytes - on_host + sums_bytes * sums
            found[leader] = StateBytes(before.on_device + on_device, before.on_host + on_host)
    return found
