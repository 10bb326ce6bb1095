"""The virtual device over real GPUs: plain PyTorch code gives what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import onebox

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pool(device: str) -> Iterator[onebox.Pool]:
    with onebox.open(f"{device},cpu", threads=1) as pool:
        yield pool


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "cnn":
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)]
        return nn.Sequential(nn.Unflatten(1, (1, 8)), *layers).double()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 10)).double()


def _losses(kind: str, device: str) -> list[float]:
    model = _model(kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(10):
        rows = torch.randn(16, 8, 8, dtype=torch.float64, generator=generator).to(device)
        labels = torch.randint(0, 10, (16,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.feature("GPUs: Run a script on a GPU of the pool")
@pytest.mark.parametrize("kind", ["cnn", "attention"])
def test_a_plain_loop_gives_what_it_gives_on_the_host(pool: onebox.Pool, kind: str) -> None:
    assert _losses(kind, "vgpu:0") == pytest.approx(_losses(kind, "cpu"), abs=1e-9)


def test_random_numbers_are_those_of_the_device(pool: onebox.Pool, device: str) -> None:
    torch.manual_seed(5)
    drawn = torch.randn(1000, device="vgpu:0").cpu()
    generator = torch.Generator(device).manual_seed(5)
    assert torch.equal(drawn, torch.randn(1000, device=device, generator=generator).cpu())


def test_tensors_go_between_the_gpu_and_a_worker_on_the_host(pool: onebox.Pool) -> None:
    tensor = torch.randn(3, 4, 5, dtype=torch.float64).transpose(0, 2)
    there = tensor.to("vgpu:0").to("vgpu:1").to("vgpu:0")
    assert there.stride() == tensor.stride()
    assert torch.equal(there.cpu(), tensor)


def test_memory_runs_out_as_on_a_gpu_and_comes_back(pool: onebox.Pool, on_gpu: None) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 42, dtype=torch.uint8, device="vgpu:0").sum().item()
    assert torch.ones(3, device="vgpu:0").sum().item() == 3
