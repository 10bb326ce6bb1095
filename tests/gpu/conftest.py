"""Devices of the tests of this folder: GPUs, or others on which the tests themselves are tried out.

``ONEBOX_TEST_DEVICE`` says which: ``cuda`` if not given; ``cpu`` for workers without a GPU; ``model`` for modelled
accelerators. What needs a real GPU skips on others, and all skips where there is no GPU and no other device is asked
for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from onebox.worker.device import ComputeDevice
from tests.kit.modelled import install

KINDS = ("cuda", "cpu", "model")


@pytest.fixture(scope="session")
def device_kind() -> Iterator[str]:
    """The kind of the devices, one of :data:`KINDS`."""
    kind = os.environ.get("ONEBOX_TEST_DEVICE", "cuda")
    if kind not in KINDS:
        raise ValueError(f"ONEBOX_TEST_DEVICE is {kind!r}; allowed are {', '.join(KINDS)}")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    with pytest.MonkeyPatch.context() as patch:
        if kind == "model":
            install(patch)
        yield kind


@pytest.fixture(scope="session")
def real(device_kind: str) -> bool:
    """Return whether the devices are GPUs."""
    return device_kind == "cuda"


@pytest.fixture(scope="session")
def on_gpu(real: bool) -> None:
    """Skip on devices that are no GPUs."""
    if not real:
        pytest.skip("only a GPU shows it")


@pytest.fixture(scope="session")
def device(device_kind: str) -> str:
    """Return one device, for the specification of a pool."""
    return device_kind if device_kind == "cpu" else f"{device_kind}:0"


@pytest.fixture(scope="session")
def devices(device_kind: str) -> Callable[[int], str]:
    """Return a function from a number of devices to the specification of a pool; it skips where there are fewer."""

    def named(count: int) -> str:
        if device_kind == "cuda" and torch.cuda.device_count() < count:
            pytest.skip(f"needs {count} CUDA devices, here are {torch.cuda.device_count()}")
        return ",".join("cpu" if device_kind == "cpu" else f"{device_kind}:{index}" for index in range(count))

    return named


@pytest.fixture
def compute(device: str, device_kind: str) -> Iterator[ComputeDevice]:
    """Return the device in this process; a limit of its memory is lifted afterwards."""
    if device_kind == "model":
        pytest.skip("tests/modelled has this on modelled accelerators")
    yield ComputeDevice(device, 1)
    if device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(1.0, torch.device(device))
        torch.cuda.empty_cache()
