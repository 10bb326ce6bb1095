"""What is done about late gradients where the user leaves it open, and what cannot be asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onebox.engine.workload.delay_compensation import DELAYS, choose_delay, extra_copies
from onebox.errors import UsageError
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker import OPTIMIZERS
from onebox.worker.optimizer.native import NativeOptimizer


def made(kind: str, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(2, 2))], **options)
    return optimizer


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if hasattr(torch.optim, kind)])
def test_every_optimizer_gets_what_workers_can_do_for_it(kind: str) -> None:
    choice = choose_delay(made(kind, lr=0.1))
    assert choice.why
    spec = OptimizerSpec(kind, (((0,), {"lr": 0.1}),), (1,), delay=choice.delay)
    assert NativeOptimizer(spec, [torch.zeros(2, 2)], []).delays == (choice.delay,)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if hasattr(torch.optim, kind)])
@pytest.mark.parametrize("asked", [asked for asked in DELAYS if asked != "auto"])
def test_what_is_refused_is_what_workers_refuse(kind: str, asked: str) -> None:
    spec: Any = OptimizerSpec(kind, (((0,), {"lr": 0.1}),), (1,), delay=asked)  # type: ignore[arg-type]
    try:
        NativeOptimizer(spec, [torch.zeros(2, 2)], [])
    except Exception:
        with pytest.raises(UsageError, match=f"correction='{asked}' needs"):
            choose_delay(made(kind, lr=0.1), asked)
    else:
        assert choose_delay(made(kind, lr=0.1), asked).delay == asked


@pytest.mark.parametrize("asked", ["", "perhaps", "Predict"])
def test_a_treatment_that_there_is_not(asked: str) -> None:
    with pytest.raises(UsageError, match="allowed: auto, none, predict, extrapolate, lookahead, both, feedback"):
        choose_delay(made("SGD", lr=0.1), asked)


def test_momentum_decides() -> None:
    assert choose_delay(made("SGD", lr=0.1, momentum=0.9)).delay == "extrapolate"
    assert choose_delay(made("SGD", lr=0.1)).delay == "feedback"
    mixed = torch.optim.SGD(
        [
            {"params": [torch.nn.Parameter(torch.zeros(2))], "momentum": 0.0},
            {"params": [torch.nn.Parameter(torch.zeros(2))]},
        ],
        lr=0.1,
        momentum=0.9,
    )
    assert choose_delay(mixed).delay == "feedback"
    assert "nothing is predicted" in (choose_delay(mixed, "predict").warning or "")


def test_who_leaves_adam_untreated_is_warned() -> None:
    assert "loses accuracy" in (choose_delay(made("AdamW", lr=0.1), "none").warning or "")


def test_memory_of_treatments() -> None:
    copies = {
        delay: extra_copies(delay) for delay in ("none", "predict", "extrapolate", "lookahead", "both", "feedback")
    }
    assert copies == {"none": 0, "predict": 1, "extrapolate": 2, "lookahead": 1, "both": 2, "feedback": 1}
