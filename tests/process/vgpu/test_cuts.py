"""Virtual devices behind a network that breaks: what a script computes is what it would have been."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.process.faults.far import behind
from tests.process.faults.proxy import Network

LARGE = 1 << 19
"""Elements of a large tensor: 4 MiB."""

ROUNDS = 30


def accumulate(device: str) -> list[Tensor]:
    """Add large tensors up in place on a device, and look at the sum now and then: a step done twice would show."""
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros(LARGE, dtype=torch.float64, device=device)
    seen = []
    for number in range(ROUNDS):
        part = torch.randn(LARGE, dtype=torch.float64, generator=generator)
        total += part.to(device)
        total.mul_(1.01).add_(number)
        if number % 6 == 5:
            seen.append(total.cpu().clone())
    return seen


@pytest.mark.parametrize("seed", [1, 2])
def test_large_tensors_come_once_over_connections_that_are_cut_within_them(seed: int) -> None:
    expected = accumulate("cpu")
    network = Network(seed, cuts=20, most_bytes=12 << 20)
    with behind(network, "cpu"):
        found = accumulate("vgpu:0")
    assert network.cuts_left == 0
    assert all(torch.equal(here, there) for here, there in zip(found, expected, strict=True))
