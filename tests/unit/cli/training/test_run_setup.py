"""What a run begins with: its optimizers, and the plan that its options request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onebox.cli.models import build_model
from onebox.cli.options.jobs import DATA_PARALLEL, TrainConfig
from onebox.cli.training.run_setup import make_optimizer, requested_data_parallel
from onebox.errors import UsageError
from onebox.trainer_options import DataParallel


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    table = nn.Embedding(7, 4)
    model = nn.Sequential(table, nn.LayerNorm(4), nn.Linear(4, 3))
    muon, adamw = make_optimizer(TrainConfig(optimizer="muon", lr=0.5).resolved(), model)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert muon.param_groups[0]["params"] == [model[2].weight]
    assert {id(p) for p in adamw.param_groups[0]["params"]} == {
        id(p) for p in (table.weight, *model[1].parameters(), model[2].bias)
    }
    for each in (muon, adamw):
        assert (each.param_groups[0]["lr"], each.param_groups[0]["weight_decay"]) == (0.5, 0.01)


def test_every_model_has_something_for_both() -> None:
    for name in ("mlp", "cnn", "resnet", "gpt"):
        model = build_model(name, classes=10, channels=1, height=8, width=8, mean=(0.5,), std=(0.5,), seed=0)
        found = [
            id(p)
            for each in make_optimizer(TrainConfig(optimizer="muon").resolved(), model)
            for p in each.param_groups[0]["params"]
        ]
        assert sorted(found) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"plan": DATA_PARALLEL}, DataParallel()),
        ({"plan": DATA_PARALLEL, "micro_batch": 8}, DataParallel(micro_batch=8)),
        ({"micro_batch": 8}, DataParallel(micro_batch=8)),
        ({"shares": "3,1"}, DataParallel(shares=[3, 1])),
        ({"sync": "client"}, DataParallel(sync="client")),
    ],
)
def test_options_of_data_parallel_training_request_it(options: dict[str, Any], expected: DataParallel | None) -> None:
    assert requested_data_parallel(TrainConfig(**options)) == expected


@pytest.mark.parametrize("plan", ["auto", "plan.json", ""])
def test_a_plan_determines_the_rest(plan: str) -> None:
    with pytest.raises(UsageError, match=r"--plan .*(a plan says that itself|a plan file, auto, or data-parallel)"):
        TrainConfig(plan=plan, **({"micro_batch": 8} if plan else {}))
