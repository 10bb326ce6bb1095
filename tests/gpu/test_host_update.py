"""An optimizer that steps on the host of a GPU: the bits of a CPU's steps, and no state on the GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onebox
from onebox.errors import DeviceMemoryError
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker.device import ComputeDevice
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.host_parameters import HostParameters
from onebox.worker.optimizer.native import NativeOptimizer
from tests.kit.trainer_arguments import grouped

pytestmark = pytest.mark.gpu

EDGE = {"cuda": 4096, "cpu": 64}
"""Of the matrices whose products keep a device busy."""

SHAPES = ((512, 512), (512,), (64, 512), (3,), (1024, 1024))


@pytest.mark.parametrize("max_norm", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["Adam", "SGD", "RMSprop"])
def test_steps_on_the_host_have_the_bits_of_a_cpu(
    kind: str, max_norm: float, compute: ComputeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is kept behind by products, so that gradients come, and their memory is used again, before they are made.

    What comes into their memory is of the same sizes: the allocator keeps memory by size.
    """
    device = compute.device
    monkeypatch.setattr(
        NativeOptimizer, "_copies", lambda self, tensors: HostParameters(tensors, self._accelerator, run_bytes=1 << 20)
    )
    torch.manual_seed(0)
    here = [torch.randn(shape) for shape in SHAPES]
    there = [tensor.to(device, copy=True) for tensor in here]
    spec = OptimizerSpec(kind, ((tuple(range(len(SHAPES))), {"lr": 0.1}),), tuple(range(1, 1 + len(SHAPES))))
    one = NativeOptimizer(spec, here, [])
    host = HostMemory(0)
    on_host = OptimizerSpec(spec.name, spec.groups, spec.parameters, host=True)
    other = NativeOptimizer(on_host, there, [], host, compute.accelerator)
    busy = torch.randn(EDGE[device.type], EDGE[device.type], device=device)
    for _ in range(4):
        gradients = [torch.randn(shape) for shape in SHAPES]
        norm = torch.nn.utils.get_total_norm(gradients) if max_norm else None
        one.step(gradients, max_norm, norm)
        late = [gradient.to(device, copy=True) for gradient in gradients]
        for _ in range(8):
            torch.mm(busy, busy)
        late = [gradient * 1.0 for gradient in late]
        other.step(late, max_norm, norm.to(device) if norm is not None else None)
        del late
        for _ in range(3):
            _ = [torch.full(shape, float("nan"), device=device) for shape in SHAPES]
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    assert other.charged_bytes == 0
    assert host.used_bytes > sum(tensor.nbytes for tensor in here)


def _trained(spec: str, model: nn.Module, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    trained = copy.deepcopy(model).double()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(12, 64, generator=generator).double(), torch.zeros(12, 8).double()) for _ in range(5)]
    with (
        onebox.open(spec, threads=1) as pool,
        onebox.Trainer(
            trained, nn.functional.mse_loss, optimizer, **grouped(pool=pool, micro_batch=4, **options)
        ) as trainer,
    ):
        for batch in batches:
            trainer.step(*batch)
        return trainer.tensors(), trainer.memory()[0]


def test_a_trainer_whose_optimizer_steps_on_the_host(device: str, real: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
    expected, _ = _trained("cpu", model, clip_grad_norm=0.1)
    kept, there = _trained(device, model, clip_grad_norm=0.1)
    found, here = _trained(device, model, clip_grad_norm=0.1, update="host")
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-8, rtol=1e-8), name
        assert torch.allclose(kept[name], tensor, atol=1e-8, rtol=1e-8), name
    if real:
        state = sum(tensor.nbytes for tensor in expected.values())
        assert here.host_bytes > 2 * state
        assert here.used_bytes < there.used_bytes - state


def test_what_does_not_fit_the_budget_of_a_device_is_refused(device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 4096))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        onebox.open(device, memory="96MiB") as pool,
        onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pool) as trainer,
        pytest.raises(DeviceMemoryError, match=r"aten.*would fail in .*the quota is"),
    ):
        trainer.step(torch.ones(8, 64), torch.zeros(8, 4096))
