"""Modelled accelerators of several seeds, on which the tests of other folders run again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.kit.accelerator import ModelAccelerator
from tests.unit.machines import rigs_on

SEEDS = range(3)


@pytest.fixture(params=[pytest.param(seed, marks=[pytest.mark.long] * (seed > 0), id=f"seed{seed}") for seed in SEEDS])
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of the order of kernels."""
    return int(request.param)


@pytest.fixture
def collected() -> Iterator[None]:
    """Free the garbage of a test at its end; what is left is not looked at again, as all of PyTorch takes most of a
    second."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def accelerator(seed: int, collected: None) -> Iterator[ModelAccelerator]:
    """The device of the machines of a test, which must not race."""
    made = ModelAccelerator(seed, memory_bytes=256 << 20)
    try:
        with rigs_on(made):
            yield made
        made.synchronize()
        assert made.races == ()
    finally:
        made.close()
