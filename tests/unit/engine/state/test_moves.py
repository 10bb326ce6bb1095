"""Moves between layouts of a state: every missing element once, nothing that is already there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.engine.state.move_executor import copy_region
from onebox.engine.state.moves import (
    CLIENT,
    StateItem,
    StateLayout,
    StateMove,
    intersect,
    local_start,
    plan_moves,
    released,
    shard_region,
)
from onebox.errors import UsageError
from onebox.graph.shard.placements import REPLICATE, Placement, Shard, shard_of

NAMES = tuple("abcdef")
SIZES = {name: 10 * (place + 1) for place, name in enumerate(NAMES)}
HERE = dict.fromkeys(range(4), "here")


def item(name: str, rank: int = 0, key: str = "") -> StateItem:
    """Return a part."""
    return StateItem(name, key, rank)


def layout(parts: Mapping[int, str], ranks: Mapping[int, int] | None = None, **placements: Placement) -> StateLayout:
    """Return a layout in which owners have the parts of their rank."""
    found = {owner: [item(name, (ranks or {}).get(owner, 0)) for name in names] for owner, names in parts.items()}
    return StateLayout(parts=found, placements=placements)


def came(moves: Sequence[StateMove]) -> list[tuple[int, int, str]]:
    """Return the source, target and name of each move."""
    return [(move.source, move.target, move.item.name) for move in moves]


# ---- whole tensors


def test_only_what_a_worker_lacks_moves_and_what_it_does_not_keep_is_released() -> None:
    before, after = layout({0: "abe", 1: "cdf"}), layout({0: "ae", 1: "bcdf"})
    assert plan_moves(before, after, sizes=SIZES, hosts=HERE) == (StateMove(0, 1, item("b"), item("b"), None, "peer"),)
    assert released(before, after) == {0: (item("b"),)}


def test_between_equal_layouts_nothing_moves() -> None:
    same = layout({0: "abe", 1: "cdf"})
    assert plan_moves(same, same) == ()
    assert released(same, same) == {}


def test_copies_are_taken_from_the_same_host_and_from_all_owners_there() -> None:
    before, hosts = layout({0: "ab", 1: "ab", 2: "ab"}), {0: "far", 1: "near", 2: "near", 3: "near"}
    assert came(plan_moves(before, layout({3: "ab"}), sizes=SIZES, hosts=hosts)) == [(1, 3, "a"), (2, 3, "b")]


def test_entries_of_one_owner_come_from_the_owner() -> None:
    before = StateLayout(parts={0: [item("a"), item("a", key="*")], 1: [item("a"), item("b", key="*")]})
    after = StateLayout(parts={0: [item("a"), item("b", key="*")], 1: [item("a"), item("a", key="*")]})
    assert came(plan_moves(before, after)) == [(1, 0, "b"), (0, 1, "a")]


def test_the_client_is_preferred_and_gives_the_way_its_name() -> None:
    before = layout({0: "a", CLIENT: "ab"})
    assert [(move.source, move.way) for move in plan_moves(before, layout({0: "a", 1: "a"}))] == [(CLIENT, "upload")]
    assert [move.way for move in plan_moves(layout({0: "a"}), layout({CLIENT: "a"}))] == ["download"]
    assert [move.way for move in plan_moves(layout({0: "a"}), layout({1: "a"}), between="relay")] == ["relay"]


def test_a_part_that_nobody_has_is_refused() -> None:
    with pytest.raises(UsageError, match="share 0 of b on device 1"):
        plan_moves(layout({0: "a"}), layout({1: "b"}))


# ---- split tensors

HALVES = Shard(0, (3, 3))


def test_shares_go_to_the_owners_of_those_shares() -> None:
    before, after = layout({0: "a", 1: "a"}, {1: 1}, a=HALVES), layout({0: "a", 1: "a"}, {0: 1}, a=HALVES)
    assert came(plan_moves(before, after)) == [(1, 0, "a"), (0, 1, "a")]


def test_directly_no_other_share_is_made() -> None:
    before = layout({0: "a"})
    with pytest.raises(UsageError, match="share 1 of a on device 1"):
        plan_moves(before, layout({1: "a"}, {1: 1}, a=HALVES))
    moves = plan_moves(before, layout({1: "a"}, {1: 1}, a=HALVES), between="relay")
    assert moves == (StateMove(0, 1, item("a", 1), item("a"), {0: ((3, 6),)}, "relay"),)


def test_only_shares_with_wanted_rows_move() -> None:
    before = layout({0: "a", 1: "a", 2: "a"}, {1: 1, 2: 2}, a=Shard(0, (2, 2, 2)))
    moves = plan_moves(before, layout({3: "a"}, a=HALVES), between="relay")
    assert [(move.source, move.region) for move in moves] == [(0, {0: ((0, 2),)}), (1, {0: ((2, 3),)})]


def test_scalar_entries_are_not_split() -> None:
    one, both = (item("a", key="step"),), {("a", "step")}
    before = StateLayout(parts={0: one, 1: one}, placements={"a": HALVES}, scalars=both)
    after = StateLayout(parts={1: one, 2: one}, placements={"a": Shard(1, (2, 2))}, scalars=both)
    assert [(move.source, move.target, move.region) for move in plan_moves(before, after)] == [(0, 2, None)]


def test_regions() -> None:
    blocks = Shard(1, (1, 2), blocks=2)
    assert shard_region(REPLICATE, 0) == {}
    assert shard_region(blocks, 1) == {1: ((1, 3), (4, 6))}
    assert intersect(shard_region(blocks, 1), shard_region(HALVES, 1)) == {0: ((3, 6),), 1: ((1, 3), (4, 6))}
    assert intersect({0: ((0, 3),)}, {0: ((3, 6),)}) is None
    assert [local_start({1: ((1, 3), (4, 6))}, 1, index) for index in (1, 2, 4, 5)] == [0, 1, 2, 3]
    assert local_start({}, 0, 5) == 5


# ---- properties

SHAPE = (6, 12)
PLACEMENTS: list[Placement] = [
    REPLICATE,
    Shard(0, (3, 3)),
    Shard(0, (1, 5)),
    Shard(0, (2, 2, 2)),
    Shard(0, (2, 1), blocks=2),
    Shard(1, (7, 5)),
    Shard(1, (1, 2, 1), blocks=3),
    Shard(1, (2, 4), blocks=2),
]


def ranks_of(placement: Placement) -> int:
    """Return the number of parts."""
    return len(placement.sizes) if isinstance(placement, Shard) else 1


@st.composite
def layouts(draw: st.DrawFn, names: str = "abc", *, complete: bool) -> StateLayout:
    """Return a layout of some tensors over the client and four workers, with every part somewhere or not."""
    parts: dict[int, list[StateItem]] = {}
    placements = {}
    for name in names:
        placements[name] = draw(st.sampled_from(PLACEMENTS))
        for rank in range(ranks_of(placements[name])):
            owners = draw(st.sets(st.integers(CLIENT, 3), min_size=int(complete), max_size=3))
            for owner in sorted(owners):
                parts.setdefault(owner, []).append(item(name, rank))
    return StateLayout(parts=parts, placements=placements)


@given(layouts(complete=True), layouts(complete=False), st.sampled_from(["peer", "relay"]))
def test_every_element_arrives_once_from_an_owner_unless_it_is_there(
    before: StateLayout, after: StateLayout, between: Literal["peer", "relay"]
) -> None:
    split = any(
        one != CLIENT and before.placement(part) != after.placement(part)
        for one, parts in after.parts.items()
        for part in parts
    )
    between = "relay" if split else between
    moves = plan_moves(before, after, sizes=SIZES, hosts=HERE, between=between)
    wholes = {name: torch.rand(SHAPE, dtype=torch.float64) for name in "abc"}
    parts: dict[tuple[int, StateItem], Tensor] = {}
    counts: dict[tuple[int, StateItem], Tensor] = {}
    for owner, items in after.parts.items():
        for part in items:
            exact = shard_of(wholes[part.name], after.placement(part), part.rank)
            there = before.placement(part) == after.placement(part) and part in before.parts.get(owner, ())
            parts[owner, part] = exact.clone() if there else torch.zeros_like(exact)
            counts[owner, part] = torch.full_like(exact, float(there))
    for move in moves:
        assert move.shard in before.parts[move.source]
        assert move.way == {True: "upload"}.get(move.source == CLIENT, "download" if move.target == CLIENT else between)
        have, want = before.region(move.shard), after.region(move.item)
        assert move.region is not None or have == want
        source = shard_of(wholes[move.item.name], before.placement(move.shard), move.shard.rank)
        at = move.target, move.item
        region = want if move.region is None else move.region
        copy_region(region, parts[at], want, source, have)
        once = torch.zeros_like(counts[at])
        copy_region(region, once, want, torch.ones_like(source), have)
        counts[at] += once
    for (owner, part), found in parts.items():
        assert torch.equal(counts[owner, part], torch.ones_like(found)), "each element once"
        assert torch.equal(found, shard_of(wholes[part.name], after.placement(part), part.rank))


@given(layouts(complete=True))
def test_a_layout_and_a_part_of_it_need_no_moves(before: StateLayout) -> None:
    less = StateLayout(parts={owner: parts[1:] for owner, parts in before.parts.items()}, placements=before.placements)
    assert plan_moves(before, before) == plan_moves(before, less) == ()


spreads = st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=len(NAMES), max_size=len(NAMES))


@given(spreads, spreads)
def test_whole_tensors_arrive_once_and_the_others_are_released(old: list[set[int]], new: list[set[int]]) -> None:
    def spread(owners: list[set[int]]) -> dict[int, str]:
        found = {w: "".join(n for n, own in zip(NAMES, owners, strict=True) if w in own) for w in range(4)}
        return {worker: names for worker, names in found.items() if names}

    had, wants = spread(old), spread(new)
    before, after = layout(had), layout(wants)
    moves = plan_moves(before, after, sizes=SIZES, hosts=HERE)
    assert all(move.item.name in had[move.source] for move in moves)
    lacked = {(w, name) for w, names in wants.items() for name in names if name not in had.get(w, "")}
    assert Counter((move.target, move.item.name) for move in moves) == Counter(lacked)
    gone = released(before, after)
    for worker in range(4):
        assert {part.name for part in gone.get(worker, ())} == set(had.get(worker, "")) - set(wants.get(worker, ""))
