"""Wrong arguments and batches: one clear error each, and the trainer goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebox
from onebox.errors import CaptureError, UsageError
from tests.kit.models import CASES, sgd
from tests.kit.pools import Pools
from tests.kit.trainer_arguments import grouped

CASE = CASES["mlp"]
X_BD, Y_B = CASE.batches([4])[0]


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (X_BD, Y_B[:3], r"same, non-zero number of samples .* inputs \[4, 10\], targets \[3\]"),
        (X_BD[:0], Y_B[:0], r"same, non-zero number of samples .* inputs \[0, 10\], targets \[0\]"),
        (X_BD, torch.tensor(1), r"same, non-zero number of samples .* inputs \[4, 10\], targets \[\]"),
        ((), {}, "no tensor at all"),
        ({"x": X_BD, "more": "text"}, Y_B, r"inputs\['more'\] is a str"),
        (X_BD, 3, r"argument 'target' \(position 2\) must be Tensor, not int"),
        (X_BD.to(torch.uint16), Y_B, "uint16 cannot be trained with"),
    ],
)
def test_a_batch_that_is_none_is_refused_and_harms_nothing(
    inputs: Any, targets: Any, message: str, pools: Pools
) -> None:
    model = CASE.model()
    with onebox.Trainer(model, CASE.loss, sgd(model), pool=pools(2)) as trainer:
        with pytest.raises(onebox.OneboxError, match=message):
            trainer.step(inputs, targets)
        with pytest.raises(onebox.OneboxError, match=message):
            trainer.evaluate([(inputs, targets)])
        assert trainer.steps_done == 0
        assert np.isfinite(float(trainer.step(X_BD, Y_B)))


def test_a_model_that_does_not_fit_its_batch_names_the_line_and_may_be_tried_again(pools: Pools) -> None:
    model = CASE.model()
    with onebox.Trainer(model, CASE.loss, sgd(model), pool=pools(2)) as trainer:
        with pytest.raises(CaptureError, match="cannot be computed for this batch"):
            trainer.step(X_BD[:, :3], Y_B)
        assert np.isfinite(float(trainer.step(X_BD, Y_B)))
        with pytest.raises(CaptureError, match="cannot be computed for this batch"):
            trainer.step(X_BD[:, :3], Y_B)
        assert np.isfinite(float(trainer.step(X_BD, Y_B)))


class Own(torch.optim.SGD):
    """A class of the user's."""


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model.requires_grad_(False)
    return sgd(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), r"LBFGS is no optimizer that workers run; .* AdamW"),
        (lambda model: torch.optim.SparseAdam(model.parameters()), "SparseAdam is no optimizer that workers run"),
        (lambda model: Own(model.parameters()), r"test_refusals\.Own is no optimizer that workers run"),
        (lambda model: sgd(CASE.model()), r"a parameter of shape \[16, 10\] that is neither the model's nor the loss"),
        (frozen, "no parameter that requires a gradient"),
    ],
)
def test_an_optimizer_that_workers_cannot_run_is_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], message: str, pools: Pools
) -> None:
    model = CASE.model()
    with pytest.raises(UsageError, match=message):
        onebox.Trainer(model, CASE.loss, make(model), pool=pools(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"sync": "servers"}, "sync='servers'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"check_every": -1}, "check_every=-1"),
        ({"shares": [1.0]}, "1 weights for 2 devices"),
        ({"shares": [1.0, -1.0]}, "from 0 up and not all 0"),
        ({"shares": [0.0, 0.0]}, "not all 0"),
        ({"shares": "fair"}, "shares='fair'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str, pools: Pools) -> None:
    model = CASE.model()
    with (
        pytest.raises(UsageError, match=message),
        onebox.Trainer(model, CASE.loss, sgd(model), **grouped(pool=pools(2), **options)) as trainer,
    ):
        trainer.step(X_BD, Y_B)


def test_a_trainer_that_is_closed_says_so(pools: Pools) -> None:
    model = CASE.model()
    trainer = onebox.Trainer(model, CASE.loss, sgd(model), pool=pools(1))
    trainer.close()
    trainer.close()
    for call in (lambda: trainer.step(X_BD, Y_B), trainer.pull, trainer.tensors, lambda: trainer.evaluate([])):
        with pytest.raises(UsageError, match="this trainer is closed"):
            call()


def test_a_closed_trainer_leaves_nothing_on_the_workers(pools: Pools) -> None:
    model, probe_model = CASE.model(), nn.Linear(1, 1)

    def used_bytes() -> list[int]:
        with onebox.Trainer(probe_model, CASE.loss, sgd(probe_model), pool=pools(2)) as probe:
            return [memory.used_bytes for memory in probe.memory()]

    before = used_bytes()
    with onebox.Trainer(
        model, CASE.loss, sgd(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=3)
    ) as trainer:
        trainer.step(X_BD, Y_B)
        trainer.evaluate([(X_BD, Y_B)])
    assert used_bytes() == before
