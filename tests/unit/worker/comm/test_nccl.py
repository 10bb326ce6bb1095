"""Groups over NCCL, modelled: see :mod:`tests.unit.worker.comm.modelled_nccl`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onebox.wire import KernelSpec, SlotArgument, Strided, TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup, LeaveGroup
from onebox.wire.protocol.instructions import Receive, Send
from onebox.wire.protocol.requests import Define
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm import nccl
from onebox.worker.comm.api import RankLost, WorkerGroup
from onebox.worker.comm.hybrid import HybridGroup
from onebox.worker.comm.manager import GroupManager
from onebox.worker.device import ComputeDevice
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.progress import WorkerProgress
from tests.unit.machines import Batch, Rig
from tests.unit.programs import HOST
from tests.unit.ranks import Hub, HubChannel
from tests.unit.worker.comm.modelled_nccl import ModelledNccl
from tests.unit.worker.late_device import LateDevice

ONE = TensorSpec("float32", (1,))


class OwnedChannel(HubChannel):
    """A channel that only the thread that made it may use, as that of a ZeroMQ socket."""

    strangers: list[str]

    def __init__(self, hub: Hub, worker: int) -> None:
        super().__init__(hub, worker)
        self.owner = threading.get_ident()
        self.strangers = []

    def send_to_client(self, message: Any, frames: Sequence[Any] = ()) -> None:
        """Serve a lookup."""
        if threading.get_ident() != self.owner:
            self.strangers.append(str(message))
        super().send_to_client(message, frames)


class Rank:
    """One rank: its groups, and what it may do with them."""

    def __init__(self, number: int, manager: GroupManager, progress: WorkerProgress, channel: OwnedChannel) -> None:
        self.number = number
        self.manager = manager
        self.progress = progress
        self.channel = channel

    @property
    def group(self) -> WorkerGroup:
        """The group."""
        return self.manager.get(3)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModelledNccl:
    modelled = ModelledNccl()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", modelled.ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(nccl, "_SETTINGS", {})
    return modelled


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    reasons: list[str] = []
    monkeypatch.setattr(nccl, "end_process", reasons.append)
    monkeypatch.setattr(nccl, "ABORT_S", 0.3)
    monkeypatch.setattr(nccl, "FREE_S", 0.3)
    yield reasons
    for thread in threading.enumerate():  # it would end this process when end_process is itself again
        if thread.name == "onebox-abort":
            thread.join(20)


def run(
    library: ModelledNccl,
    size: int,
    rank: Callable[[Rank], Any],
    *,
    gpus: Sequence[int] | Callable[[int], Sequence[int]] | None = None,
    hub: Hub | None = None,
    shared: bool = False,
    device: Accelerator = HOST,
) -> list[Any]:
    """Form a group of threads and run a function in each.

    Args:
        library: The library.
        size: How many ranks.
        rank: The function.
        gpus: Ranks that are GPUs, or those that are for a rank; all where left out.
        hub: The client.
        shared: Whether the others may share memory.
        device: The device of all.
    """
    client = hub or Hub()

    def one(number: int) -> Any:
        library.here.gpu = number
        among = tuple(range(size) if gpus is None else gpus(number) if callable(gpus) else gpus)
        progress = WorkerProgress()
        channel = OwnedChannel(client, number)
        manager = GroupManager(channel, device, progress)
        manager.form(FormGroup(3, number, size, "tcp", "127.0.0.1", 120.0, shared, nccl=among))
        try:
            return rank(Rank(number, manager, progress, channel))
        finally:
            manager.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, number) for number in range(size)]
        return [future.result(240) for future in futures]


def test_ranks_of_several_hosts_use_it_within_each(library: ModelledNccl) -> None:
    def rank(rank: Rank) -> tuple[float, float, float]:
        near, far = rank.number ^ 1, rank.number ^ 2
        for peer in (near, far):
            rank.group.send(torch.tensor([float(rank.number)]), peer, 0)
        found = [rank.group.receive(ONE, peer, 0)().tensor.item() for peer in (near, far)]
        return found[0], found[1], rank.group.reduce([torch.ones(1)])().tensor.item()

    def host(number: int) -> Sequence[int]:
        return (0, 1) if number < 2 else (2, 3)

    assert run(library, 4, rank, gpus=host) == [(number ^ 1, number ^ 2, 4.0) for number in range(4)]


def test_receives_may_be_called_before_sends(library: ModelledNccl) -> None:
    """As in a pipeline of two stages: each posts its receives first."""

    def rank(rank: Rank) -> list[float]:
        finishes = [rank.group.receive(ONE, 1 - rank.number, 0) for _ in range(3)]
        for each in range(3):
            rank.group.send(torch.tensor([rank.number * 10.0 + each]), 1 - rank.number, 0)
        return [finish().tensor.item() for finish in finishes]

    assert run(library, 2, rank) == [[10, 11, 12], [0, 1, 2]]


def test_three_ranks_may_come_to_each_other_in_a_circle(library: ModelledNccl) -> None:
    """Communicators made at first use would wait for each other."""

    def rank(rank: Rank) -> float:
        finish = rank.group.receive(ONE, (rank.number + 1) % 3, 0)
        rank.group.send(torch.tensor([float(rank.number)]), (rank.number + 2) % 3, 0)
        return finish().tensor.item()

    made = library.made
    assert run(library, 3, rank) == [1, 2, 0]
    assert library.made - made == 3 * 1 + 3 * 2 * 2, "one for all, and one for each direction; none at first use"


def test_tensors_come_in_the_order_of_their_sends_whatever_their_channels(library: ModelledNccl) -> None:
    """As U-Net's skips: plans receive in the order in which is sent."""

    def rank(rank: Rank) -> list[list[float]]:
        if rank.number == 0:
            tensor = torch.ones(2)
            for channel in (5, 7, 5):
                rank.group.send(tensor, 1, channel)
                tensor += 1  # what has been sent stays as it was
            return []
        rows = TensorSpec("float32", (2,))
        finishes = [rank.group.receive(rows, 0, channel) for channel in (5, 7, 5)]
        return [finish().tensor.tolist() for finish in reversed(finishes)]

    assert run(library, 2, rank)[1] == [[3, 3], [2, 2], [1, 1]]


