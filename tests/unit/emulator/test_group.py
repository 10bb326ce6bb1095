"""Groups of emulated devices: messages arrive when their links say, collectives take as long as on a ring."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from onebox.emulator.clock import DeviceClock
from onebox.emulator.device import EmulatedAccelerator, EmulatedDevice
from onebox.emulator.group import speed_in
from onebox.emulator.links import LinkSpeed
from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import EmulatedLink, FormGroup, Retime
from onebox.wire.protocol.instructions import Call, Gather, Receive, Reduce, Send
from onebox.wire.protocol.requests import Define, Routine, Run, StoredProgram
from onebox.worker.accelerator import accelerator_for
from onebox.worker.comm.group import CarriedGroup
from onebox.worker.comm.shm.layout import FREE
from onebox.worker.comm.shm.segment import SharedMemory, supported
from tests.unit.machines import Rig, define, elementwise
from tests.unit.ranks import Hub, HubChannel, run_ranks

pytestmark = pytest.mark.skipif(not supported(), reason="groups of sim devices need Linux on x86-64")

META = torch.device("meta")
MS = 1_000_000
"""Nanoseconds of a millisecond."""


def sims(count: int) -> list[EmulatedAccelerator]:
    """Return devices whose clocks show the same time."""
    clocks = [DeviceClock() for _ in range(count)]
    for clock in clocks:
        clock.now_ns = clocks[0].now_ns
    return [EmulatedAccelerator(clock) for clock in clocks]


def empty(count: int) -> torch.Tensor:
    """Return bytes without elements."""
    return torch.empty(count, dtype=torch.uint8, device=META)


def test_messages_arrive_when_the_link_says() -> None:
    """The second queues behind the first; another rank's, and the way back, are not held up."""
    spec, devices = TensorSpec("uint8", (20_000,)), sims(3)  # 20 ms at 1 MB/s
    begin_ns = devices[0].clock.now_ns

    def rank(number: int, group: CarriedGroup) -> list[int]:
        own = empty(20_000)
        if number == 0:
            times = [group.send(own, peer, 0) for peer in (1, 1, 2)]
            assert devices[0].clock.now_ns == begin_ns, "it does not wait for them"
        elif number == 1:
            times = [group.send(own, 0, 0), *(group.receive(spec, 0, 0)().at_ns for _ in range(2))]
            assert devices[1].clock.now_ns == times[-1], "it has waited for them"
        else:
            times = [group.receive(spec, 0, 0)().at_ns]
        return [(at_ns - begin_ns) // MS for at_ns in times]

    links = {0: [EmulatedLink(1, 0, 0.03, 1e6)]}
    assert run_ranks(3, rank, devices=devices, links=links) == [[50, 70, 0], [0, 50, 70], [0]]


@pytest.mark.parametrize("kind", ["sum", "gather"])
def test_collectives_take_as_long_as_on_a_ring(kind: str) -> None:
    ranks, latency_s, bandwidth_bps, count = 3, 0.002, 1e7, 60_000  # one of the links is slow
    devices = sims(ranks)
    devices[2].clock.wait(devices[0].clock.now_ns + 5 * MS)
    begin_ns = devices[2].clock.now_ns

    def rank(number: int, group: CarriedGroup) -> list[int]:
        found = []
        for _ in range(2):
            if kind == "sum":
                finish = group.reduce([empty(count)])
            else:
                own, sizes = empty(count // ranks), [count // ranks] * ranks
                finish = group.gather(own, TensorSpec("uint8", (count,)), 0, sizes)
            arrived = finish()
            assert arrived.tensor.is_meta and arrived.tensor.shape == (count,)
            found.append(arrived.at_ns - begin_ns)
        return found

    passes = 2 if kind == "sum" else 1
    cost_ns = math.floor(1e9 * passes * (ranks - 1) * (count / ranks / bandwidth_bps + latency_s))
    links = {1: [EmulatedLink(2, 5, latency_s, bandwidth_bps)]}
    assert run_ranks(ranks, rank, devices=devices, links=links) == [[cost_ns, 2 * cost_ns]] * ranks


def test_sums_for_one_and_broadcasts_take_the_way_of_who_sends() -> None:
    """Behind what went there before."""
    devices = sims(2)
    begin_ns = devices[0].clock.now_ns
    links = {number: [EmulatedLink(1 - number, 10 + number, 0.05, 40 / 0.1)] for number in range(2)}

    def rank(number: int, group: CarriedGroup) -> list[int]:
        mine, ends = torch.empty(10, device=META), []  # 40 bytes: 0.1 s
        for root in (0, 0):
            begun = group.collect([mine], root)
            ends.append(begun if isinstance(begun, int) else begun().at_ns)
        begun = group.broadcast([spec_of(mine)], [mine] if number else (), 1)
        ends.append(begun if isinstance(begun, int) else begun().at_ns)
        return [(end - begin_ns) // MS for end in ends]

    assert run_ranks(2, rank, devices=devices, links=links) == [[150, 250, 350]] * 2


def test_nothing_has_elements() -> None:
    spec = TensorSpec("float32", (1 << 40,))

    def rank(number: int, group: CarriedGroup) -> None:
        group.send(torch.empty(spec.shape, device=META), 1 - number, 0)
        came = group.receive(spec, 1 - number, 0)().tensor
        assert came.is_meta and spec_of(came) == spec
        group.send(torch.empty(3, device=META), 1 - number, 0)
        with pytest.raises(WireError, match=r"sent float32\[3\]"):
            group.receive(spec, 1 - number, 0)()
        mine = torch.empty(5, device=META)
        collected, shared = group.collect([mine], 1), group.broadcast([spec_of(mine)], [mine] if number else (), 1)
        for begun in (collected, shared):
            assert isinstance(begun, int) or begun().tensor.is_meta
        wait = group.reduce([torch.empty(2 + number, device=META)])
        with pytest.raises(WireError, match="disagree"):
            wait()

    run_ranks(2, rank, devices=sims(2))


def test_a_device_that_computes_cannot_use_what_has_no_elements() -> None:
    spec = TensorSpec("float32", (2,))

    def rank(number: int, group: CarriedGroup) -> bool:
        mine = torch.ones(2, device="cpu" if number else "meta")
        group.send(mine, 1 - number, 0)
        finishes = group.receive(spec, 1 - number, 0), group.reduce([mine])
        if number == 0:
            return all(finish().tensor.is_meta for finish in finishes)
        for finish in finishes:
            with pytest.raises(WireError, match="does not compute"):
                finish()
        return True

    assert all(run_ranks(2, rank, devices=[*sims(1), accelerator_for("cpu")]))


@pytest.mark.parametrize("speed", [(float("nan"), 0.0), (-1.0, 0.0), (0.0, float("inf")), (1e300, 0.0)])
def test_another_ranks_link_has_a_speed_that_can_be_emulated(speed: tuple[float, float]) -> None:
    memory = SharedMemory.make()
    struct.pack_into("=2d", memory.map, 8 * FREE, 1.0, 2.0)
    assert speed_in(memory) == LinkSpeed(1.0, 2.0)
    struct.pack_into("=2d", memory.map, 8 * FREE, *speed)
    with pytest.raises(WireError, match="allowed: 0 to 1e"):
        speed_in(memory)


# ---- instructions

SPEC = TensorSpec("float32", (2,))
GROUP, OTHER = 5, 6
LATENCY_S = 0.05
LATENCY_NS = 50 * MS
COST_NS = 20 * MS


class RankRig(Rig):
    """The machine of an emulated device in groups.

    Args:
        channel: To the client that serves the rendezvous.
    """

    def __init__(self, channel: HubChannel) -> None:
        super().__init__(device=EmulatedDevice())
        self.channel = channel
        self.settled = 0

    def settle(self) -> None:
        """Note that waiting replies are to be sent."""
        self.settled += 1

    def send_to_client(self, message: Any, frames: Sequence[Any] = ()) -> None:
        self.channel.send_to_client(message, frames)

    def new_ticket(self) -> int:
        return self.channel.new_ticket()

    def await_ticket(self, ticket: int, timeout_s: float) -> Any:
        return self.channel.await_ticket(ticket, timeout_s)


def run(rank: Callable[[int, RankRig], Any], *, shared: bool = True) -> list[Any]:
    """Let two devices form two groups over a slow link, and run a function with each, in threads."""
    hub = Hub()

    def one(number: int) -> Any:
        rig = RankRig(hub.channel(number))
        slow = (EmulatedLink(1 - number, 1 - number, LATENCY_S, float("inf")),)
        for group in (GROUP, OTHER):
            rig.do(FormGroup(group, number, 2, "tcp", "127.0.0.1", 30.0, shared, slow))
        rig.do(Define(100, StoredProgram(elementwise("aten.relu.default", SPEC), COST_NS / 1e9)))
        rig.put(b1=torch.ones(2))
        try:
            return rank(number, rig)
        finally:
            rig.machine.close()

    with ThreadPoolExecutor(2) as threads:
        return [future.result(60) for future in [threads.submit(one, number) for number in range(2)]]


def test_a_trace_tells_waiting_from_working() -> None:
    """What is sent is under way, the receiver's program begins when it is there."""

    def rank(number: int, rig: RankRig) -> tuple[int, ...]:
        if number == 0:
            routine = Routine((Call(100, (1,), (2,)), Send(2, GROUP, 1)), 0)
        else:
            routine = Routine((Receive(2, SPEC, GROUP, 0), Call(100, (1,), (3,)), Call(100, (2,), (4,))), 0)
        rig.do(Define(50, routine), Run(50, trace=True))
        assert rig.failures == []
        return rig.times_ns

    sender, receiver = run(rank)
    assert sender[3] - sender[2] == LATENCY_NS
    assert receiver[1] == sender[3], "both know when it arrives"
    assert receiver[3] - receiver[2] == COST_NS, "the first program ran meanwhile"
    assert receiver[4] == max(receiver[1], receiver[3])
    assert receiver[5] - receiver[4] == COST_NS


@pytest.mark.parametrize("kind", ["send", "reduce", "gather"])
def test_links_change_between_runs(kind: str) -> None:
    whole = TensorSpec("float32", (4,))
    both = {
        "send": ((Send(1, GROUP, 1),), (Receive(2, SPEC, GROUP, 0), Call(100, (2,), (3,)))),
        "reduce": ((Reduce((1,), GROUP), Call(100, (1,), (3,))),) * 2,
        "gather": ((Gather(1, 2, whole, GROUP, (2, 2)), Call(101, (2,), (3,))),) * 2,
    }

    def rank(number: int, rig: RankRig) -> list[int]:
        rig.do(define(101, elementwise("aten.relu.default", whole)), Define(50, Routine(both[kind][number], 0)))
        lasted = []
        for latency_s in (LATENCY_S, 3 * LATENCY_S):
            rig.do(Reduce((1,), OTHER), Call(100, (1,), (3,)))  # both are done
            rig.do(Retime(links=(EmulatedLink(0, 1 - number, latency_s, float("inf")), EmulatedLink(0, 99, 9.0, 1.0))))
            rig.do(Run(50, trace=True))
            assert rig.failures == []
            lasted.append(rig.times_ns[1] - rig.times_ns[0])
        return lasted

    first_ns, second_ns = run(rank)[0]
    each_ns = LATENCY_NS * {"send": 1, "reduce": 2, "gather": 1}[kind]
    if kind == "send":
        assert (first_ns, second_ns) == (each_ns, 3 * each_ns)
    assert first_ns >= each_ns and second_ns >= 3 * each_ns, "who comes last determines the beginning"


def test_links_that_cannot_be_are_refused() -> None:
    def rank(number: int, rig: RankRig) -> None:
        rig.do(Retime(links=(EmulatedLink(0, 1 - number, 0.0, 0.0),)))
        assert [failure.kind for failure in rig.failures] == ["protocol"]

    run(rank)


def test_replies_that_wait_are_sent_before_it_waits_for_another_device() -> None:
    """The client may post what that one is to do when it has them."""

    def rank(number: int, rig: RankRig) -> int:
        if number == 0:
            rig.do(Receive(2, SPEC, GROUP, 1), Call(100, (2,), (3,)))
        else:
            time.sleep(0.2)
            rig.do(Send(1, GROUP, 0))
        assert rig.failures == []
        return rig.settled

    assert run(rank) == [1, 0]


def test_devices_that_share_no_memory_form_no_group() -> None:
    hub = Hub()
    rig = RankRig(hub.channel(0))
    rig.do(FormGroup(GROUP, 0, 2, "tcp", "127.0.0.1", 5.0, False))
    assert {failure.kind for failure in rig.failures} == {"peer"}
    assert "can only be in a group of one agent's sim devices" in rig.failures[0].message
