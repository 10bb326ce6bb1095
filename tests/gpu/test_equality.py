"""The same results as plain PyTorch on the CPU, in float64: one worker of a GPU, or one beside a CPU worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import onebox
from onebox.plan import Plan
from tests.kit.models import CASES
from tests.kit.reference import assert_same
from tests.kit.stages import reference, run

pytestmark = pytest.mark.gpu

SIZES = [8, 5, 8]

TOLERANCE = 1e-8
"""Kernels of a GPU add up in another order than those of a CPU."""

MODELS = [name for name, case in CASES.items() if not case.draws]


@pytest.fixture(scope="module")
def pool(device: str) -> Iterator[onebox.Pool]:
    """One worker."""
    with onebox.open(device, threads=1) as pool:
        yield pool


@pytest.mark.feature("GPUs: Train on a GPU as on the CPU")
@pytest.mark.parametrize("name", MODELS)
def test_one_worker_gives_what_plain_pytorch_gives(name: str, pool: onebox.Pool) -> None:
    plan = Plan.data_parallel([0], [1.0], micro_batch=3)
    assert_same(run(pool, name, plan, SIZES), reference(name, plan, SIZES), TOLERANCE)


@pytest.mark.parametrize("optimizer", ["sgd", "adam-in-groups"])
def test_clipped_gradients_and_other_optimizers(optimizer: str, pool: onebox.Pool) -> None:
    plan = Plan.data_parallel([0], [1.0], micro_batch=3)
    found = run(pool, "cnn", plan, SIZES, optimizer=optimizer, clip_grad_norm=1.3)
    expected = reference("cnn", plan, SIZES, optimizer=optimizer, max_norm=1.3)
    assert_same(found, expected, TOLERANCE)
    assert found.norms == pytest.approx(expected.norms, abs=TOLERANCE)


@pytest.mark.feature("GPUs: Train on a GPU beside a CPU")
@pytest.mark.parametrize("sync", ["workers", "client"])
@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_a_gpu_beside_a_cpu(name: str, sync: str, device: str) -> None:
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=3, sync=sync)
    with onebox.open(f"{device},cpu", threads=1) as pool:
        assert_same(run(pool, name, plan, SIZES), reference(name, plan, SIZES), TOLERANCE)


def test_uneven_devices_get_shares_by_measured_speed(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        onebox.open(f"{device},cpu", threads=1) as pool,
        onebox.Trainer(
            model, nn.functional.cross_entropy, optimizer, pool=pool, plan=onebox.DataParallel(shares="measured")
        ) as trainer,
    ):
        trainer.step(torch.randn(64, 8, 8), torch.randint(0, 3, (64,))).item()
        assert trainer.plan is not None
        (stage,) = trainer.plan.stages
        assert len(stage.shares) == 2
        assert all(share > 0 for share in stage.shares)
