"""Sharded tensors on the devices of two ranks: a script that prints what ``test_sharded.py`` compares."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
import torch.distributed.tensor as sharding
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional


def drawn() -> dict[str, object]:
    """Return numbers drawn into shards, into copies, and after them, and those of a model that is initialised last."""
    torch.manual_seed(0)
    shards = sharding.rand(8, device_mesh=mesh, placements=[Shard(0)])
    copies = sharding.rand(8, device_mesh=mesh, placements=[Replicate()])
    after = torch.rand(4, device="cuda")
    own = torch.Generator("cuda").manual_seed(3)
    given = sharding.zeros(8, device_mesh=mesh, placements=[Shard(0)]).uniform_(generator=own)
    with torch.device("meta"):
        model = torch.nn.Linear(8, 6)
    fully_shard(model)
    model.to_empty(device="cuda").reset_parameters()
    assert isinstance(model.weight, DTensor)
    weight = model.weight.full_tensor()
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    assert isinstance(model.weight.grad, DTensor)
    return {
        "shards": shards.full_tensor().tolist(),
        "copies": copies.to_local().tolist(),
        "after": after.tolist(),
        "given": given.full_tensor().tolist(),
        "weight": weight.tolist(),
    }


def attention_error() -> float:
    """Return the largest difference of causal attention, with its gradient, over shards from that on the CPU."""
    errors = []
    plain = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole = functional.scaled_dot_product_attention(plain, plain, plain, is_causal=True)
    whole.square().sum().backward()
    assert plain.grad is not None
    for placement in (Shard(0), Shard(1), Replicate()):
        divided = sharding.distribute_tensor(plain.detach().cuda(), mesh, [placement]).requires_grad_()
        out = functional.scaled_dot_product_attention(divided, divided, divided, is_causal=True)
        out.square().sum().backward()
        assert isinstance(out, DTensor) and isinstance(divided.grad, DTensor)
        pairs = ((out, whole.detach()), (divided.grad, plain.grad))
        errors += [(mine.full_tensor().cpu() - known).abs().max().item() for mine, known in pairs]
    return max(errors)


dist.init_process_group()
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
found: list[object] = [None] * dist.get_world_size()
dist.all_gather_object(found, {"drawn": drawn(), "error": attention_error()})
if dist.get_rank() == 0:
    print(json.dumps({"losses": found}), flush=True)
dist.barrier()
dist.destroy_process_group()
