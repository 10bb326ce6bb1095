"""What tests of several virtual devices share; a module says by ``DEVICES`` how many it needs, if not two."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import onebox
from onebox.vgpu import attach
from onebox.vgpu.cuda_alias import alias_cuda


@pytest.fixture(scope="module")
def pool(pool: onebox.Pool) -> Iterator[onebox.Pool]:
    """The shared pool, whose devices are ``vgpu:0 …``; for tests that leave it whole."""
    box = attach(pool)
    yield pool
    gc.collect()
    for stream in box.queues:
        stream.flush()


@pytest.fixture(scope="module")
def alias(pool: onebox.Pool) -> Iterator[None]:
    with alias_cuda():
        yield


@pytest.fixture
def aliased(alias: None) -> Iterator[None]:
    """The devices of the pool are ``cuda:0 …``, of which the first is the current one."""
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)
    torch.set_default_device(None)


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
