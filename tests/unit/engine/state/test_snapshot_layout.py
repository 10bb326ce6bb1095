"""Where the parts of a snapshot lie: no worker, and no host, is the only one that has something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.state.moves import CLIENT, StateItem, WorkerStateSpec
from onebox.engine.state.snapshot_layout import (
    BuddyTransfer,
    SnapshotLayout,
    SnapshotLocation,
    behind_runs,
    find_buddies,
    join_runs,
)
from onebox.graph.shard.placements import Shard
from onebox.wire import TensorSpec
from onebox.wire.protocol.responses import SnapshotContents
from onebox.wire.protocol.snapshots import StateEntry

SPEC = TensorSpec("float32", (20,))  # 80 bytes, which take 128 in a slot


def copies_of(*parts: tuple[int, int, WorkerStateSpec]) -> SnapshotLayout:
    """Return a snapshot of workers whose optimizers remember a tensor and a number of each parameter."""
    found = SnapshotLayout(placements={"split": Shard(0, (20, 20))})
    for worker, slot, part in parts:
        entries = [
            entry
            for index in range(len(part.trained))
            for entry in (StateEntry(index, "momentum", SPEC), StateEntry(index, "step", 3))
        ]
        found.take(worker, slot, part, SnapshotContents((SPEC,) * len(part.names), tuple(entries)))
    return found


Circles = dict[str, list[tuple[int, ...]]]

BOTH = WorkerStateSpec(names=("a", "b"), trained=("a",), ranks={})


# ---- what lies where


def test_each_worker_has_its_own_copy_of_what_it_holds() -> None:
    copies = copies_of((0, 5, BOTH), (1, 5, BOTH))
    assert copies.held()[1][1, StateItem("b", "", 0)] == SnapshotLocation(1, 5, 128)
    assert copies.held()[1][0, StateItem("a", "momentum", 0)] == SnapshotLocation(0, 5, 256)
    assert copies.number(StateItem("a", "step", 0)) == (3,)
    assert copies.number(StateItem("a", "momentum", 0)) is None
    assert copies.keys("a") == ["momentum", "step"]
    assert copies.keys("b") == []
    assert copies.size_bytes == 3 * SPEC.size_bytes
    assert copies.has("a")
    assert not copies.has("c")


def test_what_lies_nowhere_any_more_is_missing() -> None:
    copies = copies_of((0, 5, BOTH), (1, 5, WorkerStateSpec(names=("a",), trained=(), ranks={})))
    copies.lose([1])
    assert copies.missing() is None
    assert (1, StateItem("a", "", 0)) not in copies.held()[1]
    assert copies.slots == {(0, 5)}
    copies.add(StateItem("b", "", 0), SnapshotLocation(2, 9, 0))
    copies.lose([0])
    assert copies.missing() == StateItem("a", "", 0)
    assert copies.had[StateItem("a", "", 0)] == {0, 1}


def test_shares_of_what_is_split_are_told_apart() -> None:
    first, second = (
        WorkerStateSpec(names=("split", "b"), trained=("split",), ranks={"split": rank}) for rank in range(2)
    )
    copies = copies_of((0, 5, first), (1, 5, second))
    copies.lose([1])
    assert copies.missing() == StateItem("split", "", 1)
    assert (0, StateItem("split", "momentum", 0)) in copies.held()[1]
    assert copies.number(StateItem("split", "step", 2)) == (3,), "a number is the same for all shares"


# ---- what is sent


def test_what_is_sent_is_few_runs() -> None:
    part = WorkerStateSpec(names=("a", "b", "c"), trained=("a", "c"), ranks={})
    copies = copies_of((0, 5, part))
    starts = {item: places[0].start for item, places in copies.places.items()}
    runs = join_runs(starts, copies.specs, lambda item: item.name in {"a", "b"})
    assert runs == [(0, 256), (384, 128)]
    assert behind_runs(starts, runs, lambda item: item.name in {"a", "b"}) == {
        StateItem("a", "", 0): 0,
        StateItem("b", "", 0): 128,
        StateItem("a", "momentum", 0): 256,
    }


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8))
def test_parts_lie_in_the_runs_as_they_lay_before(parts: list[tuple[int, bool]]) -> None:
    specs = {StateItem(str(index), "", 0): TensorSpec("uint8", (size,)) for index, (size, _) in enumerate(parts)}
    starts, end = {}, 0
    for item, spec in specs.items():
        starts[item], end = end, end + -(-spec.size_bytes // 64) * 64
    wanted = {str(index) for index, (_, one) in enumerate(parts) if one}
    slot = bytes(index % 251 for index in range(end))
    runs = join_runs(starts, specs, lambda item: item.name in wanted)
    sent = b"".join(slot[start : start + size] for start, size in runs)
    found = behind_runs(starts, runs, lambda item: item.name in wanted)
    assert set(found) == {item for item in specs if item.name in wanted}
    for item, start in found.items():
        size = specs[item].size_bytes
        assert sent[start : start + size] == slot[starts[item] : starts[item] + size]


# ---- who sends to whom


def test_replicas_on_one_host_send_nothing() -> None:
    assert find_buddies({"a": [(0, 1)]}, {"a": 1}, [0, 1], dict.fromkeys(range(2), "here")) == {}


def test_stages_send_to_the_next() -> None:
    replica_groups = {"a": [(0,)], "b": [(1,)], "c": [(2,)]}
    found = find_buddies(replica_groups, dict.fromkeys(replica_groups, 8), [0, 1, 2], dict.fromkeys(range(3), "here"))
    assert found == {
        0: BuddyTransfer(buddy=1, names=frozenset("a")),
        1: BuddyTransfer(buddy=2, names=frozenset("b")),
        2: BuddyTransfer(buddy=0, names=frozenset("c")),
    }


def test_what_is_on_one_host_is_sent_to_another() -> None:
    hosts = {0: "one", 1: "one", 2: "two", 3: "two"}
    replica_groups: Circles = {"a": [(0, 1)], "b": [(2, 3)], "everywhere": [(0, 1, 2, 3)]}
    found = find_buddies(replica_groups, dict.fromkeys(replica_groups, 8), range(4), hosts)
    assert found == {0: BuddyTransfer(buddy=2, names=frozenset("a")), 2: BuddyTransfer(buddy=0, names=frozenset("b"))}


def test_a_worker_that_holds_nothing_can_keep_something() -> None:
    found = find_buddies({"a": [(0,)]}, {"a": 8}, [0, 1], {0: "one", 1: "two"})
    assert found == {0: BuddyTransfer(buddy=1, names=frozenset("a"))}


def test_the_client_keeps_what_no_other_worker_can() -> None:
    kept = {0: BuddyTransfer(buddy=CLIENT, names=frozenset("a"))}
    assert find_buddies({"a": [(0,)]}, {"a": 8}, [0], {0: "one"}) == kept
    both = {0: "one", 1: "two"}
    assert find_buddies({"a": [(0,)], "b": [(0, 1)]}, {"a": 8, "b": 8}, [0, 1], both, reachable=False) == kept


def test_what_lies_with_the_client_is_not_lost() -> None:
    copies = copies_of((0, 5, BOTH))
    for item in list(copies.specs):
        copies.add(item, SnapshotLocation(CLIENT, 6, 0))
    copies.lose([0])
    assert copies.missing() is None
    assert not copies.slots, "workers are not asked to drop it"


def test_shares_are_sent_by_those_who_have_them() -> None:
    replica_groups: Circles = {"split": [(0,), (1,)], "whole": [(0, 1)]}
    found = find_buddies(replica_groups, {"split": 8, "whole": 8}, [0, 1], {0: "here", 1: "here"})
    assert found == {worker: BuddyTransfer(buddy=1 - worker, names=frozenset({"split"})) for worker in range(2)}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Circles, list[int], dict[int, str]]:
    """Draw who holds what of some names, on which hosts."""
    count = draw(st.integers(1, 6))
    hosts = {worker: draw(st.sampled_from("xyz")) for worker in range(count)}
    replica_groups = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True)):
        holders = draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
        ranks = draw(st.integers(1, len(holders)))
        replica_groups[name] = [tuple(holders[rank::ranks]) for rank in range(ranks)]
    return replica_groups, draw(st.permutations(range(count))), hosts


@given(layouts(), st.sampled_from([0, 10]))
def test_everything_is_on_two_hosts_or_else_on_two_workers(
    layout: tuple[Circles, list[int], dict[int, str]], size: int
) -> None:
    replica_groups, workers, hosts = layout
    found = find_buddies(replica_groups, dict.fromkeys(replica_groups, size), workers, hosts)
    for worker, sending in found.items():
        assert sending.buddy != worker
        assert sending.names
    for name, sets in replica_groups.items():
        for members in sets:
            buddies = {found[one].buddy for one in members if one in found and name in found[one].names}
            having = {*members, *buddies}
            assert len({hosts.get(one, "client") for one in having}) >= min(2, len(set(hosts.values())))
            assert len(having) >= 2
            assert CLIENT not in having or len(workers) == 1


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_equal_stages_keep_one_each(count: int) -> None:
    replica_groups = {str(worker): [(worker,)] for worker in range(count)}
    found = find_buddies(
        replica_groups, dict.fromkeys(replica_groups, 8), range(count), dict.fromkeys(range(count), "here")
    )
    assert sorted(sending.buddy for sending in found.values()) == list(range(count))


def test_what_only_an_owner_remembers_is_sent_to_its_buddy() -> None:
    """The tensors themselves are on all replicas, of one host or of several."""
    replica_groups, sizes = {"a": [(0, 1)], "b": [(0, 1)]}, {"a": 8, "b": 8}
    here = {0: "here", 1: "here"}
    found = find_buddies(replica_groups, sizes, [0, 1], here, owners={"a": (0,), "b": (1,)})
    assert found == {
        0: BuddyTransfer(buddy=1, names=frozenset(), remembered=frozenset("a")),
        1: BuddyTransfer(buddy=0, names=frozenset(), remembered=frozenset("b")),
    }
    sending = found[0]
    assert [sending.has(StateItem("a", key, 0)) for key in ("", "exp_avg")] == [False, True]
    assert not sending.has(StateItem("b", "exp_avg", 0))
    two = find_buddies({"a": [(0,)]}, {"a": 8}, [0, 1], {0: "one", 1: "two"}, owners={"a": (0,)})
    assert two == {0: BuddyTransfer(buddy=1, names=frozenset("a"))}, "all of it goes anyway"
