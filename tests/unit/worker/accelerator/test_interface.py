"""The interface of devices is the only way to a GPU: no other file of the worker names CUDA, or asks for it."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onebox.worker
from onebox.wire import KernelSpec, SlotArgument, Strided, spec_of
from onebox.wire.protocol.instructions import Ask, Call, Evict, Offload, OptimizerStep, Prefetch
from onebox.wire.protocol.requests import Define, OptimizerSpec
from onebox.wire.protocol.responses import WorkerMemory
from onebox.wire.protocol.snapshots import Fill, Snapshot
from onebox.worker.accelerator import Accelerator, DeviceFailed, HostAccelerator, accelerator_for, needs_driver
from onebox.worker.comm.shm.gpu_sender import shm_copier_for
from onebox.worker.comm.shm.segment import supported
from onebox.worker.device import ComputeDevice
from onebox.worker.memory.buffers import Poisoned
from tests.unit.machines import Batch, Rig, define, elementwise
from tests.unit.programs import HOST
from tests.unit.ranks import MemoryGroup, run_ranks

PACKAGE = Path(onebox.worker.__file__).parent
ATTRIBUTES = {"cuda", "is_cuda", "is_pinned", "pin_memory", "record_stream"}


def uses_of_cuda(text: str) -> list[int]:
    """Return the lines of a source file that use CUDA, or ask a tensor or a device for it."""
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}

    def found() -> Iterator[int]:
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) if name in ATTRIBUTES:
                    yield node.lineno
                case ast.keyword(arg="pin_memory"):
                    yield node.value.lineno
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    module = getattr(node, "module", None) or ""
                    if any("cuda" in f"{module}.{each.name}".split(".") for each in names):
                        yield node.lineno
                case ast.Constant(value=str(value)) if value.startswith("cuda") and id(node) not in docs:
                    yield node.lineno
                case _:
                    pass

    return sorted(set(found()))


@pytest.mark.parametrize(
    "line",
    [
        'x = device.type == "cuda"',
        'x = name.startswith("cuda:")',
        "torch.cuda.synchronize()",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "x = tensor.is_cuda",
        "x = tensor.is_pinned()",
        "tensor.record_stream(stream)",
        "x = torch.empty(3, pin_memory=True)",
        "x = tensor.pin_memory()",
        "x = tensor.cuda()",
    ],
)
def test_every_use_of_cuda_is_found(line: str) -> None:
    assert uses_of_cuda(f'"""cuda"""\n{line}\n') == [2]


def test_only_the_interface_knows_cuda() -> None:
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "accelerator")
    assert len(files) > 60
    assert {str(path.relative_to(PACKAGE)): lines for path in files if (lines := uses_of_cuda(path.read_text()))} == {}
    own = {path.name: path.read_text() for path in (PACKAGE / "accelerator").glob("*.py")}
    cuda = {name: text for name, text in own.items() if "torch.cuda." in text}
    assert set(cuda) == {"cuda.py", "cuda_graph.py"}
    assert all(len(text.splitlines()) < 120 for text in cuda.values())


@pytest.mark.parametrize("name", ["cpu"])
def test_the_work_of_a_host_is_complete_when_it_returns(name: str) -> None:
    device: Accelerator = accelerator_for(name)
    assert not device.asynchronous
    assert device.device == torch.device(name)
    stream, begin_ns = device.stream(), time.monotonic_ns()
    with device.on(stream):
        made = device.empty((2, 3), torch.float64)
    assert (made.device, made.shape, made.dtype) == (device.device, (2, 3), torch.float64)
    event = stream.record(timed=True)
    stream.wait(event)
    stream.wait_stream(device.current())
    device.keep(made, stream)
    event.synchronize()
    device.synchronize()
    assert event.query()
    assert begin_ns <= event.time_ns() <= time.monotonic_ns()
    assert 0 < device.memory().free_bytes <= device.memory().total_bytes
    assert device.pinned(5).shape == (5,)
    assert device.pin(made)
    device.unpin(made)


def test_tensors_of_a_cpu_are_copied_only_where_asked() -> None:
    device, tensor = accelerator_for("cpu"), torch.ones(3)
    assert device.to_host(tensor) is tensor
    assert device.to_device(tensor) is tensor
    copy = device.to_device(tensor, copy=True)
    assert copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy, tensor)


def test_generators() -> None:
    assert accelerator_for("cpu").generator is torch.default_generator
    one, other = (torch.rand(3, generator=accelerator_for("cpu").new_generator(7)) for _ in range(2))
    assert torch.equal(one, other)


def test_the_devices_that_need_a_driver() -> None:
    assert [needs_driver(name) for name in ("cpu", "sim", "cuda:0", "cuda:11")] == [False, False, True, True]


class StandIn(HostAccelerator):
    """An asynchronous device whose tensors are in host memory, and whose work is complete at once."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.used: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "used":
            self.used.add(name)
        return super().__getattribute__(name)


