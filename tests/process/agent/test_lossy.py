"""Lossy messages between hosts, which travel as encrypted streams, have the bits of those within one."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

import onebox
from onebox.plan import Plan
from onebox.pool import open_pool
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.stages import staged
from tests.process.agent.hosts import Host

pytestmark = pytest.mark.usefixtures("folder")


def plans() -> list[Plan]:
    both = Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=3)
    cut = staged("mlp", [0, 1], micro_batch=8)
    return [
        *(replace(both, stages=(replace(both.stages[0], gradients=codec),)) for codec in ("bf16", "int8", "powersgd")),
        replace(cut, stages=tuple(replace(stage, activations="int8") for stage in cut.stages)),
    ]


def trained(pool: onebox.Pool, plan: Plan) -> dict[str, torch.Tensor]:
    case = CASES["mlp"]
    model = case.model()
    allowed = ("gradients", "activations")
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan, lossy=allowed) as trainer:
        for batch in case.batches([16, 16, 11]):
            trainer.step(*batch)
        return trainer.tensors()


def test_hosts_exchange_what_one_would(hosts: tuple[Host, Host]) -> None:
    with open_pool(f"{hosts[0].address}/cpu,{hosts[1].address}/cpu", threads=1) as pool:
        assert len({device.host for device in pool.devices}) == 2  # so that no memory is shared
        found = [trained(pool, plan) for plan in plans()]
    with onebox.open("cpu*2", threads=1) as pool:
        expected = [trained(pool, plan) for plan in plans()]
    for apart, together in zip(found, expected, strict=True):
        assert all(torch.equal(apart[name], tensor) for name, tensor in together.items())
