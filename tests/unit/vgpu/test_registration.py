"""What the virtual device relies on inside PyTorch: a new version that changes it is to fail here, by name."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
import torch.utils._foreach_utils as foreach_utils
from torch.optim import optimizer as torch_optimizer
from torch.utils import backend_registration

from onebox.vgpu import install
from onebox.vgpu.core.tensor import VirtualTensor
from onebox.vgpu.dispatch.factories import factories
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


@pytest.fixture(autouse=True)
def installed() -> None:
    install()


def test_installing_twice_is_installing_once() -> None:
    engine = torch.autograd.graph._engine_run_backward
    install()
    assert torch.autograd.graph._engine_run_backward is engine


def test_the_setup_of_a_python_backend_takes_what_it_is_given() -> None:
    parameters = inspect.signature(backend_registration._setup_privateuseone_for_python_backend).parameters
    assert {"rename", "backend_module"} <= set(parameters)
    assert torch._C._get_privateuse1_backend_name() == "vgpu"
    assert torch.get_device_module("vgpu") is torch.vgpu  # type: ignore[attr-defined]


def test_threads_may_be_the_first_to_set_a_storage() -> None:
    subprocess.run([sys.executable, "-c", FIRST_STORAGES], timeout=60, check=True)


def test_backward_passes_run_in_their_own_thread() -> None:
    modes = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: modes.append(torch._C._is_multithreading_enabled()))
    leaf.sum().backward()
    torch.autograd.grad(leaf.sum(), leaf)
    assert modes == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_optimizers_group_the_parameters_of_a_virtual_device() -> None:
    assert VirtualTensor in torch_optimizer._foreach_supported_types
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


def test_factories_are_found_by_their_schemas() -> None:
    names = {str(function) for function in factories()}
    assert {
        "aten.empty.memory_format",
        "aten.empty_strided.default",
        "aten.randn.generator",
        "aten.arange.start_step",
    } <= names
    assert "aten.zeros_like.default" not in names
    assert len(names) > 50


def test_generators_of_the_host_stay_what_they_were() -> None:
    made = torch.Generator().manual_seed(3)
    assert type(made) is torch._C.Generator
    assert isinstance(made, torch.Generator)
    assert torch.equal(torch.rand(2, generator=made), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_memory_that_is_pinned_for_a_virtual_device_is_a_copy() -> None:
    tensor = torch.arange(3)
    pinned = tensor.pin_memory()
    assert torch.equal(pinned, tensor)
    assert pinned.data_ptr() != tensor.data_ptr()
    assert not pinned.is_pinned()
