"""Versions of parameters on a GPU: as on a CPU, also where the optimizer steps in the host's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onebox.wire.protocol.instructions import Branch, OptimizerStep
from onebox.wire.protocol.requests import Define, OptimizerSpec
from onebox.worker.device import ComputeDevice
from onebox.worker.optimizer.delay_compensation import AHEAD
from tests.unit.machines import Rig

pytestmark = pytest.mark.gpu

START = torch.arange(12, dtype=torch.float64).reshape(3, 4)


def trained(device: ComputeDevice, delay: Any, *, host: bool) -> list[torch.Tensor]:
    """Return a parameter and the version before, after late steps."""
    ahead = (21,) if delay in AHEAD else ()
    rig = Rig(device=device)
    rig.put(b1=START)
    rig.do(
        Define(7, OptimizerSpec("AdamW", (((0,), {"lr": 0.1}),), (1,), delay=delay, host=host)), Branch(7, (11,), ahead)
    )
    for step in range(4):
        rig.put(b31=torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)))
        rig.do(OptimizerStep(7, (31,), previous=(11,), ahead=ahead))
    assert rig.failures == []
    found = [rig.get(number) for number in (1, 11)]
    rig.machine.close()
    return found


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("delay", ["none", "predict", "extrapolate", "lookahead", "both", "feedback"])
def test_versions_are_those_of_a_cpu(delay: str, host: bool, compute: ComputeDevice) -> None:
    ours = trained(compute, delay, host=host)
    theirs = trained(ComputeDevice("cpu", 1), delay, host=False)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
