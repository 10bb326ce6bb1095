"""The spine on real GPUs: the same results as on the CPU, worker to worker over NCCL or Gloo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onebox
from onebox.worker.device import RESERVE_BYTES, ComputeDevice
from tests.trainer_arguments import grouped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


class _Attention(nn.Module):
    """Self-attention over rows; the operators that it is captured with must exist on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [B, 8, 8] to [B, 3]."""
        mixed, _ = self.mix(rows, rows, rows, need_weights=False)
        return self.head(mixed[:, -1])


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 3),
    )


def _batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(12, 8, 8, dtype=dtype, generator=generator), torch.randint(0, 3, (12,), generator=generator))
        for _ in range(10)
    ]


def _train(spec: str, model: nn.Module, dtype: torch.dtype, **options: object) -> tuple[nn.Module, list[float]]:
    trained = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    with (
        onebox.open(spec, threads=1) as pool,
        onebox.Trainer(
            trained, nn.functional.cross_entropy, optimizer, **grouped(pool=pool, micro_batch=4, **options)
        ) as trainer,
    ):
        losses = [float(trainer.step(*batch)) for batch in _batches(dtype)]
        trainer.pull()
    return trained, losses


@pytest.mark.parametrize("make", [_convolutional, _Attention])
@pytest.mark.parametrize(("spec", "options"), [("cuda:0", {}), ("cuda:0,cpu", {}), ("cuda:0,cpu", {"sync": "client"})])
def test_same_as_cpu_in_float64(make: type, spec: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = make()
    expected, losses = _train("cpu", model, torch.float64)
    found, found_losses = _train(spec, model, torch.float64, shares="equal", **options)
    assert found_losses == pytest.approx(losses, abs=1e-9)
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, atol=1e-8, rtol=1e-8), name


def test_bf16_trains() -> None:
    torch.manual_seed(0)
    _, losses = _train("cuda:0", _convolutional(), torch.float32, precision="bf16")
    assert losses[-1] < losses[0] + 0.5


def test_uneven_devices_get_shares_by_measured_speed() -> None:
    torch.manual_seed(0)
    model = _convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        onebox.open("cuda:0,cpu", threads=1) as pool,
        onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool) as trainer,
    ):
        trainer.step(torch.randn(64, 8, 8), torch.randint(0, 3, (64,))).item()
        assert trainer.plan is not None
        assert sum(trainer.plan.shares) == pytest.approx(1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device only")
def test_two_gpus_over_nccl() -> None:
    torch.manual_seed(0)
    model = _convolutional()
    expected, _ = _train("cpu", model, torch.float64)
    found, _ = _train("cuda:0,cuda:1", model, torch.float64)
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, atol=1e-8, rtol=1e-8), name


def test_memory_of_the_device_is_reported() -> None:
    with onebox.open("cuda:0") as pool:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        assert total_bytes / 4 < pool.devices[0].memory_bytes <= total_bytes - RESERVE_BYTES


def test_what_operators_need_in_passing_is_limited_with_the_memory_of_a_worker() -> None:
    device = ComputeDevice("cuda:0", 1)
    try:
        assert device.quota_bytes(256 << 20) == 256 << 20
        assert torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0").numel() == 256 << 20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.device)
