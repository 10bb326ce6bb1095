"""Two workers of one GPU: NCCL refuses them, so that their groups are others, and their results the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import onebox
from onebox.plan import Plan
from tests.kit.reference import assert_same
from tests.kit.stages import reference, run, staged

pytestmark = pytest.mark.gpu

SIZES = [8, 5, 8]
TOLERANCE = 1e-8


@pytest.fixture(scope="module")
def pool(device: str) -> Iterator[onebox.Pool]:
    """Two workers of one device."""
    with onebox.open(f"{device},{device}", threads=1) as pool:
        yield pool


def test_replicas(pool: onebox.Pool) -> None:
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=3)
    assert_same(run(pool, "cnn", plan, SIZES), reference("cnn", plan, SIZES), TOLERANCE)


@pytest.mark.parametrize("model", ["gpt2", "unet"])
def test_stages(model: str, pool: onebox.Pool) -> None:
    plan = staged(model, (0, 1))
    assert_same(run(pool, model, plan, SIZES), reference(model, plan, SIZES), TOLERANCE)


def test_a_half_of_the_memory_each(device: str) -> None:
    with onebox.open(f"{device},{device}", threads=1, memory="256MiB") as pool:
        plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=3)
        assert_same(run(pool, "mlp", plan, SIZES), reference("mlp", plan, SIZES), TOLERANCE)
