"""What the tests of compiled models share: a pool, functions to compile and to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import onebox
from onebox.vgpu.runtime.command_queue import CommandQueue

HERE = "vgpu:0"
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def fresh(pool: onebox.Pool) -> Iterator[None]:
    """Each test compiles for itself, in float64."""
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Fill in (device, program) of each program that is called."""
    called: list[tuple[int, int]] = []
    plain = CommandQueue.call

    def counted(self: CommandQueue, program: int, handles: Any, outputs: int) -> int:
        called.append((self.worker, program))
        return plain(self, program, handles, outputs)

    monkeypatch.setattr(CommandQueue, "call", counted)
    return called


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="onebox", **options)


def moved(values: Any, device: Any = HERE) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


def close(left: Any, right: Any) -> None:
    torch.testing.assert_close(moved(left, "cpu"), moved(right, "cpu"), **EXACT)
