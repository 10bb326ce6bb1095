"""The buffer store: every byte accounted for, whatever is put, promised, voided and forgotten."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from torch import Tensor

from onebox.errors import WireError
from onebox.wire.protocol.responses import WorkerFailure
from onebox.worker.memory.buffers import BufferStore, Poisoned, QuotaExceeded

NUMBERS = st.integers(1, 6)
FAILURE = WorkerFailure("operator", "x", "it failed")


class Promise:
    """Fills buffers when it is waited for."""

    def __init__(self, made: dict[int, Tensor]) -> None:
        self.made = made
        self.waits = 0
        self.ended = 0
        self.size_bytes = sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in made.values()}.values()
        )

    def wait(self) -> dict[int, Tensor]:
        self.waits += 1
        return self.made

    def end(self) -> None:
        self.ended += 1


class Accounts(RuleBasedStateMachine):
    """Compares a store with a dictionary of what each number holds."""

    tensors = Bundle("tensors")

    @initialize()
    def open(self) -> None:
        self.store = BufferStore()
        self.held: dict[int, Tensor | WorkerFailure] = {}
        self.promised: dict[int, Promise] = {}
        self.charged = 0
        self.peak = 0

    @rule(target=tensors, size=st.integers(0, 5), device=st.sampled_from(["cpu", "meta"]))
    def make(self, size: int, device: str) -> Tensor:
        return torch.zeros(size, device=device)

    @rule(target=tensors, tensor=tensors)
    def view(self, tensor: Tensor) -> Tensor:
        return tensor[1:].unsqueeze(0).squeeze(0)

    @rule(number=NUMBERS, tensor=tensors)
    def put(self, number: int, tensor: Tensor) -> None:
        self.store.put(number, tensor)
        self.promised.pop(number, None)
        self.held[number] = tensor

    @rule(number=NUMBERS, size=st.integers(0, 9))
    def grow(self, number: int, size: int) -> None:
        held = self.held.get(number)
        if isinstance(held, Tensor):
            self.get(number)
            held.resize_(size)
            for other in self.held:
                self.store.recount(other)

    @rule(number=NUMBERS, tensor=tensors)
    def exchange(self, number: int, tensor: Tensor) -> None:
        held = self.held.get(number)
        if isinstance(held, Tensor) and held.device == tensor.device:
            self.get(number)
            held.set_(tensor)
            for other in self.held:
                self.store.recount(other)

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def many(self, numbers: list[int]) -> None:
        held = [self.held.get(number) for number in numbers]
        if all(isinstance(tensor, Tensor) for tensor in held):
            for number in numbers:
                self.get(number)
            assert all(a is b for a, b in zip(self.store.many(numbers), held, strict=True))
        else:
            with pytest.raises((WireError, Poisoned)):
                self.store.many(numbers)

    @rule(number=NUMBERS)
    def forget(self, number: int) -> None:
        self.store.forget(number)
        self.held.pop(number, None)
        self.promised.pop(number, None)

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def void(self, numbers: list[int]) -> None:
        self.store.void(numbers, FAILURE)
        for number in numbers:
            self.promised.pop(number, None)
            self.held[number] = FAILURE

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3, unique=True))
    def promise(self, numbers: list[int]) -> None:
        flat = torch.ones(4 * len(numbers))
        made = dict(zip(numbers, flat.split(4), strict=True))
        promise = Promise(made)
        self.store.promise(numbers, promise)
        for number in numbers:
            self.held[number] = made[number]
            self.promised[number] = promise

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        held = self.held.get(number)
        if isinstance(held, Tensor):
            assert self.store.get(number) is held
            kept = self.promised.get(number)
            self.promised = {n: p for n, p in self.promised.items() if p is not kept or kept is None}
        else:
            with pytest.raises(WireError if held is None else Poisoned, match=r"no buffer|it failed"):
                self.store.get(number)

    @rule(number=NUMBERS)
    def take(self, number: int) -> None:
        held = self.held.get(number)
        if isinstance(held, Tensor):
            self.get(number)
            assert self.store.take(number) is held
            del self.held[number]

    @rule(first=NUMBERS, end=st.integers(1, 7))
    def within(self, first: int, end: int) -> None:
        assert self.store.within(first, end) == sorted(number for number in self.held if first <= number < end)

    @rule(more=st.integers(0, 100))
    def charge(self, more: int) -> None:
        self.store.charge(more)
        self.charged += more

    @rule(target=tensors, tensor=consumes(tensors))
    def let_go(self, tensor: Tensor) -> object:
        return multiple()

    @invariant()
    def bytes_are_those_of_the_storages_that_are_held(self) -> None:
        storages = [t.untyped_storage() for t in self.held.values() if isinstance(t, Tensor)]
        expected = self.charged + sum({s._cdata: s.nbytes() for s in storages}.values())
        assert self.store.used_bytes == expected
        assert len(self.store) == len(self.held)
        self.peak = max(self.peak, expected)
        assert self.store.peak_bytes >= self.peak

    def teardown(self) -> None:
        for number in list(self.held):
            self.store.forget(number)
        assert self.store.used_bytes == self.charged


TestAccounts = Accounts.TestCase


def test_a_promise_is_waited_for_once_and_fills_all_its_buffers() -> None:
    store = BufferStore()
    flat = torch.arange(4.0)
    promise = Promise({1: flat[:2], 2: flat[2:]})
    store.promise([1, 2], promise)
    assert store.get(2).tolist() == [2.0, 3.0]
    assert store.get(1).tolist() == [0.0, 1.0]
    assert (promise.waits, promise.ended) == (1, 1)
    assert store.used_bytes == 16


def test_a_promised_buffer_that_was_filled_meanwhile_keeps_the_new_value() -> None:
    store = BufferStore()
    promise = Promise({1: torch.zeros(2), 2: torch.zeros(2)})
    store.promise([1, 2], promise)
    store.put(1, torch.ones(2))
    assert promise.ended == 0
    store.get(2)
    assert store.get(1).tolist() == [1.0, 1.0]


def test_a_promise_hears_that_nobody_wants_it_any_more() -> None:
    store = BufferStore()
    promise = Promise({1: torch.zeros(2), 2: torch.zeros(2)})
    store.promise([1, 2], promise)
    store.forget(1)
    assert promise.ended == 0
    store.forget(2)
    assert (promise.waits, promise.ended) == (0, 1)


def test_promised_bytes_count_while_they_are_on_their_way() -> None:
    """Gradients that are being reduced take memory too: without them the peak of a step is too low."""
    store = BufferStore(quota_bytes=100)
    store.promise([1], Promise({1: torch.zeros(20)}))
    assert store.used_bytes == 80
    with pytest.raises(QuotaExceeded):
        store.reserve(30)
    store.get(1)
    assert store.used_bytes == store.peak_bytes == 80, "not counted twice while it arrives"


def test_the_quota_is_exact() -> None:
    store = BufferStore(quota_bytes=16)
    store.put(1, torch.zeros(4))
    with pytest.raises(QuotaExceeded, match=r"20 bytes needed, but the quota is 16 bytes: 4 bytes too much"):
        store.put(2, torch.zeros(1))
    assert store.used_bytes == 16
    store.put(3, store.get(1)[1:])  # a view costs nothing
    store.put(1, torch.zeros(0))
    with pytest.raises(QuotaExceeded):
        store.put(1, torch.zeros(1))  # the view keeps the storage
    store.forget(3)
    store.put(1, torch.zeros(4))  # what it held before makes room


def test_reserving_counts_towards_the_peak_and_takes_nothing() -> None:
    store = BufferStore(quota_bytes=100)
    store.put(1, torch.zeros(5))
    store.reserve(60)
    assert (store.used_bytes, store.peak_bytes) == (20, 80)
    with pytest.raises(QuotaExceeded):
        store.reserve(81)
    assert store.peak_bytes == 80, "what was refused was never used"
    store.reserve(-50)
    assert store.peak_bytes == 80


def test_the_peak_of_an_action_is_told_and_the_peak_of_all_stays() -> None:
    store = BufferStore()
    store.put(1, torch.zeros(25))
    store.forget(1)
    store.put(2, torch.zeros(5))

    def action() -> str:
        store.put(3, torch.zeros(5))
        store.forget(3)
        return "done"

    assert store.peak_of(action) == ("done", 20)
    assert store.peak_bytes == 100


def test_the_first_failure_stays_until_the_buffer_is_filled_again() -> None:
    store = BufferStore()
    store.void([1, 2], FAILURE)
    for _ in range(2):
        with pytest.raises(Poisoned, match="it failed"):
            store.get(1)
    store.put(1, torch.zeros(1))
    store.get(1)
    store.forget(2)
    with pytest.raises(WireError, match="there is no buffer 2"):
        store.get(2)


def test_a_new_storage_at_an_old_address_is_counted_anew() -> None:
    store = BufferStore()
    for size in (1000, 10, 1000):
        store.put(1, torch.zeros(size))
        assert store.used_bytes == 4 * size
        store.forget(1)
        assert store.used_bytes == 0
