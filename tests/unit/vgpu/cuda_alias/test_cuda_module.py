"""Which names ``cuda`` is translated under, and that nothing is forgotten or left behind."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onebox.vgpu.cuda_alias import alias_cuda
from onebox.vgpu.cuda_alias.cuda_module import KEPT, KEPT_MODULES, NAMED_TOO, OF_SUBMODULES, mapped, submodules
from onebox.vgpu.cuda_alias.cuda_tensors import tensor_type
from onebox.vgpu.cuda_alias.device_arguments import factories, table
from onebox.vgpu.cuda_alias.unsupported import ADVICE

OWNERS: list[Any] = [
    torch,
    torch._C,
    torch.fft,
    torch.nested,
    torch.cuda,
    torch.Tensor,
    torch.UntypedStorage.__mro__[1],
    torch.backends.cuda,
    torch.backends.cudnn,
    torch.utils._device.DeviceContext,
    *submodules(),
]
"""Everything that has attributes which the alias replaces."""


@pytest.fixture
def aliased() -> Iterator[None]:
    with alias_cuda():
        yield


def attributes() -> dict[tuple[str, str], int]:
    found = {}
    for owner in OWNERS:
        found |= {(str(owner), name): id(value) for name, value in vars(owner).items() if name != "__annotations__"}
    return found


def public(owner: types.ModuleType) -> list[str]:
    """Return the functions and classes of CUDA that a module offers."""
    return [
        name
        for name, value in vars(owner).items()
        if (name in NAMED_TOO or not name.startswith("_"))
        and callable(value)
        and str(getattr(value, "__module__", "")).startswith(("torch.cuda", "torch._C"))
    ]


OFFERED = {owner.__name__: public(owner) for owner in (torch.cuda, *submodules())}
"""As PyTorch has it."""


def test_closing_it_puts_everything_back() -> None:
    with alias_cuda():
        pass  # what PyTorch remembers from a first time is there from now on
    before = attributes()
    registry = list(torch.serialization._package_registry)
    with alias_cuda():
        assert attributes() != before
    assert attributes() == before
    assert torch.serialization._package_registry == registry


def test_it_is_the_same_one_until_it_is_closed() -> None:
    with alias_cuda() as first:
        zeros = torch.zeros
        assert alias_cuda() is first
        assert torch.zeros is zeros
    with alias_cuda() as second:
        assert second is not first
    first.close()


@pytest.mark.usefixtures("aliased")
def test_every_name_of_torch_cuda_is_mapped_or_kept_or_refused() -> None:
    stands = mapped()
    refused = []
    for name in OFFERED["torch.cuda"]:
        value = getattr(torch.cuda, name)
        if name in stands or name in KEPT or isinstance(value, types.ModuleType):
            continue
        refused.append(name)
        with pytest.raises(NotImplementedError, match=rf"torch\.cuda\.{name} has no counterpart .*; \w+"):
            value()
    assert {"CUDAGraph", "MemPool", "cudart", "make_graphed_callables", "temperature"} <= set(refused)
    public_names = {name for name in torch.cuda.__all__ if callable(getattr(torch.cuda, name))}
    assert public_names <= {*OFFERED["torch.cuda"], *stands, "OutOfMemoryError"}


@pytest.mark.usefixtures("aliased")
def test_every_name_of_its_submodules_is_mapped_or_refused() -> None:
    refused = set()
    for inner in submodules():
        for name in OFFERED[inner.__name__] if inner.__name__ not in KEPT_MODULES else []:
            value, full = getattr(inner, name), f"{inner.__name__}.{name}"
            if name in KEPT or name in mapped() or full in OF_SUBMODULES:
                continue
            refused.add(full)
            with pytest.raises(NotImplementedError, match=r"torch\.cuda\.\S+ has no counterpart"):
                value()
    assert {"torch.cuda.nccl.unique_id", "torch.cuda.profiler.start", "torch.cuda.gds.GdsFile"} <= refused
    assert {"torch.cuda.memory._record_memory_history", "torch.cuda.memory._snapshot"} <= refused


@pytest.mark.usefixtures("aliased")
def test_nccl_has_a_version_that_scripts_compare_and_join() -> None:
    assert torch.cuda.nccl.version() >= (2, 10)  # from which DistributedDataParallel sends bfloat16
    assert ".".join(map(str, torch.cuda.nccl.version())) == "2.10.3"


@pytest.mark.usefixtures("aliased")
def test_submodules_have_what_torch_cuda_has() -> None:
    assert torch.cuda.memory.memory_allocated is torch.cuda.memory_allocated
    assert torch.cuda.random.manual_seed is torch.cuda.manual_seed
    assert torch.cuda.streams.Stream is torch.cuda.Stream
    assert torch.cuda.graphs.CUDAGraph is not None
    with torch.cuda.nvtx.range("a step"):
        assert torch.cuda.nvtx.range_push("a part") == 0
    assert torch.cuda.tunable.is_enabled() is False  # type: ignore[no-untyped-call]


def test_advice_is_for_names_that_there_are() -> None:
    known = {*dir(torch.cuda), *(name for inner in submodules() for name in dir(inner))}
    known |= {"caching_allocator_disabled"}  # not in torch 2.11
    assert set(ADVICE) <= known


def test_mapped_names_are_names_of_torch_cuda() -> None:
    assert set(mapped()) <= {*dir(torch.cuda), *torch.cuda.__dict__}


@pytest.mark.usefixtures("aliased")
def test_functions_keep_their_names_signatures_and_documentation() -> None:
    assert torch.cuda.memory_allocated.__name__ == "memory_allocated"
    assert "occupied by tensors" in (torch.cuda.memory_allocated.__doc__ or "")
    assert list(inspect.signature(torch.cuda.set_rng_state).parameters) == ["new_state", "device"]
    assert torch.zeros.__name__ == "zeros" and "filled with the scalar value" in (torch.zeros.__doc__ or "")
    assert torch.Tensor.to.__name__ == "to" and torch.Tensor.cuda.__name__ == "cuda"


def test_the_table_has_every_function_that_takes_a_device() -> None:
    names = factories()
    assert len(names) > 45
    assert {"arange", "as_tensor", "asarray", "empty_like", "full", "normal", "rand", "tensor", "zeros"} <= set(names)
    assert not {"eq", "ne", "mm"} & set(names)
    for owner, listed, _ in table():
        assert listed
        assert all(callable(getattr(owner, name)) for name in listed)


@pytest.mark.usefixtures("aliased")
def test_the_host_is_as_it_was() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, pin_memory=True)
    assert x.device.type == "cpu" and not x.is_cuda and x.type() == "torch.DoubleTensor"
    assert torch.as_tensor([1, 2], dtype=torch.int32).to("cpu", torch.float32).type() == "torch.FloatTensor"
    assert x.new_ones(2).dtype == torch.float64 and x.type(torch.IntTensor).dtype == torch.int32
    assert nn.Linear(2, 2, device="meta").to_empty(device="cpu").weight.device == torch.device("cpu")
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
    assert torch.get_default_device() == torch.device("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    assert torch.Generator().device == torch.device("cpu")


@pytest.mark.usefixtures("aliased")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_functions_still_know_the_factories() -> None:
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2) + x

    assert scripted(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.usefixtures("aliased")
def test_switches_of_libraries_are_there() -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.version() is None
    assert torch.backends.cuda.matmul.allow_tf32 in (True, False)


def test_types_of_tensors() -> None:
    kind = tensor_type("torch.cuda.FloatTensor")
    assert kind is not None and kind.dtype == torch.float32 and tensor_type(kind) is kind
    assert tensor_type("torch.FloatTensor") is None and tensor_type(torch.float32) is None
    assert repr(kind) == "<class 'torch.cuda.FloatTensor'>"
    assert not isinstance(torch.ones(2), kind)
