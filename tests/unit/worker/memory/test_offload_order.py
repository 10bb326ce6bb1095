"""Buffers that go to the host and come back in any order, as their values and their accounts have it."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from onebox.wire.protocol.instructions import Call, Evict, Free, Offload, Prefetch
from tests.unit.machines import Rig, define
from tests.unit.worker.memory.test_offload import VIEWS, X


class OnTheWay(RuleBasedStateMachine):
    """Buffers that go to the host and come back in any order, compared with what they hold and where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.rig.do(define(102, VIEWS))
        self.values: dict[int, Tensor] = {}
        self.where: dict[int, str] = {}
        self.made = 0

    def teardown(self) -> None:
        self.rig.machine.close()

    @precondition(lambda self: len(self.values) < 12)
    @rule()
    def make(self) -> None:
        self.made += 10
        base, numbers = self.made, tuple(range(self.made + 1, self.made + 4))
        x = X + self.made
        self.rig.put(**{f"b{base}": x})
        self.rig.do(Call(102, (base,), numbers, (0,)))
        self.values |= dict(zip(numbers, (-x, -x.t(), -x[3:5]), strict=True))
        self.where |= dict.fromkeys(numbers, "here")

    def _some(self, data: st.DataObject, place: str) -> tuple[int, ...]:
        able = sorted(number for number, at in self.where.items() if at == place)
        return tuple(data.draw(st.lists(st.sampled_from(able), unique=True))) if able else ()

    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        numbers = self._some(data, "here")
        self.rig.do(Offload(numbers))
        self.where |= dict.fromkeys(numbers, "both")

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        numbers = self._some(data, "both")
        self.rig.do(Evict(numbers))
        self.where |= dict.fromkeys(numbers, "there")

    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        numbers = self._some(data, "there")
        self.rig.do(Prefetch(numbers))
        self.where |= dict.fromkeys(numbers, "here")

    @rule(data=st.data(), place=st.sampled_from(["here", "both", "there"]))
    def free(self, data: st.DataObject, place: str) -> None:
        numbers = self._some(data, place)
        self.rig.do(Free(numbers))
        for number in numbers:
            del self.values[number], self.where[number]

    @rule(data=st.data(), place=st.sampled_from(["here", "both"]))
    def read(self, data: st.DataObject, place: str) -> None:
        for number in self._some(data, place):
            assert torch.equal(self.rig.get(number), self.values[number])

    @invariant()
    def counts(self) -> None:
        assert self.rig.failures == []
        here = {n: self.rig.machine.store.get(n) for n, at in self.where.items() if at != "there"}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in here.values()}
        assert self.rig.used == sum(storages.values())
        assert len(self.rig.machine.store) == len(self.values)
        if not self.values:
            assert self.rig.used == 0


test_in_any_order = OnTheWay.TestCase
test_in_any_order.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
