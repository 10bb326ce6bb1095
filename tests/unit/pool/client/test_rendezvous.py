"""What the client does for groups: keys and values for whoever waits, and sums in the order of the members."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onebox.errors import WireError
from onebox.pool.client import group_services
from onebox.pool.client.group_services import KEY_BYTES, WAITING, ClientSums, KeyValues, LookupReply
from onebox.wire import TensorSpec
from onebox.wire.protocol.codec import decode_worker_message, encode
from onebox.wire.protocol.responses import LOOKUP_KEYS, Contribution, Lookup

STORE_BYTES = 1 << 14
"""More than a test puts into a store."""

GROUPS, KEYS, WORKERS = st.integers(1, 2), st.sampled_from("abc"), st.integers(0, 2)
VALUES = st.sampled_from([b"1", b"2", b"30"])


class Store(RuleBasedStateMachine):
    """Compares the stores of two groups with dictionaries; nobody who waits is forgotten, nobody is answered twice."""

    @initialize()
    def open(self) -> None:
        self.keys = KeyValues()
        self.values: dict[tuple[int, str], bytes] = {}
        self.waiting: dict[tuple[int, int], tuple[int, list[str]]] = {}
        self.tickets = 0
        self.answered: set[tuple[int, int]] = set()

    def ask(
        self, worker: int, group: int, action: Any, *keys: str, value: bytes = b""
    ) -> tuple[int, list[LookupReply]]:
        self.tickets += 1
        answers = self.keys.lookup(worker, Lookup(self.tickets, group, action, keys, value))
        for answer in answers:
            assert (answer.worker, answer.ticket) not in self.answered, "answered twice"
            self.answered.add((answer.worker, answer.ticket))
        return self.tickets, answers

    def released(self, group: int, key: str, value: bytes) -> set[LookupReply]:
        self.values[group, key] = value
        ready = [waiter for waiter, wanted in self.waiting.items() if self.there(*wanted)]
        return {LookupReply(*waiter, self.found(*self.waiting.pop(waiter))) for waiter in ready}

    def there(self, group: int, keys: list[str]) -> bool:
        return all((group, key) in self.values for key in keys)

    def found(self, group: int, keys: list[str]) -> tuple[bytes, ...]:
        return tuple(self.values[group, key] for key in keys)

    @rule(worker=WORKERS, group=GROUPS, key=KEYS, value=VALUES)
    def set(self, worker: int, group: int, key: str, value: bytes) -> None:
        _, answers = self.ask(worker, group, "set", key, value=value)
        assert set(answers) == self.released(group, key, value)

    @rule(worker=WORKERS, group=GROUPS, keys=st.lists(KEYS, min_size=1, unique=True))
    def get(self, worker: int, group: int, keys: list[str]) -> None:
        waiting = sum(waiter[0] == worker and wanted[0] == group for waiter, wanted in self.waiting.items())
        if waiting >= WAITING and not self.there(group, keys):
            with pytest.raises(WireError, match=f"{WAITING} lookups of worker {worker} in group {group} wait"):
                self.ask(worker, group, "get", *keys)
            return
        ticket, answers = self.ask(worker, group, "get", *keys)
        if self.there(group, keys):
            assert answers == [LookupReply(worker, ticket, self.found(group, keys))]
        else:
            assert answers == []
            self.waiting[worker, ticket] = group, keys

    @rule(worker=WORKERS, group=GROUPS, key=KEYS, amount=st.integers(-2, 5))
    def add(self, worker: int, group: int, key: str, amount: int) -> None:
        ticket, answers = self.ask(worker, group, "add", key, value=str(amount).encode())
        total = str(int(self.values.get((group, key), b"0")) + amount).encode()
        assert set(answers) == self.released(group, key, total) | {LookupReply(worker, ticket, (total,))}

    @rule(worker=WORKERS, group=GROUPS, keys=st.lists(KEYS, min_size=1, unique=True))
    def check(self, worker: int, group: int, keys: list[str]) -> None:
        ticket, answers = self.ask(worker, group, "check", *keys)
        assert answers == [LookupReply(worker, ticket, (b"1" if self.there(group, keys) else b"0",))]

    @rule(worker=WORKERS, group=GROUPS, key=KEYS)
    def delete(self, worker: int, group: int, key: str) -> None:
        ticket, answers = self.ask(worker, group, "delete", key)
        gone = self.values.pop((group, key), None)
        assert answers == [LookupReply(worker, ticket, (b"0" if gone is None else b"1",))]

    @rule(group=GROUPS)
    def forget(self, group: int) -> None:
        told = self.keys.forget(group)
        gone = [waiter for waiter, wanted in self.waiting.items() if wanted[0] == group]
        assert sorted(told) == sorted(gone)
        self.waiting = {waiter: wanted for waiter, wanted in self.waiting.items() if wanted[0] != group}
        self.values = {key: value for key, value in self.values.items() if key[0] != group}

    @invariant()
    def nobody_waits_for_keys_that_are_there(self) -> None:
        assert not any(self.there(*wanted) for wanted in self.waiting.values())

    @invariant()
    def what_is_kept_is_counted(self) -> None:
        for group in (1, 2):
            values = [len(value) + 81 for key, value in self.values.items() if key[0] == group]
            waiting = [81 * len(keys) for of, keys in self.waiting.values() if of == group]
            rest = bytes(STORE_BYTES - 81 - sum(values) - sum(waiting))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group_services, "KEY_BYTES", STORE_BYTES)
                with pytest.raises(WireError, match="full"):
                    self.ask(0, group, "set", "d", value=rest + b"1")
                self.ask(0, group, "set", "d", value=rest)
            self.ask(0, group, "delete", "d")


TestStore = Store.TestCase


def test_a_lookup_without_a_key_is_answered() -> None:
    assert KeyValues().lookup(3, Lookup(7, 1, "get", ())) == [LookupReply(3, 7, (b"",))]


@pytest.mark.parametrize("action", ["get", "check"])
def test_a_lookup_that_names_a_key_twice_is_refused(action: Any) -> None:
    """A reply would have its value twice, and a thousand times for a short message."""
    with pytest.raises(WireError, match="names a key twice"):
        KeyValues().lookup(3, Lookup(7, 1, action, ("key", "other", "key")))


@pytest.mark.parametrize("action", ["set", "get", "check", "delete"])
def test_a_lookup_of_too_many_keys_is_refused(action: Any) -> None:
    with pytest.raises(WireError, match=f"names {LOOKUP_KEYS + 1} keys; allowed are {LOOKUP_KEYS}"):
        KeyValues().lookup(3, Lookup(7, 1, action, tuple(map(str, range(LOOKUP_KEYS + 1)))))


@pytest.mark.parametrize("first", [0x10000, 0x100, ord("0")])
def test_lookups_that_wait_hold_no_more_memory_than_is_allowed(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython keeps some texts with 4 bytes a character, and any of them as an object of its own."""
    monkeypatch.setattr(group_services, "KEY_BYTES", 4 << 20)
    names = ["a" * length + chr(first + number) for number in range(50) for length in range(20)]
    message = encode(Lookup(1, 1, "get", tuple(names)))
    keys = KeyValues()
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="the store of group 1 is full"):
            for worker in range(1000):
                lookup, _ = decode_worker_message([message])
                assert isinstance(lookup, Lookup)
                keys.lookup(worker, lookup)
        assert 1 << 20 < tracemalloc.get_traced_memory()[0] < 4.5 * (1 << 20)
    finally:
        tracemalloc.stop()