def test_a_tensor_comes_in_chunks(library: ModelledNccl) -> None:
    whole = torch.arange(12.0).view(4, 3).to(torch.complex64)

    def rank(rank: Rank) -> torch.Tensor | None:
        if rank.number == 0:
            for part in whole.split([1, 3]):
                rank.group.send(part, 1, 0)
            return None
        return rank.group.receive(spec_of(whole), 0, 0, (1, 3))().tensor

    assert torch.equal(run(library, 2, rank)[1], whole)


def test_collectives(library: ModelledNccl) -> None:
    def rank(rank: Rank) -> tuple[Any, ...]:
        group, mine = rank.group, torch.full((2,), float(rank.number))
        total = group.reduce([mine])
        collected = group.collect([mine], 1)
        spread = group.broadcast([spec_of(mine)], [mine], 2)
        gathered = group.gather(mine[:1], TensorSpec("float32", (3,)), 0, (1, 1, 1))
        return (
            total().tensor.tolist(),
            None if isinstance(collected, int) else collected().tensor.tolist(),
            None if isinstance(spread, int) else spread().tensor.tolist(),
            gathered().tensor.tolist(),
        )

    found = run(library, 3, rank)
    assert [each[0] for each in found] == [[3, 3]] * 3
    assert [each[1] for each in found] == [None, [3, 3], None]
    assert [each[2] for each in found] == [[2, 2], [2, 2], None]
    assert [each[3] for each in found] == [[0, 1, 2]] * 3


