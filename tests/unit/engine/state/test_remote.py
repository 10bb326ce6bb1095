"""The state on the workers: what uploads and changes send, and what is read again."""

from __future__ import annotations

import torch
from torch import nn

from onebox.engine.partition.sharding_spec import ShardingSpec
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.transfer import StateTransfer
from onebox.graph.shard.placements import Shard, shard_of
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Put
from tests.unit.engine.state.rigs import Rigs
from tests.unit.machines import Rig


def state(rigs: Rigs) -> RemoteState:
    """Return the state of a model of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    return RemoteState(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), rigs.pool)


def everywhere(remote: RemoteState) -> ShardingSpec:
    """Return the sharding spec by which two workers hold everything."""
    names, both = remote.named.tensors, (0, 1)
    groups = dict.fromkeys(names, (both,))
    return ShardingSpec(devices=both, holders=dict.fromkeys(names, both), replica_groups=groups, stages=())


FIRST, SECOND = ("model.0.weight", "model.0.bias"), ("model.1.weight", "model.1.bias")


def test_what_lies_there_stays_and_what_is_not_wanted_is_freed() -> None:
    rigs = Rigs(2)
    remote = state(rigs)
    remote.upload(everywhere(remote))
    assert rigs.posted == {Put: 2 * 4}
    holders = dict.fromkeys(FIRST, (0,)) | dict.fromkeys(SECOND, (1,))
    groups = {name: (members,) for name, members in holders.items()}
    remote.upload(ShardingSpec(devices=(0, 1), holders=holders, replica_groups=groups, stages=()))
    assert rigs.posted == {Put: 2 * 4, Free: 2}
    for rig, names in zip(rigs.rigs, (FIRST, SECOND), strict=True):
        alone = Rig()
        alone.put(**{f"b{remote.named.numbers[name]}": remote.named.tensors[name].detach() for name in names})
        assert rig.used == alone.used
        for name in names:
            assert torch.equal(rig.get(remote.named.numbers[name]), remote.named.tensors[name])


def test_a_layer_that_is_split_afterwards_replaces_the_whole_and_is_read_and_changed() -> None:
    rigs = Rigs(2)
    remote = state(rigs)
    whole = everywhere(remote)
    remote.upload(whole)
    weight, split = FIRST[0], Shard(0, (4, 2))
    parted = ShardingSpec(
        devices=(0, 1),
        holders=whole.holders,
        replica_groups={**whole.replica_groups, weight: ((0,), (1,))},
        stages=(),
        placements={weight: split},
        ranks={0: 0, 1: 1},
    )
    remote.upload(parted)
    assert rigs.posted == {Put: 2 * 4 + 2}
    new = {weight: torch.randn(6, 4), SECOND[1]: torch.randn(2)}
    remote.write(new)
    assert rigs.posted == {Put: 2 * 4 + 2 + 4}
    for rank, rig in enumerate(rigs.rigs):
        assert torch.equal(rig.get(remote.named.numbers[weight]), shard_of(new[weight], split, rank))
    into = {name: torch.zeros_like(tensor) for name, tensor in remote.named.tensors.items()}
    StateTransfer(rigs.pool, remote).into(into)
    for name, tensor in remote.named.tensors.items():
        assert torch.equal(into[name], new.get(name, tensor.detach()))