def test_lookups_that_wait_count_until_they_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_services, "KEY_BYTES", 81 * (2 * 10 + 2) + 1)
    keys = KeyValues()
    for _ in range(2):
        for worker in range(10):
            assert keys.lookup(worker, Lookup(1, 1, "get", ("b", "a"))) == []
        keys.lookup(0, Lookup(0, 1, "set", ("a",), b"1"))
        with pytest.raises(WireError, match="full"):
            keys.lookup(10, Lookup(1, 1, "get", ("b", "a")))
        keys.lookup(0, Lookup(0, 1, "set", ("a",), b""))
        assert len(keys.lookup(0, Lookup(0, 1, "set", ("b",), b"2"))) == 10
        keys.lookup(0, Lookup(0, 1, "delete", ("a",)))
        keys.lookup(0, Lookup(0, 1, "delete", ("b",)))


def test_a_refused_value_changes_nothing() -> None:
    keys = KeyValues()
    keys.lookup(1, Lookup(5, 1, "get", ("other", "key")))
    with pytest.raises(WireError, match="full"):
        keys.lookup(0, Lookup(1, 1, "set", ("key",), bytes(KEY_BYTES)))
    assert keys.lookup(0, Lookup(1, 1, "set", ("other",), b"v")) == []
    assert keys.lookup(0, Lookup(2, 1, "check", ("key",))) == [LookupReply(0, 2, (b"0",))]
    with pytest.raises(WireError, match="full"):
        keys.lookup(0, Lookup(1, 1, "set", ("other",), bytes(KEY_BYTES)))
    assert keys.lookup(0, Lookup(1, 1, "set", ("key",), b"w")) == [LookupReply(1, 5, (b"v", b"w"))]


