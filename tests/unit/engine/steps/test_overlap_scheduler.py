"""Settings of steps with stale gradients, where the user leaves something open."""

from __future__ import annotations

import logging

import pytest
import torch

from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.overlap_scheduler import with_staleness
from onebox.engine.workload.delay_compensation import WARM_UP
from onebox.errors import UsageError
from onebox.plan import Plan
from onebox.trainer_options import StaleGradients

EXACT = StepSettings(seed=0, trace=False, check_every=0, in_flight=2, max_norm=0.0)
PLAN = Plan.data_parallel([0], [1.0])


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(("asked", "found"), [(None, WARM_UP), (0, 0), (7, 7)])
def test_the_first_steps_are_exact_unless_that_is_not_wanted(
    asked: int | None, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "onebox"):
        settings = with_staleness(EXACT, adamw(), StaleGradients(correction="none", warm_up=asked), PLAN)
    assert (settings.staleness, settings.warm_up, settings.delay) == (1, found, ("none",))
    said = [record.getMessage() for record in caplog.records if "warm_up" in record.getMessage()]
    assert len(said) == int(asked is None)
    assert all(f"warm_up={WARM_UP}" in line for line in said)


def test_exact_settings_stay() -> None:
    assert with_staleness(EXACT, adamw(), None, PLAN) == EXACT


def test_a_correction_that_the_optimizer_does_not_support_is_refused() -> None:
    optimizer = torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(UsageError, match="correction='predict' needs an optimizer"):
        with_staleness(EXACT, optimizer, StaleGradients(correction="predict"), None)
