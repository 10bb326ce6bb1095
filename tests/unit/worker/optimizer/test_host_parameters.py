"""Optimizers on the host: the same bits, nothing that counts for the quota, all that they take counted and bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onebox.cost import host_copies
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker.accelerator import accelerator_for
from onebox.worker.memory.buffers import QuotaExceeded
from onebox.worker.memory.host import HOST_SHARE, HostMemory
from onebox.worker.optimizer.host_parameters import HostParameters
from onebox.worker.optimizer.native import ALLOWED, NativeOptimizer

SHAPES = ((4, 3), (8,), (2, 5), (1,))
KNOWN = [kind for kind in ALLOWED if hasattr(torch.optim, kind)]


def tensors(kind: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape for shape in SHAPES if kind != "Muon" or len(shape) == 2]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def optimizer(
    kind: str, parameters: list[Tensor], *, host: HostMemory | None = None, **options: Any
) -> NativeOptimizer:
    members = tuple(range(len(parameters)))
    groups = ((members[:1], {"lr": 0.1, **options}), (members[1:], {"lr": 0.03, **options}))
    return NativeOptimizer(
        OptimizerSpec(kind, groups, tuple(range(1, len(parameters) + 1)), host=host is not None), parameters, [], host
    )


class Elsewhere(HostParameters):
    """Copies of parameters of which three at most are on their way at once, on a device that is the CPU itself."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, accelerator_for("cpu"), run_bytes=100)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let optimizers on the host take parameters for a GPU's; what a stream would order is in order here."""

    def on_gpu(native: NativeOptimizer, parameters: list[Tensor]) -> HostParameters:
        return Elsewhere(parameters)

    monkeypatch.setattr(NativeOptimizer, "_copies", on_gpu)


@pytest.mark.parametrize("max_norm", [0.0, 0.7])
@pytest.mark.parametrize("kind", KNOWN)
def test_a_step_on_the_host_has_the_bits_of_one_on_the_device(kind: str, max_norm: float) -> None:
    here, there = tensors(kind, 0), tensors(kind, 0)
    one, other = optimizer(kind, here), optimizer(kind, there, host=HostMemory(0))
    for seed in (1, 2, 3):
        norms = [each.step(tensors(kind, seed), max_norm) for each in (one, other)]
        assert norms[0] == norms[1]
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("max_norm", [0.0, 0.7])
@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.usefixtures("elsewhere")
def test_copies_of_parameters_are_stepped_run_by_run_with_the_same_bits(kind: str, max_norm: float) -> None:
    here, there = tensors(kind, 0), tensors(kind, 0)
    one, other = optimizer(kind, here), optimizer(kind, there, host=HostMemory(0))
    for seed in (1, 2, 3):
        gradients = tensors(kind, seed)
        copies = [gradient.clone() for gradient in gradients]
        norms = [each.step(gradients, max_norm) for each in (one, other)]
        assert norms[0] == norms[1]
        assert all(torch.equal(a, b) for a, b in zip(gradients, copies, strict=True)), "gradients are not written to"
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert all(a is not b for a, b in zip(other.parameters, there, strict=True))


@pytest.mark.parametrize("kind", KNOWN)
def test_clipping_in_runs_is_clipping_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tensors(kind, 0), tensors(kind, 0)
    one, other = optimizer(kind, here), optimizer(kind, there)
    for seed in (1, 2):
        one.step(tensors(kind, seed), 0.7)
        with monkeypatch.context() as few:
            few.setattr(host_copies.runs, "__defaults__", (1,))
            other.step(tensors(kind, seed), 0.7)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_the_state_counts_for_the_host_and_not_for_the_device() -> None:
    host = HostMemory(0)
    native = optimizer("Adam", tensors("Adam", 0), host=host)
    assert (native.charged_bytes, host.used_bytes) == (0, 0)
    native.step(tensors("Adam", 1), 0.0)
    elements = sum(tensor.numel() for tensor in tensors("Adam", 0))
    assert (native.charged_bytes, host.used_bytes) == (0, 2 * 8 * elements + 4 * len(SHAPES))
    native.close()
    native.close()
    assert (host.used_bytes, host.peak_bytes) == (0, 2 * 8 * elements + 4 * len(SHAPES))


@pytest.mark.usefixtures("elsewhere")
def test_copies_of_parameters_and_of_gradients_count_for_the_host() -> None:
    host = HostMemory(0)
    native = optimizer("SGD", tensors("SGD", 0), host=host)
    copies = 128 + 64 + 128 + 64
    assert host.used_bytes == copies + 2 * (128 + 64), "the longest run has 80 and 8 bytes, each from a multiple of 64"
    native.close()
    assert host.used_bytes == 0


@pytest.mark.parametrize("way", [(True, False), (False, True)], ids=["to the device", "to the host"])
@pytest.mark.parametrize("kind", ["Adam", "SGD", "Adagrad", "NAdam"])
@pytest.mark.usefixtures("elsewhere")
def test_the_state_moves_between_host_and_device_bit_for_bit(kind: str, way: tuple[bool, bool]) -> None:
    hosts = [HostMemory(0) if on_host else None for on_host in way]
    options = {"momentum": 0.9} if kind == "SGD" else {}
    plain, before = tensors(kind, 0), tensors(kind, 0)
    reference, first = optimizer(kind, plain, **options), optimizer(kind, before, host=hosts[0], **options)
    for seed in (1, 2):
        reference.step(tensors(kind, seed), 0.0)
        first.step(tensors(kind, seed), 0.0)
    after = [tensor.clone() for tensor in before]
    second = optimizer(kind, after, host=hosts[1], **options)
    entries, values = first.state()
    second.remember(entries, [value.clone() for value in values])
    for seed in (3, 4):
        reference.step(tensors(kind, seed), 0.0)
        second.step(tensors(kind, seed), 0.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))


def test_the_account_of_the_host_is_bounded() -> None:
    host = HostMemory(100)
    native = optimizer("Adam", tensors("Adam", 0), host=host)
    with pytest.raises(QuotaExceeded, match=rf"of the host's memory needed, but {HOST_SHARE * 100} bytes are allowed"):
        native.step(tensors("Adam", 1), 0.0)
    assert host.used_bytes == 0
    host.charge(400)
    with pytest.raises(QuotaExceeded):
        host.charge(1)
    host.charge(-400)
    assert (host.used_bytes, host.peak_bytes) == (0, 400)
