"""Plans of islands: searched for, predicted, run; and what islands exchange, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import onebox
from onebox.errors import UsageError
from onebox.plan_names import OuterCodec, StateAt
from onebox.pool import Link
from tests.kit.pools import Pools

OUTER = onebox.Outer(every=4, fragments=2, overlap=1, shares=[3, 1])
BATCH = (torch.randn(32, 16), torch.randn(32, 8))


def job() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model = nn.Sequential(*layers)
    return model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.feature("Islands: Plan islands beside exact steps")
@pytest.mark.parametrize("compression", ["none", "e3m0"])
def test_islands_are_planned_beside_exact_steps_and_run(compression: OuterCodec, pools: Pools) -> None:
    """With a codec, the outer state is on the host, too."""
    state: StateAt = "device" if compression == "none" else "host"
    asked = replace(OUTER, compression=compression, state=state)
    pool, parts = pools(3), job()
    options: dict[str, Any] = {"micro_batches": [8], "schedules": ["1f1b"], "budget_s": 0.5}
    islands = [[0, 1], [2]]
    found = onebox.make_plan(*parts, *BATCH, pool=pool, islands=islands, outer=asked, **options)
    assert [mode.name for mode in found.modes] == ["synchronous", "islands"]
    planned = found.islands
    assert planned is not None
    assert all(set(plan.devices) <= {*own} for plan, own in zip(planned.plans, islands, strict=True))
    assert sum(plan.predicted.batch for plan in planned.plans if plan.predicted) == 32
    model = parts[0]
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    exchanged = sum(tensor.nbytes for tensor in (*model.parameters(), *buffers))
    sent = {way: size_bytes * OUTER.every for way, size_bytes in found.modes[1].traffic.items()}
    if compression == "none":
        assert sent == {(0, 1): exchanged, (1, 0): exchanged}, "a ring of two: each sends all of it once in four steps"
    else:
        assert sent[0, 1] == sent[1, 0] < exchanged / 4, "four bits for 32, and buffers as they are"
    with onebox.Trainer(
        *parts, pool=pool, plan=list(planned.plans), islands=planned.islands, outer=planned.outer
    ) as trainer:
        for _ in range(5):
            loss = trainer.step(*BATCH)
        assert loss.item() > 0
        assert trainer.island_plans == planned.plans
        peaks = trainer.predicted_memory(*BATCH)
        assert {device: found.modes[1].peak_bytes[device] for device in peaks} == peaks


def test_over_a_slow_link_each_way_to_train_pays_more_than_the_one_before() -> None:
    links = {(0, 1): Link(latency_s=0.001, bandwidth_bps=2e6)}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(4096, 16), torch.randn(4096, 8)
    with onebox.open("sim*2", threads=1, links=links) as pool:
        found = onebox.make_plan(
            *(model, nn.functional.mse_loss, optimizer, inputs, targets),
            pool=pool,
            micro_batches=[512],
            budget_s=0.5,
            islands=[[0], [1]],
            outer=onebox.Outer(every=50),
            lossy=("gradients", "activations"),
        )
    assert found.islands is not None
    predicted, modes = found.islands.predicted, {mode.name: mode for mode in found.modes}
    assert predicted.sums_s == pytest.approx(predicted.step_s - max(predicted.islands_s), rel=0.1), "nothing hides them"
    assert modes["islands"].step_s < 0.9 * modes["synchronous"].step_s
    assert {*modes["islands"].traffic} == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"islands": [[0, 1], [1, 2]]}, "device 1 is named twice"),
        ({"islands": [[0], [1]]}, "device 2 is in no island"),
        ({"outer": OUTER}, "it is the outer optimizer of islands"),
        ({"islands": [[0, 1], [2]], "stale": onebox.StaleGradients()}, "islands= do not go together with stale="),
        ({"islands": [[0, 1], [2]], "outer": onebox.Outer(shares=[1, 1, 1])}, "3 weights for 2 islands"),
    ],
)
def test_what_cannot_be_planned(arguments: dict[str, Any], message: str, pools: Pools) -> None:
    with pytest.raises(UsageError, match=message):
        onebox.make_plan(*job(), *BATCH, pool=pools(3), **arguments)
