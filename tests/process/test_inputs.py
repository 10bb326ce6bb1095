"""Inputs that are no tensors, and batches without targets, in float64 as in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import UsageError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor, factor: float = 1.0, mask: Tensor | None = None) -> Tensor:
        y = self.layer(x) * factor
        return y if mask is None else y * mask


def error(outputs: Tensor, targets: Tensor | None) -> Tensor:
    return (outputs if targets is None else outputs - targets).pow(2).mean()


def test_numbers_arrays_and_nothing() -> None:
    torch.manual_seed(0)
    x, half = torch.randn(8, 4, dtype=torch.float64), torch.full((8, 1), 0.5, dtype=torch.float64)
    batches: list[tuple[Any, Any]] = [
        (x, None),
        ((x, 0.5), None),
        ((x, 2, half), None),
        ((x.numpy(), np.float32(1.0), None), np.zeros((8, 1))),
        ({"x": x, "factor": True}, half),
    ]
    model = Scaled()
    plain = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(model, error, ours, pool=pool, plan=onebox.DataParallel(micro_batch=2)) as trainer,
    ):
        for inputs, targets in batches:
            loss = trainer.step(inputs) if targets is None else trainer.step(inputs, targets)
            given = (
                {"x": x, "factor": 1.0} if isinstance(inputs, tuple) and isinstance(inputs[0], np.ndarray) else inputs
            )
            theirs.zero_grad()
            outputs = (
                plain(**given) if isinstance(given, dict) else plain(*given) if type(given) is tuple else plain(given)
            )
            expected = error(outputs, None if targets is None else torch.as_tensor(targets))
            expected.backward()
            theirs.step()
            assert float(loss) == pytest.approx(expected.item(), rel=1e-10)
        assert trainer.evaluate([x, (x,), (x, None)]).loss == pytest.approx(error(plain(x), None).item(), rel=1e-10)
        for factor in (0.25, 0.75):
            assert trainer.step(trainer.upload((x, factor))).item() >= 0
        with pytest.raises(
            UsageError, match=r"have had \d values, and now come .* Give a number that changes as a tensor"
        ):
            for factor in range(20):
                trainer.step((x, factor / 100))