def test_threads_of_the_library_do_not_use_the_channel_of_the_worker(library: ModelledNccl) -> None:
    def rank(rank: Rank) -> list[str]:
        rank.group.reduce([torch.ones(1)])()
        time.sleep(0.05)  # several times as long as the library's threads sleep
        return rank.channel.strangers

    assert run(library, 2, rank) == [[], []]


def test_ranks_that_mean_different_sums_are_told_when_the_device_is_done(
    library: ModelledNccl, ended: list[str]
) -> None:
    device = LateDevice()
    waits: list[int] = []

    def rank(rank: Rank) -> None:
        group, stream = rank.group, device.current()
        for _ in range(3):
            assert group.reduce([torch.ones(2)])().tensor.tolist() == [2, 2]
        stream.work(0.05)
        shapes = [(2, 3), (3, 2)] if rank.number else [(3, 2), (2, 3)]
        finish = group.reduce([torch.ones(shape[0]) for shape in shapes])
        assert finish().tensor.tolist() == [2] * 5
        waits.append(device.synchronised)
        end_s = time.monotonic() + 10
        with pytest.raises(RankLost, match="the ranks disagree on collective 3"):
            while rank.manager.check() and time.monotonic() < end_s:
                time.sleep(0.01)

    run(library, 2, rank, device=device)
    assert waits == [0, 0], "the host waits for no device"


