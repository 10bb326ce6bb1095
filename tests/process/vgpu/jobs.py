"""What tests of distributed jobs share: ranks, a model, and its training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onebox.vgpu import spawn

RANKS = 3
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def together(function: Callable[..., Any], *args: Any, backend: str = "onebox", ranks: int = RANKS) -> list[Any]:
    """Run a function on each rank, in a default group, and return what each returned."""
    returned: dict[int, Any] = {}

    def main(rank: int) -> None:
        dist.init_process_group(backend)
        returned[rank] = function(rank, *args)
        dist.destroy_process_group()

    spawn(main, nprocs=ranks)
    return [returned[rank] for rank in range(ranks)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.GroupNorm(3, 3)
        self.head = nn.Linear(3 * 5 * 5, 4)
        self.same = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        return self.same(torch.tanh(self.same(hidden)))


STEPS, EACH = 4, 3


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of all ranks."""
    source = torch.Generator().manual_seed(step)
    return torch.randn(RANKS * EACH, 2, 5, 5, generator=source), torch.randint(4, (RANKS * EACH,), generator=source)


def share(rank: int, step: int) -> list[Tensor]:
    """Return a rank's part of a batch, on its device."""
    return [part.chunk(RANKS)[rank].to(f"vgpu:{rank}") for part in batch(step)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plainly_trained(model: nn.Module) -> nn.Module:
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def assert_same(model: nn.Module, states: list[dict[str, Tensor]]) -> None:
    """Check that the ranks have ended with the same parameters to the last bit, and with those of a model."""
    for name, value in model.state_dict().items():
        assert all(torch.equal(state[name], states[0][name]) for state in states)
        torch.testing.assert_close(states[0][name], value, **EXACT)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}
