"""What a notebook shows of a pool, a plan and a trainer; and their figures."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import onebox
from onebox.errors import UsageError


def shown(thing: object) -> str:
    """Return the text of what a notebook shows, after a check that it is well-formed and does nothing."""
    html = thing._repr_html_()  # type: ignore[attr-defined]
    assert "<script" not in html
    return re.sub(r"\s+", " ", " ".join(ElementTree.fromstring(html).itertext()))


@pytest.mark.feature("Monitoring: Draw pools, plans and trainers in a notebook")
def test_pool_plan_and_trainer_draw_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(16, 16), torch.randint(0, 4, (16,))
    loss = nn.functional.cross_entropy
    far = onebox.Link(latency_s=5e-3, bandwidth_bps=12.5e6)
    with onebox.open("sim*4", links={(a, b): far for a in (0, 1) for b in (2, 3)}) as pool:
        assert "Pool of 4 devices" in shown(pool) and "rate" not in shown(pool)
        pool.profile()
        planned = onebox.make_plan(model, loss, optimizer, inputs, targets, pool=pool, budget_s=0.5)
        text = shown(pool)
        assert "sim, emulated, speed 1" in text and "group 0 – localhost, group 1" in text and "bit/s" in text
        pool.figure(tmp_path / "pool.svg")
        assert planned.plan.describe() in shown(planned)
        assert "predicted: " in shown(planned)
        planned.figure(tmp_path / "planned.svg")
        assert planned.plan.describe() in shown(planned.plan) and "forward ms" in shown(planned.plan)
        planned.plan.figure(tmp_path / "plan.svg")
        for name in ("pool", "planned", "plan"):
            ElementTree.parse(tmp_path / f"{name}.svg")
        with pytest.raises(UsageError, match=r"allowed are \.png"):
            pool.figure(tmp_path / "pool.jpg")
        with onebox.Trainer(model, loss, optimizer, pool=pool, plan=planned.plan) as trainer:
            assert "Trainer of Sequential on 4 devices" in shown(trainer) and "steps 0" in shown(trainer)
            for _ in range(3):
                trainer.step(inputs, targets)
            trainer.wait()
            assert "steps 3" in shown(trainer) and "measured, step 3: " in shown(trainer)


def test_a_plan_without_a_prediction_says_what_to_do() -> None:
    plan = onebox.Plan.data_parallel([0, 1], [1.0, 1.0])
    assert plan.describe() in shown(plan)
    with pytest.raises(UsageError, match="onebox plan --check FILE --out FILE"):
        plan.figure()
