"""Scripts whose shapes are ever new: memory and caches stay bounded, references and versions are those of the CPU."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onebox
from onebox.vgpu.ops import attention
from onebox.vgpu.runtime import command_queue
from onebox.vgpu.runtime.context import current_context

COLUMNS = 211
MIB = 1 << 20


def step(number: int, weight: Tensor) -> tuple[Any, Any, list[Any], weakref.ref[Tensor]]:
    """Return the versions and the references of tensors, some values, and a tensor that has ended."""
    rows, columns = number // COLUMNS + 1, number % COLUMNS + 1
    x = torch.full((rows % 300 + 1, columns), 0.5).to(weight.device)
    before = x._version
    part = x.t()[: rows // 300 + 1]
    part.mul_(2)
    x[0].add_(1)
    hidden = (x @ weight[:columns]).relu()
    total = torch.cat([hidden, hidden * 2]).sum()
    total.backward()
    gradient, weight.grad = weight.grad, None
    assert gradient is not None
    values: list[Any] = []
    if number % 10 == 0:
        values.append(total.item())
    if number % 20 == 0:
        q = x[None, None]
        values.append(F.scaled_dot_product_attention(q, q, q).sum().item())
    if number % 50 == 0:
        values += [x.nonzero().shape, x.flatten().sort().values[-1].item()]
    if number % 7 == 0:
        x.resize_(columns, 2).fill_(1.5)
    versions = x._version - before, part._version - before, weight._version, gradient._version
    return versions, [sys.getrefcount(each) for each in (x, hidden, gradient)], values, weakref.ref(hidden)


def run(steps: int) -> list[list[int]]:
    """Return the resident bytes of this process and of those that it has started, after a half and at the end."""
    plain = torch.randn(COLUMNS, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine = plain.detach().to("vgpu:0").requires_grad_()
    sizes = []
    for number in range(steps):
        expected, found = step(number, plain), step(number, mine)
        assert found[:2] == expected[:2]
        assert len(found[2]) == len(expected[2])
        for value, other in zip(found[2], expected[2], strict=True):
            assert value == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)
        assert found[3]() is None
        if number + 1 in (steps // 2, steps):
            gc.collect()
            current_context().queues[0].synchronize()
            here = psutil.Process()
            sizes.append([each.memory_info().rss for each in (here, *here.children(recursive=True))])
    return sizes


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(1500, marks=pytest.mark.long),
        pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(4 * 3600)]),
    ],
)
def test_shapes_that_are_ever_new_do_not_fill_memory(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_queue, "KNOWN_CALLS", 1024)
    monkeypatch.setattr(command_queue, "CACHED_VIEWS", 32)
    monkeypatch.setattr(attention, "CHOICES", 32)
    with onebox.open("cpu", threads=1):
        middle, end = run(steps)
        queue = current_context().queues[0]
        assert queue.native.records <= 1024
        assert len(queue.views) <= 32
        assert len(attention._choices[queue]) <= 32
        assert queue.channel.messages > 0
        grown = [(after - before) / MIB for before, after in zip(middle, end, strict=True)]
        assert max(grown) < 16, grown
