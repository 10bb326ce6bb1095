"""Workers of GPUs open under confinement: driver, libraries and groups need nothing that it forbids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onebox
from onebox.worker.device import RESERVE_BYTES, ComputeDevice
from onebox.worker.sandbox import seccomp

pytestmark = pytest.mark.gpu


def test_a_worker_opens_and_is_what_the_device_is(device: str, real: bool) -> None:
    with onebox.open(device, threads=1) as pool:
        (found,) = pool.devices
        assert found.device == device
        if real:
            properties = torch.cuda.get_device_properties(0)
            assert found.name == properties.name
            total_bytes = properties.total_memory  # of which others may have some
            assert total_bytes / 4 < found.memory_bytes <= total_bytes - RESERVE_BYTES
            assert found.capability == (properties.major, properties.minor)
            assert found.processors == properties.multi_processor_count


def test_it_is_confined_while_it_computes(device: str) -> None:
    """All kinds of libraries are loaded late: of products, of convolutions, of random numbers, of sorting."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(4 * 36, 3),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        onebox.open(device, threads=1) as pool,
        onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool) as trainer,
    ):
        losses = [float(trainer.step(torch.randn(8, 8, 8), torch.randint(0, 3, (8,)))) for _ in range(3)]
        status = _status(pool.process_ids[0])
    assert all(0 < loss < 10 for loss in losses)
    assert status["CapEff"] == status["CapPrm"] == "0" * 16
    assert status["NoNewPrivs"] == "1"
    if seccomp.supported():
        assert status["Seccomp"] == "2", "filtered"


def _status(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":\t", 1) for line in lines)}


def test_ten_pools_one_after_the_other_leave_no_memory_on_the_device(device: str, real: bool) -> None:
    free = []
    for _ in range(10 if real else 2):
        with onebox.open(device, threads=1) as pool:
            assert len(pool) == 1
        free.append(torch.cuda.mem_get_info(0)[0] if real else 0)
    assert free[-1] >= free[0] - (64 << 20)


def test_temporary_memory_of_operators_is_limited_with_the_memory_of_a_worker(
    on_gpu: None, compute: ComputeDevice
) -> None:
    assert compute.quota_bytes(256 << 20) == 256 << 20
    assert torch.empty(256 << 20, dtype=torch.uint8, device=compute.device).numel() == 256 << 20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device=compute.device)


def test_gpus_and_cpus_are_in_one_pool(devices: Callable[[int], str]) -> None:
    with onebox.open(f"{devices(1)},cpu", threads=1) as pool:
        assert [info.kind for info in pool.devices][1] == "cpu"