class Hashed(str):
    """A key that counts how often keys are looked at."""

    looks = 0

    def __hash__(self) -> int:
        Hashed.looks += 1
        return super().__hash__()


def test_each_of_many_members_waits_for_all_others_in_a_time_of_their_pairs() -> None:
    members = 512
    names = [Hashed(f"tls/{rank}") for rank in range(members)]
    keys = KeyValues()
    Hashed.looks = 0
    for rank in range(members):
        others = tuple(names[:rank] + names[rank + 1 :])
        assert keys.lookup(rank, Lookup(1, 1, "get", others)) == []
    released = [reply for name in names for reply in keys.lookup(0, Lookup(0, 1, "set", (name,), name.encode()))]
    assert sorted(reply.worker for reply in released) == list(range(members))
    assert {len(reply.values) for reply in released} == {members - 1}
    assert Hashed.looks < 6 * members**2


def test_keys_that_come_and_go_cost_a_bounded_time() -> None:
    """A worker deletes a key that its lookups have passed, and sets the one that they wait for, in turn."""
    names = [Hashed(number) for number in range(LOOKUP_KEYS)]
    keys = KeyValues()
    for name in names[:-1]:
        keys.lookup(0, Lookup(0, 1, "set", (name,)))
    with pytest.raises(WireError, match=f"{WAITING} lookups of worker 0 in group 1 wait; no more may"):
        for ticket in range(1000):
            keys.lookup(0, Lookup(ticket, 1, "get", tuple(names)))
    there, missing = names[-2:]
    Hashed.looks = 0
    for _ in range(10):
        keys.lookup(0, Lookup(0, 1, "delete", (there,)))
        assert keys.lookup(0, Lookup(0, 1, "set", (missing,))) == []
        there, missing = missing, there
    assert Hashed.looks < 10 * (WAITING + 1) * LOOKUP_KEYS


@pytest.mark.parametrize("value", [b"", b"x", b"1.5", b"\xff"])
def test_a_counter_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(WireError, match="no number"):
        KeyValues().lookup(0, Lookup(1, 1, "add", ("key",), value))


# ---- sums

SPEC = TensorSpec("float64", (3,))


def bucket(worker: int, order: int) -> torch.Tensor:
    return torch.tensor([worker, order, 0.1 * worker], dtype=torch.float64)


