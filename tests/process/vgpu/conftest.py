"""What tests of several virtual devices share; a module says by ``DEVICES`` how many it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import onebox


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[onebox.Pool]:
    with onebox.open(f"cpu*{request.module.DEVICES}", threads=1) as opened:
        yield opened


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
