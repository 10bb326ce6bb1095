"""The memory of a step on a GPU: what is predicted against what PyTorch's allocator gives out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import onebox
from onebox.cli.models import build_model
from onebox.pool import raise_first
from onebox.report import compare_memory
from onebox.wire.protocol.instructions import Ask
from onebox.worker.device import PASSING_BYTES

pytestmark = pytest.mark.gpu

CONTEXT_BYTES = 1 << 30
"""Most that the driver takes for a process: its context and the code of all kernels."""


def model(name: str) -> nn.Module:
    """Return a classifier of pictures of 32 times 32 pixels."""
    colours = [0.5] * 3
    return build_model(name, classes=10, channels=3, height=32, width=32, mean=colours, std=colours, seed=0)


@pytest.mark.parametrize("name", ["cnn", "resnet", "gpt"])
def test_the_peak_is_within_a_tenth_of_what_the_allocator_gives_out(name: str, device: str, real: bool) -> None:
    trained = model(name)
    batch = torch.zeros(128, 3, 32, 32, dtype=torch.uint8), torch.arange(128) % 10
    optimizer = torch.optim.AdamW(trained.parameters())
    with (
        onebox.open(device, threads=1) as pool,
        onebox.Trainer(trained, functional.cross_entropy, optimizer, pool=pool, recovery=None) as trainer,
    ):
        for _ in range(2):
            trainer.step(*batch)
        trainer.wait()
        raise_first([pool.post(0, [Ask("peak")], answer=True)])
        trainer.step(*batch)
        trainer.wait()
        (found,) = compare_memory(trainer.predicted_curves(*batch), trainer.events(), 2)
        (memory,) = trainer.memory()
    assert found.peak_bytes.predicted == pytest.approx(memory.peak_bytes, rel=0.01), "by the worker's own account"
    if real:
        assert memory.allocated_peak_bytes >= 0.9 * memory.peak_bytes
        assert memory.allocated_peak_bytes <= 1.1 * memory.peak_bytes + PASSING_BYTES, "buffers, and workspaces"


@pytest.mark.parametrize("limit", [1 << 30, 2 << 30])
def test_a_worker_takes_no_more_of_the_gpu_than_its_budget(limit: int, device: str, on_gpu: None) -> None:
    """By the driver's account: with the allocator's caches, libraries and the context."""
    trained = model("resnet")
    optimizer = torch.optim.AdamW(trained.parameters())
    batch = torch.zeros(128, 3, 32, 32, dtype=torch.uint8), torch.arange(128) % 10
    free_bytes, _ = torch.cuda.mem_get_info(0)
    with (
        onebox.open(device, memory=limit) as pool,
        onebox.Trainer(trained, functional.cross_entropy, optimizer, pool=pool, recovery=None) as trainer,
    ):
        for _ in range(3):
            trainer.step(*batch)
        trainer.wait()
        taken_bytes = free_bytes - torch.cuda.mem_get_info(0)[0]
    assert taken_bytes <= limit + limit // 8 + PASSING_BYTES + CONTEXT_BYTES