class Sums(RuleBasedStateMachine):
    """Members contribute in any order; each bucket is summed once, when all are there."""

    @initialize(size=st.integers(1, 4))
    def form(self, size: int) -> None:
        self.sums = ClientSums()
        self.members = tuple(range(10, 10 + size))
        self.sums.form(1, self.members)
        self.orders = dict.fromkeys(self.members, 0)
        self.came: dict[int, dict[int, int]] = {}
        self.tickets = 0

    @rule(data=st.data())
    def contribute(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.members))
        order = self.orders[worker]
        self.orders[worker] += 1
        self.tickets += 1
        total = self.sums.contribute(worker, Contribution(self.tickets, 1, order, SPEC), bucket(worker, order))
        came = self.came.setdefault(order, {})
        came[worker] = self.tickets
        if len(came) < len(self.members):
            assert total is None
            return
        assert total is not None
        assert total.tickets == tuple((member, came[member]) for member in self.members)
        expected = bucket(self.members[0], order).clone()
        for member in self.members[1:]:
            expected += bucket(member, order)
        assert torch.equal(total.total, expected), "in the order of the members, whoever came first"
        del self.came[order]

    @rule()
    def a_stranger_contributes(self) -> None:
        assert self.sums.contribute(99, Contribution(0, 1, 0, SPEC), bucket(1, 1)) is None
        assert self.sums.contribute(self.members[0], Contribution(0, 2, 0, SPEC), bucket(1, 1)) is None

    @rule()
    def leave(self) -> None:
        """Nothing is kept of what was summed."""
        told = self.sums.forget(1)
        assert sorted(told) == sorted(pair for came in self.came.values() for pair in came.items())
        self.came.clear()
        self.orders = dict.fromkeys(self.members, max(self.orders.values()))
        self.sums.form(1, self.members)

    def teardown(self) -> None:
        if hasattr(self, "sums"):
            self.leave()


TestSums = Sums.TestCase


def test_a_sum_leaves_the_contributions_as_they_are() -> None:
    sums = ClientSums()
    sums.form(1, (0, 1))
    parts = [bucket(0, 0), bucket(1, 0)]
    sums.contribute(0, Contribution(1, 1, 0, SPEC), parts[0])
    total = sums.contribute(1, Contribution(2, 1, 0, SPEC), parts[1])
    assert total is not None
    assert torch.equal(parts[0], bucket(0, 0))
    assert torch.equal(parts[1], bucket(1, 0))


@pytest.mark.parametrize(
    "other", [torch.zeros(4, dtype=torch.float64), torch.zeros(3), torch.zeros(3, 1, dtype=torch.float64)]
)
def test_a_contribution_of_another_kind_is_refused(other: torch.Tensor) -> None:
    sums = ClientSums()
    sums.form(1, (0, 1))
    sums.contribute(0, Contribution(1, 1, 0, SPEC), bucket(0, 0))
    with pytest.raises(WireError, match="worker 1"):
        sums.contribute(1, Contribution(2, 1, 0, SPEC), other)


def test_a_second_contribution_is_refused() -> None:
    sums = ClientSums()
    sums.form(1, (0, 1))
    sums.contribute(0, Contribution(1, 1, 0, SPEC), bucket(0, 0))
    with pytest.raises(WireError, match="twice"):
        sums.contribute(0, Contribution(2, 1, 0, SPEC), bucket(0, 0))


@given(st.permutations([0, 1, 2, 3]))
def test_the_sum_has_the_same_bits_whoever_comes_last(order: list[int]) -> None:
    sums = ClientSums()
    sums.form(5, (0, 1, 2, 3))
    values = torch.tensor([[1e16], [1.0], [-1e16], [1.0]], dtype=torch.float64)
    totals = [sums.contribute(worker, Contribution(worker, 5, 0, SPEC), values[worker]) for worker in order]
    assert totals[:3] == [None] * 3
    assert totals[3] is not None
    assert float(totals[3].total) == ((1e16 + 1.0) - 1e16) + 1.0
