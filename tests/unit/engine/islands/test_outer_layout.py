"""Layout of the outer step: parts, buckets, fragments, and where the global values are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.islands.outer_layout import (
    due_fragments,
    fragments_of,
    global_sharding,
    outer_buckets,
    outer_bytes,
    outer_parts,
)
from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.errors import UsageError
from onebox.graph.shard.placements import Shard
from onebox.trainer_options import Outer
from onebox.wire import TensorSpec

SPECS = {"a": TensorSpec("float32", (4, 2)), "b": TensorSpec("float32", (3,)), "c": TensorSpec("float64", (5,))}


def sharding(groups: dict[str, tuple[Members, ...]], devices: Members, split: bool = False) -> ShardingSpec:
    """Return the sharding of an island."""
    return ShardingSpec(
        devices=devices,
        holders={name: tuple(worker for own in found for worker in own) for name, found in groups.items()},
        replica_groups=groups,
        stages=(),
        placements={"a": Shard(0, 4)} if split else {},
        ranks={worker: rank for rank, worker in enumerate(devices)} if split else {},
    )


REPLICAS = sharding(dict.fromkeys(SPECS, ((0, 1),)), (0, 1))
PIPELINE = sharding({"a": ((2,),), "b": ((3,),), "c": ((2, 3),)}, (2, 3))


def test_the_first_holder_in_each_island_leads() -> None:
    parts = outer_parts([REPLICAS, PIPELINE], list(SPECS))
    assert [(part.name, part.leaders) for part in parts] == [("a", (0, 2)), ("b", (0, 3)), ("c", (0, 2))]
    assert parts[2].groups == ((0, 1), (2, 3))


def test_what_the_same_workers_hold_travels_together_by_type() -> None:
    parts = outer_parts([REPLICAS, REPLICAS], list(SPECS))
    buckets = outer_buckets(parts, SPECS, {"a", "b"})
    assert [(bucket.names, bucket.trained) for bucket in buckets] == [(("a", "b"), True), (("c",), False)]
    assert len(outer_buckets(outer_parts([REPLICAS, PIPELINE], list(SPECS)), SPECS, set(SPECS))) == 3


def test_leaders_hold_the_global_values() -> None:
    holdings = [REPLICAS, PIPELINE]
    found = global_sharding(outer_parts(holdings, list(SPECS)), holdings)
    assert found.devices == (0, 2, 3)
    assert found.holders == {"a": (0, 2), "b": (0, 3), "c": (0, 2)}
    assert found.stepped_by(3, ["a", "b", "c"]) == ("b",)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Outer(momentum=0), {2: (32 + 40, 0), 3: (12, 0)}),
        (Outer(), {2: (2 * 32 + 40, 0), 3: (2 * 12, 0)}),
        (Outer(overlap=1), {2: (3 * 32 + 2 * 40, 0), 3: (3 * 12, 0)}),
        (Outer(compression="e3m0"), {2: (2 * 32 + 1024 + 40, 0), 3: (2 * 12 + 1024, 0)}),
        (Outer(compression="e3m0", state="host"), {2: (40, 2 * 32 + 1024), 3: (0, 2 * 12 + 1024)}),
        (
            Outer(compression="int8", overlap=1, state="host"),
            {2: (3 * 260 + 2 * 40, 2 * 32 + 1024), 3: (3 * 260, 2 * 12 + 1024)},
        ),
    ],
    ids=str,
)
def test_the_state_of_the_outer_optimizer_is_counted(options: Outer, expected: dict[int, tuple[int, int]]) -> None:
    """A bucket's residual, and what it gathers, are whole blocks of 256 values."""
    assert outer_bytes(PIPELINE, ["a", "b", "c"], {"a", "b"}, SPECS, options, 2, sums=bool(options.overlap)) == expected


def test_islands_split_a_parameter_alike() -> None:
    split = sharding({"a": ((0,), (1,))}, (0, 1), split=True)
    other = sharding({"a": ((2,), (3,))}, (2, 3), split=True)
    parts = outer_parts([split, other], ["a"])
    assert [part.leaders for part in parts] == [(0, 2), (1, 3)]
    assert global_sharding(parts, [split, other]).replica_groups == {"a": ((0, 2), (1, 3))}
    copies = dict.fromkeys(("b", "c"), ((0,), (1,)))
    more = [sharding({"a": ((0,), (1,))} | copies, (0, 1), split=True)] * 2
    buckets = outer_buckets(outer_parts(more, ["a", "b", "c"]), SPECS, {"a", "b", "c"})
    ways = [(bucket.names, bucket.leaders) for bucket in buckets]
    assert (("a",), (0, 0)) in ways and (("b",), (1, 1)) in ways, "copies are encoded alike, without the shards"
    with pytest.raises(UsageError, match=r"island 0 has a in 2 part\(s\) and island 1 in 1"):
        outer_parts([split, PIPELINE], ["a"])


@given(every=st.integers(1, 12), fragments=st.integers(1, 12))
def test_each_fragment_is_due_once_in_so_many_steps(every: int, fragments: int) -> None:
    fragments = min(fragments, every)
    for start in (1, 1 + every, 1 + 5 * every):
        due = [due_fragments(step, every, fragments) for step in range(start, start + every)]
        assert sorted(each for found in due for each in found) == list(range(fragments))
        assert all(len(found) <= 1 for found in due)


def test_modules_are_not_torn_apart_by_fragments() -> None:
    names = [f"model.{module}.{kind}" for module in range(5) for kind in ("weight", "bias")]
    found = fragments_of(names, 3)
    assert sorted(name for own in found for name in own) == sorted(names)
    assert found[0] == ("model.0.weight", "model.0.bias", "model.3.weight", "model.3.bias")
    assert fragments_of(names[:2], 3) == (tuple(names[:2]), (), ())
