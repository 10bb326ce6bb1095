"""A GPU's accelerator on a driver that stands in for CUDA's: nothing here has run on a GPU."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onebox.worker.accelerator import Accelerator, accelerator_for


class Driver:
    """Stands in for the driver of a GPU of 8 GiB, of which others use 3.

    Args:
        monkeypatch: Puts it in its place.
        locks: Whether it locks memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, locks: bool = True) -> None:
        self.locked: dict[int, int] = {}
        self.synchronised = 0
        self.reported = 0
        self._locks = locks
        patches: dict[str, Callable[..., Any]] = {
            "set_device": lambda device: None,
            "cudart": lambda: self,
            "synchronize": self._synchronize,
            "mem_get_info": lambda device: (5 << 30, 8 << 30),
            "memory_allocated": lambda device: 1,
            "max_memory_allocated": lambda device: 2,
            "memory_reserved": lambda device: 3,
        }
        monkeypatch.setattr(torch.cuda, "default_generators", [torch.default_generator])
        for name, patch in patches.items():
            monkeypatch.setattr(torch.cuda, name, patch)

    def _synchronize(self, device: torch.device) -> None:
        self.synchronised += 1

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self._locks:
            return 712
        assert not any(address < other + length and other < address + size for other, length in self.locked.items())
        self.locked[address] = size
        return 0

    def report_error(self, count: int, device: torch.device) -> None:
        self.reported += 1
        raise RuntimeError("part or all of the requested memory range is already mapped")

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 4097, (1 << 20) + 1, 3 << 20])
def test_pinned_memory_takes_whole_pages_and_no_more(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """PyTorch's allocator takes the next power of two: 4 MiB for the last of them, and for the one before 2 MiB."""
    driver = Driver(monkeypatch)
    gpu: Accelerator = accelerator_for("cuda:0")
    memory = gpu.pinned(size_bytes)
    assert (memory.shape, memory.dtype) == ((size_bytes,), torch.uint8)
    ((address, locked_bytes),) = driver.locked.items()
    assert address % mmap.PAGESIZE == locked_bytes % mmap.PAGESIZE == 0
    assert size_bytes <= locked_bytes < size_bytes + mmap.PAGESIZE or (size_bytes, locked_bytes) == (0, mmap.PAGESIZE)
    part = memory.fill_(7)[: size_bytes // 2]
    del memory
    assert driver.locked, "a part of it is in use"
    assert part.eq(7).all()
    del part
    assert driver.locked == {}
    assert driver.synchronised == 1, "before it is unlocked, for copies may still use it"


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_memory_of_a_device_that_failed_is_unlocked_all_the_same(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It is unmapped in any case, and what is mapped at its address next could not be locked."""
    driver = Driver(monkeypatch)

    def fail(device: torch.device) -> None:
        raise error("an illegal memory access was encountered")

    memory = accelerator_for("cuda:0").pinned(10_000)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    assert driver.locked
    del memory
    assert driver.locked == {}


def test_memory_that_is_not_locked_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, locks=False)
    monkeypatch.setattr(torch, "zeros", driver.report_error)
    memory = accelerator_for("cuda:0").pinned(10_000)
    assert memory.fill_(1).sum() == 10_000
    del memory
    assert (driver.synchronised, driver.reported) == (0, 1), "or the next kernel would report the driver's error"


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch)
    found = accelerator_for("cuda:0").memory()
    assert (found.total_bytes, found.free_bytes) == (8 << 30, 5 << 30)
    assert (found.allocated_bytes, found.peak_bytes, found.reserved_bytes) == (1, 2, 3)