def _worked(rig: Rig) -> list[Tensor]:
    """Return the tensors that a program, an offload, an optimizer on the host and a snapshot leave behind."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    rig.put(b1=x, b2=x * 2, b3=x * 3)
    rig.do(
        define(100, elementwise("aten.relu.default", spec_of(x))),
        Define(101, OptimizerSpec("AdamW", (((0, 1), {"lr": 0.1}),), (1, 2), host=True)),
        Call(100, (3,), (4,)),
        Offload((3, 4)),
        Evict((4,)),
        OptimizerStep(101, (3, 4), 0.5),
        Snapshot(1, (1, 2), 101),
        OptimizerStep(101, (3, 4), 0.5),
        Prefetch((4,)),
        Fill((5,), (spec_of(x),), ((1, 0),)),
    )
    found = [rig.get(number) for number in range(1, 6)]
    memory = rig.do(Ask("peak"))
    assert isinstance(memory[0], WorkerMemory)
    assert rig.failures == []
    rig.machine.close()
    return found


def test_another_device_stands_in_although_its_tensors_are_in_host_memory() -> None:
    stand_in = StandIn()
    expected, found = _worked(Rig()), _worked(Rig(device=ComputeDevice("cuda:0", 1, accelerator=stand_in)))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    wanted = {"current", "empty", "keep", "memory", "on", "pinned", "reset_peak", "stream", "to_device", "to_host"}
    assert wanted <= stand_in.used


class _FailedEvent:
    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


class _FailedStream:
    def record(self, **_: bool) -> _FailedEvent:
        return _FailedEvent()


class Failing(StandIn):
    """A device of which every call fails after a kernel has failed, as those of a CUDA context do."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = False

    def current(self) -> Any:
        return _FailedStream() if self.failed else super().current()

    def synchronize(self) -> None:
        if self.failed:
            raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    "use",
    [Call(100, (1, 2), (3,)), Batch((101, 1, 2, 3)), Ask("digest", (9,))],
    ids=["a program", "one operator", "none"],
)
def test_whatever_fails_on_a_failed_device_ends_the_worker(use: Any) -> None:
    device = Failing()
    rig = Rig(device=ComputeDevice("cuda:0", 1, accelerator=device))
    x = torch.ones(3)
    rig.put(b1=x, b2=torch.ones(4))
    program = elementwise("aten.add.Tensor", spec_of(x), 2)
    kernel = KernelSpec(
        "aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, 2, 0, (Strided("float32", (3,), (1,)),)
    )
    rig.do(define(100, program), Define(101, kernel))
    with contextlib.suppress(Poisoned):
        rig.do(use)
    assert len(rig.failures) == 1, "what fails on a device that works is the instruction"
    device.failed = True
    with pytest.raises(DeviceFailed, match="cuda:0 has failed, and this process") as caught:
        rig.do(use)
    assert caught.value.__cause__ is not None
    assert len(rig.failures) == 1, "the end of the process reports it"


@pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")
def test_another_device_stands_in_for_a_group() -> None:
    stand_in = StandIn()

    def rank(number: int, group: MemoryGroup) -> None:
        x = torch.arange(5000.0)
        group.send(x + number, 1 - number, 0)
        assert torch.equal(group.receive(spec_of(x), 1 - number, 0)().tensor, x + 1 - number)
        assert torch.equal(group.reduce([x])().tensor, 2 * x)

    copier = shm_copier_for(stand_in)
    assert copier is not None
    run_ranks(2, rank, devices=[stand_in, HOST], copiers={0: copier})
    assert {"empty", "keep", "on", "pin", "unpin", "stream"} <= stand_in.used


STEPS = """
import sys, torch
from tests.kit.accelerator import ModelAccelerator
device = ModelAccelerator(0, memory_bytes=64 << 20)
landing = device.pinned(64).view(torch.float64)
with torch.inference_mode():
    landing.copy_(device.to_device(torch.arange(8.0, dtype=torch.float64)) * 2)
    device.synchronize()
    landing.add_(1)
print(landing.tolist()[-1], "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
device.close()
"""


def test_a_modelled_accelerator_imports_nothing_of_the_compiler() -> None:
    """PyTorch's modes import it with their first operator, only to disable it, unless they say otherwise."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("15.0 False False\n", "")
