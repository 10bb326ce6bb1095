"""Optimizers that step on the workers: schedulers of their learning rates do not warn."""

from __future__ import annotations

import warnings

import pytest
import torch

from onebox.engine.workload.parameter_groups import mark_stepped


def test_a_scheduler_does_not_warn_of_an_optimizer_that_is_marked_as_stepped() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mark_stepped([optimizer])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_scheduler_warns_of_an_optimizer_that_has_not_stepped() -> None:
    """Else the mark would be needed no more."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()
