"""The interface of devices is the only way to a GPU: no other file of the worker names CUDA, or asks for it."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import onebox.worker
from onebox.worker.accelerator import Accelerator, accelerator_for, needs_driver

ROOT = Path(onebox.worker.__file__).parent
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
    files = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT / "accelerator")
    assert len(files) > 60
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := uses_of_cuda(path.read_text()))} == {}
    own = {path.name: path.read_text() for path in (ROOT / "accelerator").glob("*.py")}
    cuda = {name: text for name, text in own.items() if "torch.cuda." in text}
    assert set(cuda) == {"cuda.py", "cuda_graph.py"}
    assert all(len(text.splitlines()) < 120 for text in cuda.values())


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_the_work_of_a_host_is_complete_when_it_returns(name: str) -> None:
    device: Accelerator = accelerator_for(name)
    assert not device.asynchronous
    assert device.device == torch.device(name)
    stream, begin_ns = device.stream(priority=-1), time.monotonic_ns()
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
    assert accelerator_for("meta").generator is not torch.default_generator
    one, other = (torch.rand(3, generator=accelerator_for("cpu").new_generator(7)) for _ in range(2))
    assert torch.equal(one, other)


def test_the_devices_that_need_a_driver() -> None:
    assert [needs_driver(name) for name in ("cpu", "sim", "cuda:0", "cuda:11")] == [False, False, True, True]
