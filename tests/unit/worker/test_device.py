"""The device of a worker: how long its work lasts, where that is emulated."""

from __future__ import annotations

import psutil
import pytest
import torch

from onebox.errors import UsageError
from onebox.wire import TensorSpec
from onebox.worker.device import PASSING_BYTES, RESERVE_BYTES, ComputeDevice, usable_bytes

SPEC = TensorSpec("float64", (2,))
X = torch.tensor([1.0, -2.0], dtype=torch.float64)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_speeds_that_no_cpu_has(speed: float) -> None:
    with pytest.raises(UsageError, match="up to 1"):
        ComputeDevice("cpu", 1, speed)


def test_a_gpu_cannot_be_throttled() -> None:
    """Its operators are queued: how long one takes is not known when the next begins."""
    with pytest.raises(UsageError, match=r"cuda:0 at speed 0\.5"):
        ComputeDevice("cuda:0", 1, 0.5)


class Gpu:
    """Stands in for the driver of a GPU of 8 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fractions: list[float] = []
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "default_generators", [torch.default_generator])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 8 << 30))
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: 0)
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: self.fractions.append(fraction)
        )


@pytest.mark.parametrize(("quota", "fraction"), [(4 << 30, 4.5 / 8 + 1 / 128), (8 << 30, 1.0), (7 << 40, 1.0)])
def test_the_worker_of_a_gpu_takes_little_more_than_its_buffers(
    monkeypatch: pytest.MonkeyPatch, quota: int, fraction: float
) -> None:
    gpu = Gpu(monkeypatch)
    assert ComputeDevice("cuda:0", 1).quota_bytes(quota) == quota
    assert gpu.fractions == [pytest.approx(fraction)]


def test_tensors_have_what_is_free_of_a_gpu_but_for_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 GiB, other processes and the context of this one have 3; what its own allocator has is its own."""
    Gpu(monkeypatch)
    device = ComputeDevice("cuda:0", 1)
    assert device.memory_bytes() == (5 << 30) - RESERVE_BYTES
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 30)
    assert device.memory_bytes() == (6 << 30) - RESERVE_BYTES


@pytest.mark.parametrize(
    ("free_bytes", "usable"),
    [(0, 0), (80 << 30, (80 << 30) - RESERVE_BYTES), ((80 << 30) + 5_000_000, (80 << 30) - RESERVE_BYTES), (800, 700)],
)
def test_usable_memory_is_less_than_free_memory_and_round(free_bytes: int, usable: int) -> None:
    assert usable_bytes(free_bytes) == usable
    assert usable_bytes(free_bytes + 1) >= usable


@pytest.mark.parametrize(
    ("quota", "sharing", "limit"), [(0, 2, (4096 - 512 - 448) << 20), (1 << 30, 2, 1 << 30), (0, 1, 0)]
)
def test_workers_of_one_gpu_have_equal_parts_of_it(
    monkeypatch: pytest.MonkeyPatch, quota: int, sharing: int, limit: int
) -> None:
    gpu = Gpu(monkeypatch)
    assert ComputeDevice("cuda:0", 1).quota_bytes(quota, sharing) == limit
    assert gpu.fractions == ([pytest.approx((limit * 9 / 8 + PASSING_BYTES) / (8 << 30))] if limit else [])
    assert ComputeDevice("cpu", 1).quota_bytes(quota, sharing) == quota


def test_a_cpu_has_all_of_its_memory() -> None:
    assert ComputeDevice("cpu", 1).memory_bytes() == psutil.virtual_memory().total


def test_a_gpu_without_a_limit_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    assert ComputeDevice("cuda:0", 1).quota_bytes(0) == 0
    assert ComputeDevice("cpu", 1).quota_bytes(1 << 30) == 1 << 30
    assert gpu.fractions == []
