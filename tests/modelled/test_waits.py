"""Each wait, kept memory and synchronisation of the worker is needed: without one of them, one of these fails."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Call, Evict, Free, Offload, OptimizerStep, Prefetch
from onebox.wire.protocol.requests import Define, OptimizerSpec, Put
from onebox.wire.protocol.snapshots import Drop, Fill, Read, Snapshot
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm.gpu_sender import StreamShmCopier
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.faults import FaultInjector
from onebox.worker.memory.async_copy import CopyStream
from onebox.worker.optimizer.host_parameters import HostParameters
from onebox.worker.snapshots.slots import SnapshotSlots
from tests.kit.accelerator import ModelAccelerator
from tests.unit.machines import Rig, define, elementwise
from tests.unit.ranks import MemoryGroup, run_ranks

SPEC = TensorSpec("float64", (40,))
X, Y = torch.arange(40, dtype=torch.float64), torch.arange(40, dtype=torch.float64) * 3 - 7


@pytest.fixture
def rig() -> Rig:
    """A machine with values in 1 and 2, and programs: negation (101), sum of two (102)."""
    rig = Rig()
    rig.do(define(101, elementwise("aten.neg.default", SPEC)), define(102, elementwise("aten.sub.Tensor", SPEC, 2)))
    rig.put(b1=X, b2=Y)
    return rig


def test_memory_of_evicted_values_is_used_again_at_once(rig: Rig) -> None:
    for _ in range(3):
        rig.do(Call(101, (1,), (3,)), Offload((3,)), Call(101, (2,), (4,)), Evict((3,)), Call(101, (1,), (5,)))
        rig.do(Free((4, 5)), Call(102, (2, 1), (6,)), Prefetch((3,)), Call(101, (3,), (7,)), Free((3, 6)))
        rig.do(Call(101, (2,), (8,)))
        assert torch.equal(rig.get(7), X)
        rig.do(Free((7, 8)))
    assert rig.failures == []


def test_a_block_of_the_host_is_used_again_at_once(rig: Rig) -> None:
    for _ in range(3):
        rig.do(Call(101, (1,), (3,)), Offload((3,)), Evict((3,)), Prefetch((3,)), Free((3,)))
        rig.do(Call(101, (2,), (4,)), Offload((4,)), Evict((4,)), Prefetch((4,)))
        assert torch.equal(rig.get(4), -Y)
        rig.do(Free((4,)))
    assert rig.failures == []


def test_a_block_of_the_host_is_given_away_while_it_is_read(rig: Rig) -> None:
    for _ in range(3):
        rig.do(Call(101, (1,), (3,)), Offload((3,)), Evict((3,)), Call(101, (2,), (4,)))
        rig.do(Prefetch((3,)), Offload((4,)))
        assert torch.equal(rig.get(3), -X)
        rig.do(Free((3, 4)))
    assert rig.failures == []


def test_values_that_are_freed_while_they_are_copied(rig: Rig) -> None:
    for _ in range(3):
        rig.do(Call(101, (1,), (3,)), Offload((3,)), Free((3,)), Call(101, (2,), (4,)))
        assert torch.equal(rig.get(4), -Y)
        rig.do(Offload((4,)), Evict((4,)), Prefetch((4,)), Free((4,)), Call(101, (1,), (5,)))
        assert torch.equal(rig.get(5), -X)
        rig.do(Free((5,)))
    assert rig.failures == []


@pytest.mark.parametrize("host", [False, True])
def test_a_step_with_gradients_in_the_hosts_memory(rig: Rig, host: bool) -> None:
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,), host=host)), Offload((1,)))
    value = X.clone()
    for _ in range(3):
        rig.do(Call(101, (2,), (3,)), OptimizerStep(7, (3,)), Call(101, (3,), (4,)), Free((3,)))
        value += Y
        rig.do(Call(101, (1,), (5,)))
        assert torch.equal(rig.get(5), -value)
        assert torch.equal(rig.get(4), Y)
        if host:
            rig.do(Call(101, (2,), (8,)), Offload((8,)), Evict((8,)), OptimizerStep(7, (8,)))
            value += Y
            assert torch.equal(rig.get(1), value)
            rig.do(Free((8,)))
        rig.do(Free((4, 5)))
    rig.do(Evict((1,)), Prefetch((1,)))
    assert torch.equal(rig.get(1), X), "as it was when it was offloaded"
    assert rig.failures == []


def test_host_parameters_in_several_runs(accelerator: ModelAccelerator) -> None:
    """Gradients of run after run come by two blocks of the host."""
    with torch.inference_mode():
        parameters = [accelerator.to_device(X + number) for number in range(5)]
        host = HostParameters(parameters, accelerator, run_bytes=X.nbytes)
        for step in range(3):
            gradients = {index: accelerator.to_device(Y) * (index + step) for index in range(5)}

            def apply(run: object, landed: object) -> None:
                for index, gradient in zip(run, landed, strict=True):  # type: ignore[call-overload]
                    host.tensors[index].sub_(gradient)

            host.step(gradients, None, apply)
            seen = [parameter * 1 for parameter in parameters]
            del gradients
            taken = [accelerator.empty((40,), torch.float64).fill_(5) for _ in range(5)]
            del taken
            for index, value in enumerate(seen):
                moved = sum(index + before for before in range(step + 1))
                assert torch.equal(value.cpu(), X + index - Y * moved)


def test_updates_wait_for_snapshots(rig: Rig) -> None:
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,))))
    value = X.clone()
    for _ in range(3):
        rig.do(Call(101, (2,), (3,)), Snapshot(3, (1, 3)), Free((3,)), Call(101, (1,), (4,)), OptimizerStep(7, (2,)))
        rig.do(Free((4,)), Read(3, 0, X.nbytes))
        assert bytes(rig.frames_out[0]) == value.numpy().tobytes()
        rig.do(Fill((5, 6), (SPEC, SPEC), ((3, 0), (3, X.nbytes))))
        assert torch.equal(rig.get(5), value)
        assert torch.equal(rig.get(6), -Y)
        value = rig.get(1)
        rig.do(Free((5, 6)), Drop((3,), again=True))
    assert rig.failures == []


def test_memory_of_slots_is_used_again(accelerator: ModelAccelerator) -> None:
    slots = SnapshotSlots(accelerator, FaultInjector())
    with torch.inference_mode():
        for step in range(4):
            made = accelerator.to_device(X) + step
            slots.keep(1, [made])
            slots.drop([1], again=True)
            slots.write(2, 0, X.nbytes, Y.numpy().tobytes())
            assert torch.equal(slots.host_tensor(SPEC, (2, 0)), Y)
            slots.drop([2], again=True)


def test_what_is_put_over_a_parameter_waits(rig: Rig) -> None:
    rig.do(Define(7, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,))), Snapshot(3, (1,)), Offload((1,)))
    rig.do(Put((1,), (SPEC,), there=True), frames=[Y.numpy().tobytes()])
    rig.do(Read(3, 0, X.nbytes))
    assert bytes(rig.frames_out[0]) == X.numpy().tobytes()
    assert torch.equal(rig.get(1), Y)


def test_a_copy_holds_what_its_caller_frees(accelerator: ModelAccelerator) -> None:
    copies, landing = CopyStream(accelerator), accelerator.pinned(X.nbytes).view(torch.float64)
    with torch.inference_mode():
        source = accelerator.to_device(X) * 2
        copies.follow()
        copy = copies.copy([(source, landing)], hold=True)
        del source
        other = accelerator.empty((40,), torch.float64).fill_(1)
        copy.finish()
        assert torch.equal(landing, 2 * X)
        assert other.sum().item() == 40


@pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")
def test_ranks_that_send_in_both_directions(accelerator: ModelAccelerator) -> None:
    """Each rank has its own stream of work, as it would have its own device."""

    def rank(which: int, group: MemoryGroup) -> list[Tensor]:
        found = []
        with torch.inference_mode(), accelerator.on(accelerator.stream()):
            x, y = accelerator.to_device(X), accelerator.to_device(Y)
            for step in range(6):  # nothing here makes the host wait for this rank's stream
                whole = x * (which + step + 1)
                group.send(whole, 1 - which, 0)
                whole.fill_(-1)
                group.send((y + which).view(8, 5).t(), 1 - which, 1)
                del whole
                busy = x * 2
                one = group.receive(SPEC, 1 - which, 0)().tensor
                other = group.receive(TensorSpec("float64", (5, 8)), 1 - which, 1)().tensor
                sums = one + other.t().reshape(-1)
                del one, other
                taken = [accelerator.empty((40,), torch.float64).fill_(step) for _ in range(3)]
                found.append(sums)
                del taken, busy
            return [each.cpu() for each in found]

    copiers = {which: StreamShmCopier(accelerator) for which in range(2)}
    try:
        results = run_ranks(2, rank, devices=[accelerator] * 2, copiers=copiers, timeout_s=10)  # type: ignore[arg-type]
    except RankLost as error:
        accelerator.synchronize()
        raise AssertionError(str(error)) from error
    for which, step in itertools.product(range(2), range(6)):
        assert torch.equal(results[which][step], X * (1 - which + step + 1) + Y + 1 - which)


@pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")
def test_memory_of_a_received_tensor_is_used_again_after_what_reads_it(accelerator: ModelAccelerator) -> None:
    copier, memory = StreamShmCopier(accelerator), SharedMemory.make()
    with torch.inference_mode(), accelerator.on(accelerator.stream()):
        for _ in range(2):
            made, _ = copier.into(memory, 1 << 16, SPEC)
            made.sum()
            del made  # the next one lies there, unless it is kept for the sum
    accelerator.synchronize()
    copier.release()


@pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")
def test_memory_is_registered_as_long_as_it_is_copied(accelerator: ModelAccelerator) -> None:
    copier, memory = StreamShmCopier(accelerator), SharedMemory.make()
    with torch.inference_mode():
        made, _ = copier.into(memory, 1 << 16, SPEC)
        copier.release()
        assert accelerator.races == ()
        made.sum()