def test_parts_are_put_together_without_a_wait_of_the_host(
    library: ModelledNccl, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sizes are known; that all ranks mean the same is checked when the device is done."""
    device = LateDevice()
    whole = torch.arange(24, dtype=torch.int16).view(4, 6)
    gathering = threading.local()

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def run_read(*args: Any) -> Any:
            assert not getattr(gathering, "now", False), "the host reads a value"
            return read(*args)

        return run_read

    for name in ("item", "tolist", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))

    def rank(rank: Rank) -> None:
        for dim, sizes in ((0, [2, 0, 2]), (1, [1, 3, 2])):
            gathering.now = True
            found = rank.group.gather(whole.split(sizes, dim)[rank.number], spec_of(whole), dim, sizes)().tensor
            gathering.now = False
            assert torch.equal(found, whole)

    run(library, 3, rank, device=device)
    assert (device.drains, device.synchronised) == (0, 0)

    def other(rank: Rank) -> None:
        spec = TensorSpec("float32", ((4, 2), (2, 4))[rank.number])
        rank.group.gather(torch.ones(2, 2), spec, rank.number, (2, 2))()
        end_s = time.monotonic() + 10
        with pytest.raises(RankLost, match=f"rank {1 - rank.number} came for another gather"):
            while rank.manager.check() and time.monotonic() < end_s:
                time.sleep(0.01)

    run(library, 2, other, device=device)


def test_a_sum_is_checked_before_the_group_is_left(library: ModelledNccl, ended: list[str]) -> None:
    device = LateDevice()

    def rank(rank: Rank) -> None:
        before = rank.manager.failures()
        device.current().work(0.05)
        rank.group.reduce([torch.ones(1)] * 2 if rank.number else [torch.ones(2)])()
        rank.manager.leave(3)
        with pytest.raises(RankLost, match="the ranks disagree on collective 0"):
            rank.manager.check_since(before)

    run(library, 2, rank, device=device)


# ---- failures


def define_kernels() -> tuple[Define, Define]:
    """Return definitions of a sum and of a product in place, of two tensors each."""
    two = (SlotArgument(0), SlotArgument(1))
    add = KernelSpec("aten.add.Tensor", two, {}, 2, 0, (Strided("float32", (1,), (1,)),))
    return Define(100, add), Define(101, KernelSpec("aten.mul_.Tensor", two, {}, 2, 0))


def test_a_wait_for_a_silent_rank_ends_when_it_is_interrupted(library: ModelledNccl, ended: list[str]) -> None:
    waiting = threading.Event()

    def rank(rank: Rank) -> tuple[str, float]:
        if rank.number == 1:
            waiting.wait(20)
            return "", 0.0
        finish = rank.group.receive(ONE, 1, 0)
        threading.Timer(0.1, rank.manager.interrupt, (3,)).start()
        before_s = time.monotonic()
        try:
            with pytest.raises(RankLost, match="does not answer"):
                finish()
            with pytest.raises(RankLost):
                rank.group.reduce([torch.ones(1)])
            with pytest.raises(RankLost):
                rank.manager.check()
            rank.manager.leave(3)
            rank.manager.check()
        finally:
            waiting.set()
        return "ended", time.monotonic() - before_s

    word, seconds = run(library, 2, rank)[0]
    assert word == "ended" and seconds < 3 and not ended


def test_an_operation_that_failed_is_noticed_without_a_wait(library: ModelledNccl, ended: list[str]) -> None:
    """A wait for it does not fail, as it is the device that waits."""
    seen = threading.Event()

    def rank(rank: Rank) -> None:
        if rank.number == 1:
            seen.wait(20)
            return
        rank.group.receive(ONE, 1, 0)
        assert rank.group.check(), "it goes on"
        (communicator,) = [each for each in library.communicators.values() if each.queues[each.size - 1]]
        communicator.queues[1][0].error = RuntimeError("NCCL error: remote process exited\nmore")
        with pytest.raises(RankLost, match=r"remote process exited$"):
            rank.group.check()
        seen.set()

    run(library, 2, rank)


def test_a_process_whose_communicators_do_not_end_ends(library: ModelledNccl, ended: list[str]) -> None:
    library.patience_s = 5.0  # longer than the limit of an abort, however late its watch is

    def rank(rank: Rank) -> None:
        if rank.number == 0:
            library.hang_in_abort.set()
            rank.progress.waiting = True
            rank.manager.interrupt(3)
            end_s = time.monotonic() + 10
            while not ended and time.monotonic() < end_s:
                time.sleep(0.01)
            library.hang_in_abort.clear()

    run(library, 2, rank)
    assert any("has not ended the communicators of group 3" in reason for reason in ended)


def test_a_process_that_stays_in_a_call_after_the_abort_ends(library: ModelledNccl, ended: list[str]) -> None:
    def rank(rank: Rank) -> None:
        rank.progress.waiting = rank.number == 1
        rank.manager.interrupt(3)
        time.sleep(0.6)  # in a call of the device that does not return

    run(library, 2, rank)
    assert len(ended) == 1 and "has not ended" in ended[0]


def test_a_process_that_makes_communicators_for_ranks_that_ended_ends(
    library: ModelledNccl, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else ends this wait."""
    library.patience_s = 1.5
    manager = GroupManager(OwnedChannel(Hub(), 0), HOST, WorkerProgress())
    library.here.gpu = 0
    threading.Timer(0.1, manager.interrupt, (3,)).start()
    with pytest.raises(AssertionError):  # the modelled process goes on after its end
        manager.form(FormGroup(3, 0, 2, "tls", "127.0.0.1", 120.0, nccl=(0, 1)))
    assert ended == ["the others of group 3 did not come to their communicators"]


# ---- groups that are not of different GPUs alone


@pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
def test_gpus_of_a_mixed_group_use_nccl_among_themselves(library: ModelledNccl, shared: bool) -> None:
    """Ranks 1 and 3 are GPUs; all order their messages by pair."""

    def rank(rank: Rank) -> tuple[list[float], float, float]:
        group = rank.group
        others = [other for other in range(4) if other != rank.number]
        finishes = [group.receive(ONE, other, 0) for other in others for _ in range(2)]
        for other in others:
            for count in range(2):
                group.send(torch.tensor([rank.number * 10.0 + count]), other, 0)
        total = group.reduce([torch.tensor([float(rank.number)])])().tensor.item()
        operations = sum(len(each.queues) == 2 for each in library.communicators.values())
        return [finish().tensor.item() for finish in finishes], total, operations

    found = run(library, 4, rank, gpus=(1, 3), shared=shared)
    assert [came for came, _, _ in found] == [
        [other * 10.0 + count for other in range(4) if other != number for count in range(2)] for number in range(4)
    ]
    assert [total for _, total, _ in found] == [6.0] * 4
    assert library.made == 2 * 3, "one for both GPUs, and one for each direction"


def test_the_library_refuses_one_gpu_twice(library: ModelledNccl) -> None:
    """So the client must not choose it: see the tests of the pool."""

    def one(number: int) -> str:
        library.here.gpu = "the only one"
        manager = GroupManager(OwnedChannel(hub, number), HOST, WorkerProgress())
        with pytest.raises(RankLost, match="Duplicate GPU") as caught:
            manager.form(FormGroup(3, number, 2, "tcp", "127.0.0.1", 120.0, nccl=(0, 1)))
        return str(caught.value)

    hub = Hub()
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(one, range(2)))


