"""What travels when a state is to be spread in another way: all that is lacking, once, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.state.redistribution import StateMove, find_redistribution
from onebox.engine.state.snapshot_layout import WorkerStateSpec
from onebox.errors import UsageError

NAMES = tuple("abcdef")
SIZES = {name: 10 * (place + 1) for place, name in enumerate(NAMES)}
TRAINED = frozenset("abcd")
"""The others are buffers."""


def part(names: str, trained: str | None = None, **ranks: int) -> WorkerStateSpec:
    """Return what a worker has."""
    own = tuple(names) if trained is None else tuple(trained)
    return WorkerStateSpec(names=tuple(names), trained=tuple(n for n in own if n in TRAINED), ranks=ranks)


def test_only_what_a_worker_lacks_travels() -> None:
    before = {0: part("abe"), 1: part("cdf")}
    moves = find_redistribution(before, {0: part("ae"), 1: part("bcdf")}, SIZES, {0: "here", 1: "here"})
    assert moves.tensors == moves.remembered == (StateMove(0, 1, "b"),)
    assert moves.freed == {0: ("b",)}
    assert moves.changed == {0, 1}
    assert moves.workers == {0, 1}
    assert moves.size_bytes(SIZES, {"b": 7}) == 27


def test_a_plan_with_the_same_places_moves_nothing() -> None:
    same = {0: part("abe"), 1: part("cdf")}
    moves = find_redistribution(same, dict(same), SIZES, {0: "here", 1: "here"})
    assert (moves.tensors, moves.remembered, moves.freed, moves.changed) == ((), (), {}, frozenset())


def test_what_several_have_comes_from_near_and_from_all_of_them() -> None:
    before = {0: part("ab"), 1: part("ab"), 2: part("ab")}
    hosts = {0: "far", 1: "near", 2: "near", 3: "near"}
    moves = find_redistribution(before, {**before, 3: part("ab")}, SIZES, hosts)
    assert moves.tensors == (StateMove(1, 3, "a"), StateMove(2, 3, "b"))


def test_what_one_owner_remembers_comes_from_the_owner() -> None:
    before = {0: part("ab", "a"), 1: part("ab", "b")}
    moves = find_redistribution(before, {0: part("ab", "b"), 1: part("ab", "a")}, SIZES, {0: "here", 1: "here"})
    assert moves.tensors == ()
    assert moves.remembered == (StateMove(1, 0, "b"), StateMove(0, 1, "a"))


def test_shares_go_to_who_needs_that_share_and_no_share_is_made() -> None:
    before = {0: part("a", a=0), 1: part("a", a=1)}
    hosts = dict.fromkeys(range(2), "here")
    moves = find_redistribution(before, {0: part("a", a=1), 1: part("a", a=0)}, SIZES, hosts)
    assert moves.tensors == (StateMove(1, 0, "a"), StateMove(0, 1, "a"))
    with pytest.raises(UsageError, match="share 1 of b on device 1"):
        find_redistribution({0: part("b")}, {0: part("b"), 1: part("b", b=1)}, SIZES, hosts)


spreads = st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=len(NAMES), max_size=len(NAMES))


@given(spreads, spreads)
def test_everybody_gets_everything_once_from_one_who_has_it(old: list[set[int]], new: list[set[int]]) -> None:
    def parts(spread: list[set[int]]) -> dict[int, WorkerStateSpec]:
        found = {w: "".join(n for n, own in zip(NAMES, spread, strict=True) if w in own) for w in range(4)}
        return {worker: part(names) for worker, names in found.items() if names}

    before, after = parts(old), parts(new)
    moves = find_redistribution(before, after, SIZES, dict.fromkeys(range(4), "here"))
    for found, kind in ((moves.tensors, "names"), (moves.remembered, "trained")):
        has = {worker: set(getattr(own, kind)) for worker, own in before.items()}
        assert all(move.name in has[move.source] for move in found)
        came = Counter((move.target, move.name) for move in found)
        lacked = {(w, name) for w, own in after.items() for name in getattr(own, kind) if name not in has.get(w, ())}
        assert came == Counter(lacked)
    for worker in {*before, *after}:
        had = set(before[worker].names) if worker in before else set()
        wanted = set(after[worker].names) if worker in after else set()
        assert set(moves.freed.get(worker, ())) == had - wanted
