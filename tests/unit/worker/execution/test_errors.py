"""What a lack of memory is called, whoever noticed it, and how much of it was asked for."""

from __future__ import annotations

import pytest
import torch

from onebox.worker.execution.errors import describe_failure, memory_figures
from onebox.worker.memory.buffers import BufferStore, QuotaExceeded
from onebox.worker.programs.interpreter import OperatorFailed

MIB, GIB = 1 << 20, 1 << 30
FULL = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 70.50 GiB "
    "is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated"
)
HELD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.25 GiB of which 75.00 GiB is "
    "free. 2.31 GiB allowed; Including non-PyTorch memory, this process has 2.80 GiB memory in use. Of the allocated "
    "memory 2.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "17179869184 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (torch.OutOfMemoryError(FULL), (5 * GIB // 2, int(70.5 * GIB), int(79.25 * GIB))),
        (torch.OutOfMemoryError(HELD), (20 * MIB, 2 * GIB, int(2.31 * GIB))),
        (RuntimeError(HOST), (16 * GIB, 0, 0)),
        (torch.OutOfMemoryError("in other words"), (0, 0, 0)),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"), (0, 0, 0)),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), (0, 0, 0)),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), (0, 0, 0)),
        (MemoryError(), (0, 0, 0)),
        (QuotaExceeded("", asked_bytes=3, used_bytes=4, allowed_bytes=6), (3, 4, 6)),
    ],
)
def test_figures_of_a_lack_of_memory(error: Exception, figures: tuple[int, int, int]) -> None:
    assert memory_figures(error) == figures
    failed = OperatorFailed("aten.mm.default", "float32[2, 2]")
    failed.__cause__ = error
    for raised, name in ((error, "put"), (failed, "aten.mm.default")):
        failure = describe_failure(raised, "put", (7, 3))
        assert (failure.kind, failure.operator) == ("memory", name)
        assert (failure.asked_bytes, failure.used_bytes, failure.allowed_bytes) == figures
        assert (failure.routine, failure.place) == (7, 3)


def test_the_allocator_of_this_version_says_how_much_was_asked_for() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 48, dtype=torch.uint8)
    assert memory_figures(caught.value)[0] == 1 << 48
    assert describe_failure(caught.value, "put").kind == "memory"


def test_a_store_says_how_much_was_asked_for() -> None:
    store = BufferStore(100)
    store.put(1, torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(
        QuotaExceeded, match=r"105 bytes needed.*: 5 bytes too much; 95 bytes asked .* 10 bytes in"
    ) as caught:
        store.reserve(95)
    assert memory_figures(caught.value) == (95, 10, 100)


def test_outside_of_routines_there_is_no_place() -> None:
    failure = describe_failure(ValueError("no"), "define")
    assert (failure.kind, failure.routine, failure.place) == ("protocol", 0, 0)
