"""What the virtual device relies on inside PyTorch: a new version that changes it is to fail here, by name."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
import torch.utils._foreach_utils as foreach_utils
from torch.optim import optimizer as torch_optimizer

from onebox.vgpu import install
from onebox.vgpu.integration.accelerator import ANSWERS
from onebox.vgpu.ops.autocast import BANNED, FLOAT32, LOWER, WIDEST

FIRST_STORAGES = """
import builtins, threading, time
import torch
from onebox.vgpu import install
from onebox.vgpu.core.metadata import metadata
install()
plain = builtins.__import__
def slow(*arguments, **named):
    time.sleep(0.2)
    return plain(*arguments, **named)
builtins.__import__ = slow
layout = metadata(torch.float32, (2, 2), (1, 2), 0, 16)
threads = [threading.Thread(target=layout.on_meta) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
"""Two threads have a tensor with strides made at a time; an import takes so long that both come to it."""


FIRST_USE = """
import onebox, torch
from onebox.vgpu import install, native
if __name__ == "__main__":
    install()
    assert native.loaded() is None
    assert torch.vgpu.device_count() == 0 and torch.device("vgpu:0").index == 0
    with onebox.open("cpu", threads=1):
        torch.manual_seed(3)
        with torch.vgpu.device(0):
            torch.vgpu.set_rng_state(torch.vgpu.get_rng_state())
        torch.accelerator.current_stream().synchronize()
        torch.Generator(), torch.Generator("cpu")
        assert torch.get_device_module() is torch.vgpu
        assert native.loaded() is None
        FIRST
        assert native.loaded() is not None
"""
"""What makes an object of a device, and only that, loads the object in C++."""


@pytest.fixture(autouse=True)
def installed() -> None:
    install()


def test_installing_twice_is_installing_once() -> None:
    engine = torch.autograd.graph._engine_run_backward
    install()
    assert torch.autograd.graph._engine_run_backward is engine


def test_the_device_has_its_name_and_its_module() -> None:
    assert torch._C._get_privateuse1_backend_name() == "vgpu"
    assert torch.get_device_module("vgpu") is torch.vgpu  # type: ignore[attr-defined]


def test_threads_may_be_the_first_to_set_a_storage() -> None:
    subprocess.run([sys.executable, "-c", FIRST_STORAGES], timeout=60, check=True)


@pytest.mark.parametrize(
    "first",
    [
        'torch.Generator("vgpu:0")',
        'torch.Generator(device=torch.device("vgpu", 0))',
        'torch.Stream("vgpu:0")',
        'torch.Event("vgpu")',
        'torch.ones(2).to("vgpu")',
        'torch.empty(0, device="vgpu:0")',
        'torch.UntypedStorage(8, device="vgpu:0")',
    ],
)
def test_what_makes_an_object_of_a_device_loads_it(first: str) -> None:
    script = FIRST_USE.replace("FIRST", first)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_backward_passes_run_in_their_own_thread() -> None:
    modes = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: modes.append(torch._C._is_multithreading_enabled()))
    leaf.sum().backward()
    torch.autograd.grad(leaf.sum(), leaf)
    assert modes == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_optimizers_group_the_parameters_of_a_virtual_device() -> None:
    assert "vgpu" in foreach_utils._get_foreach_kernels_supported_devices()
    assert "vgpu" in torch_optimizer._get_foreach_kernels_supported_devices()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_the_core_is_asked_for_its_accelerator_by_this_name(name: str) -> None:
    if name == "emptyHostCache" and torch.__version__ < "2.13":
        pytest.skip("new in torch 2.13")
    sources = inspect.getsource(torch.accelerator) + inspect.getsource(torch.accelerator.memory)
    assert f"_accelerator_{name}(" in sources


@pytest.mark.parametrize("name", [*LOWER, *FLOAT32, *WIDEST, *BANNED])
def test_autocast_lists_operators_of_this_torch(name: str) -> None:
    packet, _, overload = name.partition(".")
    assert isinstance(getattr(getattr(torch.ops.aten, packet), overload or "default"), torch._ops.OpOverload)


def test_generators_of_the_host_stay_what_they_were() -> None:
    made = torch.Generator().manual_seed(3)
    assert type(made) is torch._C.Generator
    assert isinstance(made, torch.Generator)
    assert issubclass(torch._C.Generator, torch.Generator)
    assert torch.equal(torch.rand(2, generator=made), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_memory_that_is_pinned_for_a_virtual_device_is_a_copy() -> None:
    tensor = torch.arange(3)
    pinned = tensor.pin_memory()
    assert torch.equal(pinned, tensor)
    assert pinned.data_ptr() != tensor.data_ptr()
    assert not pinned.is_pinned()
