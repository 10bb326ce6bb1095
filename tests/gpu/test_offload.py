"""Offloading from a GPU, by streams of its own and pinned memory: the same results, also when memory is used again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import ActivationPolicy, Plan, Stage
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Call, Evict, Free, Offload, Prefetch
from onebox.worker.device import ComputeDevice
from tests.unit.machines import Rig, define, elementwise

pytestmark = pytest.mark.gpu

SPEC = TensorSpec("float32", (2048, 2048))
BATCH = 12
STEPS = 5


def test_memory_that_is_used_again_at_once_spoils_no_copy(compute: ComputeDevice) -> None:
    """The GPU is kept behind by products, so that each copy is begun, and its memory given away, before it is made."""
    rig = Rig(device=compute)
    rig.do(define(100, elementwise("aten.mm.default", SPEC, 2)), define(101, elementwise("aten.neg.default", SPEC)))
    torch.manual_seed(0)
    x, y = torch.randn(SPEC.shape), torch.randn(SPEC.shape)
    rig.put(b1=x, b2=y, b3=x)
    busy = [Call(100, (1, 3), (9,))] * 8
    for _ in range(3):
        rig.do(*busy, Offload((1, 2)), Evict((1, 2)), Call(101, (3,), (4,)), Call(101, (3,), (5,)), Free((4, 5)))
        rig.do(Prefetch((2,)), Prefetch((1,)), Offload((3,)), Evict((3,)), Call(101, (2,), (6,)))
        rig.do(Prefetch((3,)), Free((6,)))
        assert rig.failures == []
        assert torch.equal(rig.get(1), x)
        assert torch.equal(rig.get(2), y)
        assert torch.equal(rig.get(3), x)


def test_what_is_freed_on_the_way_spoils_nothing(compute: ComputeDevice) -> None:
    rig = Rig(device=compute)
    rig.do(define(101, elementwise("aten.neg.default", SPEC)))
    torch.manual_seed(0)
    x = torch.randn(SPEC.shape)
    rig.put(b1=x)
    for _ in range(20):
        rig.do(Call(101, (1,), (2,)), Offload((2,)), Free((2,)), Call(101, (1,), (3,)), Offload((3,)), Evict((3,)))
        rig.do(Prefetch((3,)), Free((3,)), Call(101, (1,), (4,)))
        assert torch.equal(rig.get(4), -x)
    assert rig.failures == []
    assert rig.used == 2 * x.nbytes


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(8 if place else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for place in range(8)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 16 * 16, 4)).double()


def _train(device: str, policy: ActivationPolicy) -> tuple[nn.Module, list[float], int]:
    """Return the model, the losses, and the peak that was measured; it is the predicted one."""
    model = copy.deepcopy(_model())
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, 3, 16, 16, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 4, (BATCH,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with onebox.open(device, threads=1) as pool:
        captured = capture(model, nn.functional.cross_entropy, (inputs[:4], targets[:4]))
        names = TracedModel(captured, backward=True).segments
        stages = tuple(Stage(segments=(name,), replicas=((0,),), shares=(1.0,), policy=policy) for name in names)
        plan = Plan(stages=stages, micro_batch=4)
        with onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool, plan=plan) as trainer:
            losses = [float(trainer.step(inputs, targets)) for _ in range(STEPS)]
            trainer.wait()
            measured = max(event.peak_bytes for event in trainer.events() if event.step == STEPS - 1)
            assert measured == trainer.predicted_curves(inputs, targets)[0].peak.peak_bytes
            trainer.pull()
    return model, losses, measured


def test_a_model_of_which_all_is_offloaded_trains_as_on_a_cpu_in_less_memory(device: str) -> None:
    expected, losses, _ = _train("cpu", "keep")
    _, _, kept_bytes = _train(device, "keep")
    found, found_losses, found_bytes = _train(device, "offload")
    assert found_losses == pytest.approx(losses, abs=1e-9)
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, atol=1e-8, rtol=1e-8), name
    assert found_bytes < 0.6 * kept_bytes
