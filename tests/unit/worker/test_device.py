"""The device of a worker: how long its work lasts, where that is emulated."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch

from onebox.errors import UsageError, WireError
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Call, OptimizerStep
from onebox.wire.protocol.requests import Define, OptimizerSpec, StoredProgram
from onebox.worker import device as module
from onebox.worker import progress as progress_module
from onebox.worker.device import PASSING_BYTES, RESERVE_BYTES, ComputeDevice, usable_bytes
from onebox.worker.progress import WorkerProgress, wait_until
from onebox.worker.system import clock as clock_module
from tests.unit.machines import Rig, define, elementwise

SPEC = TensorSpec("float64", (2,))
X = torch.tensor([1.0, -2.0], dtype=torch.float64)


class Slept:
    """Takes down until when sleeps were to last, and sleeps not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.until_ns: list[int] = []
        monkeypatch.setattr(module, "wait_until", lambda end_ns, progress: self.until_ns.append(end_ns))


@pytest.mark.parametrize("end_s", [0.02, 0.0, -1.0])
def test_a_sleep_is_never_shorter_than_asked_for(end_s: float) -> None:
    end_ns = time.monotonic_ns() + int(end_s * 1e9)
    wait_until(end_ns, WorkerProgress())
    assert time.monotonic_ns() >= end_ns


def test_a_sleep_that_is_woken_early_goes_on_and_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = WorkerProgress()
    now_ns = [0]
    waiting: list[bool] = []

    def nap(seconds: float) -> None:
        waiting.append(progress.waiting)
        now_ns[0] += int(seconds * 1e9 / 2) + 1

    def now() -> int:
        now_ns[0] += 100
        return now_ns[0]

    clock: Any = type("Clock", (), {"monotonic_ns": now, "sleep": nap})
    for each in (progress_module, clock_module):
        monkeypatch.setattr(each, "time", clock)
    wait_until(1_000_000, progress)
    assert now_ns[0] >= 1_000_000
    assert len(waiting) > 5
    assert all(waiting), "or it would be taken for one that hangs"
    assert not progress.waiting


@pytest.mark.parametrize(("speed", "lasts"), [(0.5, 2.0), (0.25, 4.0), (0.001, 1000.0)])
def test_a_throttled_device_takes_so_much_longer(monkeypatch: pytest.MonkeyPatch, speed: float, lasts: float) -> None:
    slept = Slept(monkeypatch)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 7_000)
    ComputeDevice("cpu", 1, speed).pace(5_000, 99.0, WorkerProgress())
    assert slept.until_ns == [5_000 + int(2_000 * lasts)]


def test_a_device_at_full_speed_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = Slept(monkeypatch)
    device = ComputeDevice("cpu", 1)
    device.pace(0, 99.0, WorkerProgress())
    assert slept.until_ns == []
    assert (device.emulated, device.name, device.speed) == (False, "cpu", 1.0)


def test_calls_and_optimizer_steps_are_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = Slept(monkeypatch)
    rig = Rig(device=ComputeDevice("cpu", 1, 0.5))
    rig.put(b1=X, b2=X)
    rig.do(
        define(5, elementwise("aten.relu.default", SPEC)), Define(6, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (2,)))
    )
    assert slept.until_ns == []
    before_ns = time.monotonic_ns()
    rig.do(Call(5, (1,), (3,)), OptimizerStep(6, (1,)))
    assert len(slept.until_ns) == 2
    assert slept.until_ns[0] > before_ns
    assert torch.equal(rig.get(3), X.relu()), "and it computes all the same"
    assert torch.equal(rig.get(2), X - X)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_speeds_that_no_cpu_has(speed: float) -> None:
    with pytest.raises(UsageError, match="up to 1"):
        ComputeDevice("cpu", 1, speed)


def test_a_gpu_cannot_be_throttled() -> None:
    """Its operators are queued: how long one takes is not known when the next begins."""
    with pytest.raises(UsageError, match=r"cuda:0 at speed 0\.5"):
        ComputeDevice("cuda:0", 1, 0.5)


@pytest.mark.parametrize("cost_s", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none(cost_s: float) -> None:
    rig = Rig()
    rig.put(b1=X)
    stored = StoredProgram(elementwise("aten.relu.default", SPEC), cost_s)
    rig.do(Define(5, stored), Define(6, OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (1,), (), cost_s)))
    assert [failure.kind for failure in rig.failures] == ["protocol"] * 2
    with pytest.raises(WireError, match="cost"):
        ComputeDevice("cpu", 1).load(stored)


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
