"""Transfers and collectives as machines execute them: what arrives, what a trace says, and who hears of a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from onebox.wire import TensorSpec
from onebox.wire.protocol.groups import EmulatedLink, FormGroup, Retime
from onebox.wire.protocol.instructions import Broadcast, Call, Free, Gather, Get, OptimizerStep, Receive, Reduce, Send
from onebox.wire.protocol.requests import Define, OptimizerSpec, Routine, Run
from onebox.worker.comm.shm.segment import supported
from onebox.worker.memory.buffers import Poisoned
from tests.unit.machines import Rig, define, elementwise
from tests.unit.ranks import Hub, HubChannel

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

SPEC = TensorSpec("float32", (2,))
RELU = elementwise("aten.relu.default", SPEC)
GROUP, OTHER = 5, 6


class RankRig(Rig):
    """The machine of a rank.

    Args:
        channel: To the client that serves the group's rendezvous.
    """

    def __init__(self, channel: HubChannel) -> None:
        super().__init__()
        self.channel = channel

    def send_to_client(self, message: Any, frames: Sequence[Any] = ()) -> None:
        self.channel.send_to_client(message, frames)

    def new_ticket(self) -> int:
        return self.channel.new_ticket()

    def await_ticket(self, ticket: int, timeout_s: float) -> Any:
        return self.channel.await_ticket(ticket, timeout_s)


def run(rank: Callable[[int, RankRig], Any]) -> list[Any]:
    """Let two machines form two groups, and run a function with each, in threads."""
    hub = Hub()

    def one(number: int) -> Any:
        rig = RankRig(hub.channel(number))
        for group in (GROUP, OTHER):
            rig.do(FormGroup(group, number, 2, "tcp", "127.0.0.1", 3600.0, True))
        rig.do(define(100, RELU))
        rig.put(b1=torch.tensor([1.0, number]))
        try:
            return rank(number, rig)
        finally:
            rig.machine.close()

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(one, number) for number in range(2)]
        return [future.result(30) for future in futures]


def test_gathered_buffers_are_computed_with() -> None:
    whole = TensorSpec("float32", (4,))

    def rank(number: int, rig: RankRig) -> list[list[float]]:
        double = elementwise("aten.add.Tensor", whole, 2)
        rig.do(define(101, double), Gather(1, 2, whole, GROUP, (2, 2)), Call(101, (2, 2), (3,)), Reduce((1,), GROUP))
        assert rig.failures == []
        return [rig.get(buffer).tolist() for buffer in (1, 2, 3)]

    assert run(rank) == [[[2.0, 1.0], [1.0, 0.0, 1.0, 1.0], [2.0, 0.0, 2.0, 2.0]]] * 2


def test_devices_that_compute_have_no_other_speed_and_no_emulated_links() -> None:
    link = EmulatedLink(1, 0, 1.0, 1.0)
    rig = RankRig(Hub().channel(0))
    rig.do(Retime(2.0), Retime(links=(link,)), FormGroup(9, 0, 2, "tcp", "127.0.0.1", 5.0, True, (link,)))
    assert [failure.kind for failure in rig.failures][:2] == ["protocol", "protocol"]
    assert "cpu cannot be of another speed" in rig.failures[0].message
    assert "links are emulated between sim devices only" in rig.failures[2].message


def test_what_came_before_it_was_asked_for_is_there_at_once() -> None:
    def rank(number: int, rig: RankRig) -> list[int]:
        if number == 0:
            rig.do(Send(1, GROUP, 1), Reduce((1,), GROUP), Call(100, (1,), (3,)))
        else:
            rig.do(Reduce((1,), GROUP), Call(100, (1,), (3,)))  # by now it has come
            rig.do(Define(50, Routine((Receive(2, SPEC, GROUP, 0), Call(100, (2,), (4,))), 0)), Run(50, trace=True))
        assert rig.failures == []
        return rig.times_ns

    times = run(rank)[1]
    assert times[0] == times[1] <= times[2] <= times[3]


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_a_trace_of_a_collective_lasts_until_its_result_is_there(kind: str) -> None:
    def rank(number: int, rig: RankRig) -> list[int]:
        collective = Reduce((1,), GROUP) if kind == "reduce" else Gather(2, 1, SPEC, GROUP, (1, 1))
        if kind == "gather":
            rig.put(b2=torch.ones(1))
        rig.do(Define(50, Routine((collective, Call(100, (1,), (3,))), 0)), Run(50, trace=True))
        assert rig.failures == []
        return rig.times_ns

    for times in run(rank):
        assert times[0] <= times[1] <= times[2] <= times[3]


@pytest.mark.parametrize(
    "broken",
    [
        [Run(50)],
        [Define(50, Routine((Reduce((1,), GROUP), Send(-1, GROUP, 0)), 1)), Run(50)],
        [Define(50, Routine((Send(-2, GROUP, 0),), 1)), Run(50)],
        [Call(99, (), (1,)), Define(50, Routine((Send(1, GROUP, 0),), 0)), Run(50)],
    ],
    ids=["missing", "without its bindings", "that could not be defined", "with void buffers"],
)
def test_who_waits_for_a_routine_that_cannot_run_hears_of_it(broken: list[Any]) -> None:
    def rank(number: int, rig: RankRig) -> str:
        if number == 1:
            rig.do(*broken)
            assert rig.failures[0].kind == "protocol"
            assert GROUP in rig.channel.left  # type: ignore[attr-defined]
            if len(broken) > 1:
                assert OTHER not in rig.channel.left, "a group that the routine does not use"
            return ""
        rig.do(Receive(2, SPEC, GROUP, 1))
        with pytest.raises(Poisoned) as caught:
            rig.get(2)
        return caught.value.failure.kind

    assert run(rank)[0] == "peer"


def test_ranks_that_disagree_are_a_failure_of_the_protocol() -> None:
    def rank(number: int, rig: RankRig) -> str:
        rig.put(b2=torch.ones(2 + number))
        rig.do(Reduce((2,), GROUP))
        with pytest.raises(Poisoned) as caught:
            rig.get(2)
        with pytest.raises(Poisoned):
            rig.get(2)  # nor does it wait the second time
        return caught.value.failure.kind

    assert run(rank) == ["protocol", "protocol"]


@pytest.mark.parametrize("kind", ["sum", "broadcast"])
def test_who_waits_for_a_rank_that_has_nothing_to_give_hears_of_it(kind: str) -> None:
    """And keeps what it had besides; the rank itself knows why it left."""

    def rank(number: int, rig: RankRig) -> str:
        step = Reduce((1,), GROUP, 0) if kind == "sum" else Broadcast((1,), GROUP, 1)
        if number == 1:
            rig.do(Call(100, (99,), (1,)), step)
            assert GROUP in rig.channel.left  # type: ignore[attr-defined]
            with pytest.raises(Poisoned, match="there is no buffer 99"):
                rig.get(1)
            return ""
        rig.put(b2=torch.ones(2))
        rig.do(step)
        with pytest.raises(Poisoned) as caught:
            rig.get(1)
        assert rig.get(2).tolist() == [1.0, 1.0]
        return caught.value.failure.kind

    assert run(rank)[0] == "peer"


def test_an_owner_steps_and_all_have_what_it_made_of_the_parameter() -> None:
    """In the memory that it was in; an answer that is on its way keeps what it said."""

    def rank(number: int, rig: RankRig) -> list[list[float]]:
        rig.put(b3=torch.tensor([10.0, 20.0]))
        kept = rig.machine.store.get(3)
        if number == 1:
            rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (3,))))
        step = [OptimizerStep(7, (1,)), Free((1,))] if number == 1 else []
        results = rig.do(Get((3,)), Reduce((1,), GROUP, 1), *step, Broadcast((3,), GROUP, 1), Get((3,)))
        assert rig.failures == []
        assert len(results) == 2
        before, after = (torch.frombuffer(bytearray(frame), dtype=torch.float32) for frame in rig.frames_out)
        assert rig.machine.store.get(3) is kept
        assert rig.used == kept.nbytes
        return [before.tolist(), after.tolist()]

    assert run(rank) == [[[10.0, 20.0], [8.0, 19.0]]] * 2
