"""Memory with which a step begins is what the worker takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.plan import Plan
from onebox.pool import DeviceInfo
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.native import NativeOptimizer
from tests.unit.worker.late_device import LateDevice


@pytest.mark.parametrize(("kind", "options"), [("SGD", {"lr": 0.1}), ("AdamW", {"lr": 0.1})])
def test_an_optimizer_on_the_host_of_a_gpu_takes_as_much_there_as_is_predicted(
    kind: str, options: dict[str, Any]
) -> None:
    """Copies of the parameters, and the buffers through which gradients pass."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    trained = frozenset(f"model.{name}" for name, _ in model.named_parameters())
    spec = CaptureSpec(
        model=model, loss=nn.functional.mse_loss, metrics={}, precision="fp32", device_type="cuda", trained=trained
    )
    gpu = DeviceInfo(number=0, host="one", device="cuda:0", name="a GPU", threads=1, memory_bytes=1 << 30)
    job = TrainingJob(
        captures=Captures(spec),
        optimizer=getattr(torch.optim, kind)(model.parameters(), **options),
        batch=as_batch(torch.zeros(4, 5), torch.zeros(4, 3)),
        devices=[gpu],
    )
    plan = Plan.data_parallel([0], [1.0], micro_batch=4, update="host")
    host, parameters = HostMemory(0), [parameter.detach().clone() for parameter in model.parameters()]
    members = tuple(range(len(parameters)))
    on_host = OptimizerSpec(kind, ((members, options),), members, host=True)
    native = NativeOptimizer(on_host, parameters, [], host, LateDevice())
    native.step([torch.ones_like(parameter) for parameter in parameters], 0.0)
    assert job.contents(plan)[0].host_bytes == host.used_bytes