def test_a_large_group_has_as_many_communicators_as_a_small_one(library: ModelledNccl) -> None:
    """Ranks that are far from each other use other ways; sums of all do not."""

    def rank(rank: Rank) -> tuple[type, float, list[float]]:
        others = [(rank.number + step) % 10 for step in (1, 5, 9)]
        finishes = [rank.group.receive(ONE, other, 0) for other in others]
        for other in others:
            rank.group.send(torch.tensor([float(rank.number)]), other, 0)
        total = rank.group.reduce([torch.ones(1)])().tensor.item()
        return type(rank.group), total, [finish().tensor.item() for finish in finishes]

    found = run(library, 10, rank)
    assert found == [(HybridGroup, 10.0, [float((number + step) % 10) for step in (1, 5, 9)]) for number in range(10)]
    assert library.made == 10 * (1 + 4 * nccl.REACH)


def test_nine_gpus_all_reach_each_other() -> None:
    assert len(set(nccl.directions(9))) == 9 * 8


def joined_rig(library: ModelledNccl, hub: Hub, number: int, accelerator: Accelerator | None = None) -> Rig:
    """Return a machine that is one rank's of a hub, and of a GPU of its own."""
    library.here.gpu = number
    rig = Rig() if accelerator is None else Rig(device=ComputeDevice("cuda:0", 1, accelerator=accelerator))
    channel = OwnedChannel(hub, number)
    for name in ("send_to_client", "await_ticket", "new_ticket"):
        setattr(rig, name, getattr(channel, name))
    return rig


def test_a_value_that_is_read_after_an_interruption_is_an_error(library: ModelledNccl, ended: list[str]) -> None:
    """The wait for the device ends with whatever is in its memory."""
    hub, formed = Hub(), threading.Barrier(2)

    def one(number: int) -> None:
        rig = joined_rig(library, hub, number)
        rig.put(b1=torch.ones(1))
        rig.do(FormGroup(3, number, 2, "tcp", "127.0.0.1", 120.0, nccl=(0, 1)))
        assert rig.get(1).tolist() == [1]
        rig.machine.interrupt(3)
        with pytest.raises(Poisoned, match="does not answer"):
            rig.get(1)
        assert [failure.kind for failure in rig.failures] == ["peer"]
        formed.wait(20)
        rig.do(LeaveGroup(3))
        assert rig.get(1).tolist() == [1]
        rig.machine.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(one, range(2)))


