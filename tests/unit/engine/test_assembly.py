"""What a trainer is made of where its user leaves something open."""

from __future__ import annotations

import logging

import pytest
import torch

from onebox.engine.assembly import exact_settings, with_lateness
from onebox.engine.config import PlanRequest
from onebox.engine.workload.delay_compensation import WARM_UP
from onebox.errors import UsageError

EXACT = exact_settings(0, 0, 2, None, trace=False)
REQUEST = PlanRequest(plan=None, shares="auto", micro_batch=None, sync="workers")


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(("staleness", "asked", "found"), [(1, None, WARM_UP), (1, 0, 0), (1, 7, 7), (0, None, 0)])
def test_the_first_steps_are_exact_unless_that_is_not_wanted(
    staleness: int, asked: int | None, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "onebox"):
        settings = with_lateness(EXACT, adamw(), REQUEST, staleness, "none", asked, overlap=False)
    assert settings.warm_up == found
    said = [record.getMessage() for record in caplog.records if "warm_up" in record.getMessage()]
    assert len(said) == int(staleness == 1 and asked is None)
    assert all(f"warm_up={WARM_UP}" in line for line in said)


def test_fewer_than_no_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="warm_up=-1"):
        with_lateness(EXACT, adamw(), REQUEST, 1, "none", -1, overlap=False)
