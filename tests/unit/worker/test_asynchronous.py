"""Nothing in a step makes the host of an asynchronous device wait, and times are those of the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onebox.wire import TensorSpec, spec_of, to_frame
from onebox.wire.protocol.instructions import Ask, Call, Evict, Free, Get, Offload, OptimizerStep, Prefetch
from onebox.wire.protocol.requests import Define, OptimizerSpec, Put, Routine, Run
from onebox.wire.protocol.responses import Scalars
from onebox.worker.device import ComputeDevice
from onebox.worker.memory.staging import HostReads, UploadRing
from onebox.worker.optimizer.native import NativeOptimizer
from tests.unit.machines import Rig, define, elementwise
from tests.unit.worker.late_device import LateDevice

X = torch.linspace(-1, 1, 12).reshape(3, 4)
ONE = torch.full((), 0.5)


def rig_of(device: LateDevice) -> Rig:
    rig = Rig(device=ComputeDevice("cuda:0", 1, accelerator=device))
    rig.put(b1=X, b2=X * 2, b3=ONE)
    with device.kernels():  # the first use takes seconds
        rig.do(define(100, elementwise("aten.relu.default", spec_of(X))), Call(100, (1,), (4,)), Free((4,)))
    device.synchronised = 0
    return rig


def lasted_s(rig: Rig) -> list[float]:
    return [(end - start) / 1e9 for start, end in zip(rig.times_ns[::2], rig.times_ns[1::2], strict=True)]


def test_an_instruction_lasts_as_long_as_the_device_works_on_it() -> None:
    device = LateDevice(kernel_s=0.02, still=True)
    rig = rig_of(device)
    steps = Call(100, (1,), (4,)), Call(100, (4,), (5,)), Free((4,)), Call(100, (5,), (6,)), Ask("scalars", (3,))
    rig.do(Define(50, Routine(steps, 0)))
    with device.kernels():
        begin_ns = device.now_ns()
        (found,) = rig.do(Run(50, trace=True))
        end_ns = device.now_ns()
    assert found == Scalars((0.5,))
    first, second, free, third, _ = lasted_s(rig)
    assert (first, second, free, third) == pytest.approx((0.02, 0.02, 0, 0.02))
    assert begin_ns <= rig.times_ns[0] <= rig.times_ns[-1] <= end_ns
    assert list(rig.times_ns) == sorted(rig.times_ns)
    assert device.drains == 0
    assert device.synchronised == 1  # for the reply


def test_a_copy_lasts_until_it_is_complete_on_its_own_stream() -> None:
    device = LateDevice(kernel_s=0.01, copy_s=0.05, still=True)
    rig = rig_of(device)
    steps = (
        Offload((1,)),
        Call(100, (2,), (4,)),
        Evict((1,)),
        Prefetch((1,)),
        Call(100, (2,), (5,)),
        Call(100, (1,), (6,)),
    )
    rig.do(Define(50, Routine(steps, 0)))
    with device.kernels():
        rig.do(Run(50, trace=True))
    assert rig.failures == []
    offload, call, evict, prefetch, beside, reader = lasted_s(rig)
    assert (offload, call, evict) == pytest.approx((0.05, 0.01, 0.04))
    assert (prefetch, beside, reader) == pytest.approx((0.05, 0.01, 0.01))
    assert torch.equal(rig.get(1), X)


def test_a_copy_that_ends_after_its_run_is_not_part_of_its_trace() -> None:
    device = LateDevice(copy_s=0.05, still=True)
    rig = rig_of(device)
    rig.do(Define(50, Routine((Offload((1,)),), 0)))
    with device.kernels(), torch.inference_mode():
        rig.machine.begin()
        results = rig.machine.execute(Run(50, trace=True), iter(()))
        reply = rig.machine.reply(1, results)
        rig.machine.begin()
        rig.machine.execute(Evict((1,)), iter(()))
        assert reply.after is not None
        reply.after.synchronize()
        times = reply.message()[0].times_ns
    assert times[1] == times[0]


def test_values_are_those_of_their_place_in_the_work() -> None:
    device = LateDevice()
    rig = rig_of(device)
    rig.do(Define(101, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,))))
    gradient = torch.ones(3, 4)
    rig.put(b9=gradient)
    before = X.clone()
    steps = (Ask("scalars", (3,)), OptimizerStep(101, (9,), 0.5), Ask("scalars", (3,)))
    rig.do(Define(50, Routine(steps, 0)))
    with torch.inference_mode():
        rig.machine.begin()
        results = [*rig.machine.execute(Get((1,)), iter(())), *rig.machine.execute(Run(50), iter(()))]
        reply = rig.machine.reply(1, results)
        assert device.synchronised == 0
        assert device.drains == 0
        assert reply.after is not None
        reply.after.synchronize()
        message, frames = reply.message()
    assert torch.equal(torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).view(3, 4), before)
    asked, norm, again = message.results[1:]
    assert asked == again == Scalars((0.5,))
    assert norm == Scalars((float(torch.nn.utils.get_total_norm([gradient])),))
    assert rig.failures == []


def test_what_is_no_single_value_is_refused_at_once() -> None:
    rig = rig_of(LateDevice())
    with pytest.raises(Exception, match="is no single value"):
        rig.do(Ask("scalars", (1,)))


# ---- uploads


def upload(ring: UploadRing, tensor: torch.Tensor) -> torch.Tensor:
    return ring.upload(spec_of(tensor), bytes(to_frame(tensor)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_uploads_of_any_size_arrive_whole(dtype: torch.dtype) -> None:
    ring = UploadRing(LateDevice(), block_bytes=1024, blocks=3)
    for size in (1, 3, 255, 256, 257, 1000, 5000, 0):
        tensor = torch.randint(0, 2, (size,)).to(dtype)
        assert torch.equal(upload(ring, tensor), tensor)
    assert torch.equal(upload(ring, torch.full((), 7).to(dtype)), torch.full((), 7).to(dtype))


def test_a_block_is_written_again_only_after_its_copies() -> None:
    device = LateDevice(copy_s=0.1, still=True)
    ring = UploadRing(device, block_bytes=1024, blocks=2)
    with device.kernels():
        for _ in range(6):
            upload(ring, torch.zeros(256))
    (stream,) = device.streams
    assert all(event.query() for event in stream.events[:4])
    assert stream.events[0].waited
    assert device.drains == 0


def test_uploads_go_on_beside_the_devices_work_and_their_readers_after_them() -> None:
    device = LateDevice(copy_s=0.005)
    device.current().work(3600)
    busy_until_ns = device.current().busy_until_ns
    with device.kernels():
        upload(UploadRing(device), torch.zeros(256))
    (stream,) = device.streams
    assert stream.busy_until_ns < busy_until_ns
    assert device.current().busy_until_ns >= stream.events[-1].at_ns
    assert device.synchronised == 0


def test_puts_use_the_ring() -> None:
    device = LateDevice()
    rig = rig_of(device)
    spec = TensorSpec("float32", (3, 4))
    rig.do(Put((20,), (spec,)), frames=[bytes(to_frame(X))])
    assert len(device.streams[-1].events) == 4  # three by rig_of
    assert torch.equal(rig.get(20), X)
    assert device.drains == 0


# ---- reads


def test_reads_use_pinned_memory_again_when_they_are_over() -> None:
    device, made = LateDevice(), []
    device.pinned = lambda size: made.append(size) or torch.empty(size, dtype=torch.uint8)  # type: ignore[method-assign]
    reads = HostReads(device, slab_bytes=256)
    for round_ in range(20):
        tensors = [torch.full((), float(round_ + place)) for place in range(6)]
        pending = [reads.begin(tensor) for tensor in tensors]
        assert [float(read()) for read in pending] == [float(tensor) for tensor in tensors]
    assert len(made) <= 4  # for those of two rounds
    for _ in range(10):
        dropped = [reads.begin(torch.ones(())) for _ in range(20)]
        del dropped
    assert len(made) <= 8
    assert device.drains == 0


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.tensor([True]), torch.tensor(1 + 2j).conj(), torch.eye(3).T])
def test_a_read_is_the_tensor(tensor: torch.Tensor) -> None:
    found = HostReads(LateDevice()).begin(tensor)()
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_large_tensors_are_waited_for() -> None:
    device = LateDevice()
    large = torch.arange(10_000)
    assert torch.equal(HostReads(device).begin(large)(), large)
    assert device.drains == 1


# ---- launches


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_scaled_by_one_call_to_the_same_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(5, 7, generator=generator).to(dtype) for _ in range(6)]
    spec = OptimizerSpec("SGD", ((tuple(range(6)), {"lr": 0.1, "foreach": False}),), tuple(range(6)))
    found = []
    for accelerator in (None, LateDevice()):
        parameters = [value.clone() for value in values]
        native = NativeOptimizer(spec, parameters, [], None, accelerator)
        with torch.inference_mode(), Calls() as calls:
            native.step([value * 3 for value in values], 0.5)
        found.append(parameters)
        assert calls.names["_foreach_mul"] == (accelerator is not None)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