def test_what_was_computed_from_an_aborted_receive_is_void(library: ModelledNccl, ended: list[str]) -> None:
    """The host goes on meanwhile; what the receive does not touch, and what is made after it, has its values."""
    library.returns_at_once = True
    hub, formed = Hub(), threading.Barrier(2)
    add, mul_ = define_kernels()

    def rig_of(number: int) -> Rig:
        rig = joined_rig(library, hub, number, LateDevice())
        rig.put(b1=torch.ones(1), b2=torch.ones(1), b3=torch.ones(1))
        rig.do(add, mul_, FormGroup(3, number, 2, "tcp", "127.0.0.1", 120.0, nccl=(0, 1)))
        return rig

    def receiver() -> None:
        rig = rig_of(0)
        rig.do(Batch((add.number, 1, 1, 7)))
        received = Receive(4, ONE, 3, 1, 0)
        rig.do(received, Batch((add.number, 1, 4, 5, mul_.number, 2, 4)))
        rig.do(Batch((add.number, 5, 5, 6)))
        assert not rig.failures
        rig.machine.interrupt(3)
        formed.wait(20)
        rig.do(LeaveGroup(3))
        for number in (4, 5, 6, 2):
            with pytest.raises(Poisoned, match="does not answer"):
                rig.get(number)
        assert [rig.get(number).item() for number in (1, 3, 7)] == [1, 1, 2]
        rig.do(Batch((add.number, 1, 3, 8)))
        rig.put(b2=torch.zeros(1))
        assert [rig.get(number).item() for number in (8, 2)] == [2, 0]
        rig.machine.close()

    def other() -> None:
        rig = rig_of(1)
        formed.wait(20)
        rig.machine.close()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(receiver), threads.submit(other)]:
            future.result(240)


@pytest.mark.parametrize("leaves", [False, True])
def test_what_was_computed_from_tensors_that_have_come_keeps_its_values(
    library: ModelledNccl, ended: list[str], leaves: bool
) -> None:
    """Also where the group fails afterwards, or others of its operations go on."""
    hub, sent = Hub(), threading.Barrier(2)
    add, _ = define_kernels()

    def one(number: int) -> None:
        rig = joined_rig(library, hub, number, LateDevice())
        rig.put(b1=torch.ones(1))
        rig.do(add, FormGroup(3, number, 2, "tcp", "127.0.0.1", 120.0, nccl=(0, 1)))
        if number:
            rig.do(Send(1, 3, 0, 0))
            sent.wait(20)
        else:
            sent.wait(20)
            rig.do(Receive(4, ONE, 3, 1, 0))
            rig.do(Batch((add.number, 1, 4, 5)))
            rig.do(*[Receive(6, ONE, 3, 1, 0)] * leaves)
            rig.machine.interrupt(3)
            rig.do(LeaveGroup(3))
            assert rig.get(5).item() == 2
            assert not rig.failures
        sent.wait(20)
        rig.machine.close()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(one, number) for number in range(2)]:
            future.result(240)


def test_a_group_that_was_left_too_early_has_failed_for_the_work_before(
    library: ModelledNccl, ended: list[str]
) -> None:
    """Leaving it aborts the receive, which the device's next work reads."""
    left = threading.Event()

    def rank(rank: Rank) -> None:
        if rank.number == 1:
            left.wait(20)
            return
        manager = rank.manager
        before = manager.failures()
        rank.group.receive(ONE, 1, 0)
        manager.check_since(before)
        manager.leave(3)
        with pytest.raises(RankLost, match="before it had received everything"):
            manager.check_since(before)
        manager.check_since(manager.failures())
        left.set()

    run(library, 2, rank)


def test_a_group_that_is_left_when_everything_has_come_has_not_failed(library: ModelledNccl) -> None:
    def rank(rank: Rank) -> None:
        before = rank.manager.failures()
        finish = rank.group.receive(ONE, 1 - rank.number, 0)
        rank.group.send(torch.ones(1), 1 - rank.number, 0)
        assert finish().tensor.item() == 1
        rank.group.reduce([torch.ones(1)])()
        rank.manager.leave(3)
        rank.manager.check_since(before)

    run(library, 2, rank)
