"""Shared out optimizers, and sums in each host first: who does what, played with real tensors."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from onebox.cost import AllReduceAlgorithm, store
from onebox.cost.all_reduce import TransferTime
from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.partition.hierarchical_reduction import (
    find_reductions,
    group_leaders,
    known_links,
    subgroups,
)
from onebox.engine.partition.optimizer_sharding import assign_owners, buckets_by_owner
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.plan import Plan
from onebox.pool import DeviceInfo, Link
from onebox.pool.network.emulated import LinkMap
from onebox.pool.network.profile import profile_key
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Broadcast, OptimizerStep, Reduce
from tests.unit.engine.nets import PLANS, Lowered, batch, build, lower, plan, stage, state_of
from tests.unit.engine.player import Played, play, steps_of
from tests.unit.pool.network.test_profile import between

MORE = {
    "three replicas": Plan.data_parallel([2, 0, 1], [0.5, 0.1, 0.4], micro_batch=2),
    "four replicas": Plan.data_parallel(range(4), [1.0] * 4, micro_batch=2),
}

# ---- who owns what


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40), st.integers(1, 6))
def test_what_all_hold_is_shared_out_evenly(sizes: list[int], workers: int) -> None:
    """To within the largest parameter."""
    names = [str(number) for number in range(len(sizes))]
    replica_groups = {name: [tuple(range(workers))] for name in names}
    owners = assign_owners(replica_groups, {name: [size] for name, size in zip(names, sizes, strict=True)})
    assert list(owners) == names
    loads = [sum(size for name, size in zip(names, sizes, strict=True) if owners[name] == (w,)) for w in range(workers)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


@given(st.data())
def test_each_circle_has_an_owner_of_its_own(data: st.DataObject) -> None:
    member = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(tuple)
    replica_groups = data.draw(st.dictionaries(st.text("abcdef", min_size=1), st.lists(member, min_size=1, max_size=3)))
    sizes = {name: [data.draw(st.integers(0, 100)) for _ in own] for name, own in replica_groups.items()}
    owners = assign_owners(replica_groups, sizes)
    assert owners.keys() == replica_groups.keys()
    for name, own in replica_groups.items():
        assert all(owner in members for owner, members in zip(owners[name], own, strict=True))


def test_what_one_has_anyway_counts() -> None:
    assert assign_owners({"a": [(0, 1)], "b": [(0,)]}, {"a": [1], "b": [5]}) == {"a": (1,), "b": (0,)}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["float32", "float64"]), st.integers(0, 1 << 19))))
def test_a_bucket_is_of_one_owner_and_type_and_complete_when_its_turn_comes(
    parameters: list[tuple[int, str, int]],
) -> None:
    names = [str(number) for number in range(len(parameters))]
    specs = {name: TensorSpec(dtype, (size,)) for name, (_, dtype, size) in zip(names, parameters, strict=True)}
    owner_of = {name: owner or None for name, (owner, _, _) in zip(names, parameters, strict=True)}
    found = buckets_by_owner(names, specs, owner_of.__getitem__)
    assert Counter(name for bucket in found for name in bucket.names) == Counter(names)
    for bucket in found:
        assert {owner_of[name] for name in bucket.names} == {bucket.owner}
        assert len({specs[name].dtype for name in bucket.names}) == 1
    ends = [names.index(bucket.names[-1]) for bucket in found]
    assert ends == sorted(ends)


# ---- routines, played


def both(made: Plan, size: int, **options: Any) -> tuple[Lowered, Played, Lowered, Played]:
    """Return a batch lowered and played, with replicated and with shared out states."""
    plain, shared = lower(made, size, **options), lower(replace(made, optimizer="sharded"), size, **options)
    chance = random.Random(size)
    return plain, play(plain, batch(size)), shared, play(shared, batch(size), turn=chance.choice)


@pytest.mark.parametrize("name", [*PLANS, *MORE])
def test_an_owner_steps_with_what_all_would_and_the_others_have_it_from_there(name: str) -> None:
    _, replicated, shared, played = both((PLANS | MORE)[name], 8)
    assert played.losses == replicated.losses
    before = {key: tensor for key, tensor in state_of(build()).items() if key in shared.trained}
    for key in shared.trained:
        stepping = [worker for worker, found in played.gradients.items() if key in found]
        assert stepping == [shared.holdings.owners[key][0]], "one of those who hold it"
        gradient = played.gradients[stepping[0]][key]
        assert torch.equal(gradient, replicated.gradients[stepping[0]][key])
        for worker in shared.holdings.holders[key]:
            assert torch.equal(played.state[worker][key], before[key] - gradient)
    assert played.left == replicated.left


@pytest.mark.parametrize("name", ["two replicas", "three replicas", "two by two", "one by two", "one device"])
def test_the_norm_for_clipping_is_that_of_all_gradients(name: str) -> None:
    _, replicated, shared, played = both((PLANS | MORE)[name], 8, max_norm=0.5)
    gradients = {key: tensor for found in replicated.gradients.values() for key, tensor in found.items()}
    square = math.fsum(float(tensor.square().sum()) for tensor in gradients.values())
    stepping = [w for w in shared.plan.devices if any(isinstance(s, OptimizerStep) for s in steps_of(shared, w))]
    assert len(shared.plan.devices) == 1 or sorted(played.norms) == sorted(stepping)
    assert all(norm == pytest.approx(square, rel=1e-12) for norm in played.norms.values())


def test_nobody_gets_sums_that_it_does_not_step() -> None:
    lowered = lower(replace(MORE["three replicas"], optimizer="sharded"), 8)
    members = lowered.plan.devices
    for worker in members:
        sums = [s for s in steps_of(lowered, worker) if isinstance(s, Reduce) and s.buffers[0] in trained_sums(lowered)]
        got = {number for s in sums if members[s.root] == worker for number in s.buffers}
        stepped = lowered.holdings.stepped_by(worker, lowered.trained)
        assert got == {lowered.gradients.sums[name] for name in stepped}
        assert all(step.root >= 0 for step in sums)
        handed = [n for s in steps_of(lowered, worker) if isinstance(s, Broadcast) for n in s.buffers]
        assert sorted(handed) == sorted(lowered.numbers.state[name] for name in lowered.trained)


def trained_sums(lowered: Lowered) -> set[int]:
    return set(lowered.gradients.sums.values())


# ---- hosts

HOSTS = ((0, 1), (2, 3))


def ways(members: Members, *parts: Members) -> dict[Members, tuple[AllReduceAlgorithm, ...]]:
    """Return that a group sums up in parts first, whatever the size."""
    return {
        members: (
            AllReduceAlgorithm((members,), TransferTime(1.0, 1.0)),
            AllReduceAlgorithm(parts, TransferTime(0.1, 0.1)),
        )
    }


@pytest.mark.parametrize(
    ("made", "members", "parts"),
    [
        (MORE["four replicas"], (0, 1, 2, 3), HOSTS),
        (MORE["three replicas"], (2, 0, 1), ((2,), (0, 1))),
        (plan(stage("ab", 0, 1, 2), stage("cd", 1, 0)), (0, 1, 2), ((0, 1), (2,))),
        (plan(stage("ab", 0, 1, 2, 3), stage("cd", 4, 5), schedule="zb-h1"), (0, 1, 2, 3), HOSTS),
    ],
    ids=["two hosts of two", "one and two", "a part that sums by itself, too", "stages"],
)
def test_sums_in_each_host_first_are_those_of_one_ring(made: Plan, members: Members, parts: Sequence[Members]) -> None:
    flat, near = lower(made, 12), lower(made, 12, ways=ways(members, *parts))
    assert near.holdings.ways
    expected = play(flat, batch(12))
    for seed in range(3):
        played = play(near, batch(12), turn=random.Random(seed).choice)
        assert played.left == expected.left
        for worker, gradients in expected.gradients.items():
            for name, gradient in gradients.items():
                torch.testing.assert_close(played.gradients[worker][name], gradient, rtol=0, atol=1e-13)
                first = near.holdings.replica_groups[name][0][0]
                assert torch.equal(played.gradients[worker][name], played.gradients[first][name])


@pytest.mark.parametrize(
    ("made", "members", "parts"),
    [
        (MORE["four replicas"], (0, 1, 2, 3), HOSTS),
        (MORE["three replicas"], (2, 0, 1), ((2,), (0, 1))),
        (plan(stage("ab", 0, 1, 2, 3), stage("cd", 4, 5)), (0, 1, 2, 3), HOSTS),
    ],
    ids=["two hosts of two", "one and two", "stages"],
)
def test_a_group_that_always_sums_in_parts_does_nothing_else_as_a_whole(
    made: Plan, members: Members, parts: Sequence[Members]
) -> None:
    """Sums of buffers that change with the data go in parts, too."""
    only = {members: ways(members, *parts)[members][1:]}
    flat, near = lower(made, 12), lower(made, 12, ways=only)
    assert near.holdings.always_in_parts(members) and not flat.holdings.always_in_parts(members)
    names = list(near.trained)
    assert members in flat.holdings.groups(names, ())
    found = near.holdings.groups(names, ())
    assert {*subgroups(only[members])} <= {*found}
    summing = {
        step.group for worker in members for step in steps_of(near, worker) if isinstance(step, Reduce | Broadcast)
    }
    assert near.numbers.groups.get(members) not in summing
    expected, played = play(flat, batch(12)), play(near, batch(12))
    assert played.left == expected.left
    for worker, state in expected.state.items():
        for name, tensor in state.items():
            torch.testing.assert_close(played.state[worker][name], tensor, rtol=0, atol=1e-12)


def test_a_group_with_owners_is_formed_whole() -> None:
    made, members = replace(MORE["four replicas"], optimizer="sharded"), (0, 1, 2, 3)
    near = lower(made, 12, ways={members: ways(members, *HOSTS)[members][1:]})
    assert near.holdings.owners
    assert members in near.holdings.groups(near.trained, ())


def test_a_broadcast_to_all_goes_through_the_first_of_each_part() -> None:
    members = (0, 1, 2, 3, 4)
    parts = ((0, 1), (2, 3), (4,))
    flat = lower(MORE["four replicas"], 12).holdings
    near = lower(MORE["four replicas"], 12, ways={members: ways(members, *parts)[members][1:]}).holdings
    assert flat.broadcast_groups(1, members) == [members]
    through = {worker: near.broadcast_groups(worker, members) for worker in members}
    leaders = (0, 2, 4)
    assert through == {0: [leaders, (0, 1)], 1: [(0, 1)], 2: [leaders, (2, 3)], 3: [(2, 3)], 4: [leaders]}


def far_bytes(lowered: Lowered, hosts: Sequence[Members]) -> float:
    """Return the bytes of gradients that cross from host to host: in rings, and to the first of a part."""
    host = {worker: number for number, members in enumerate(hosts) for worker in members}
    groups = {number: members for members, number in lowered.numbers.groups.items()}
    specs = {lowered.gradients.sums[name]: lowered.gradients.specs[name] for name in lowered.trained}
    total = 0.0
    for worker in lowered.plan.devices:
        for step in steps_of(lowered, worker):
            if isinstance(step, Reduce | Broadcast) and set(step.buffers) <= set(specs):
                members = groups[step.group]
                size_bytes = sum(specs[number].size_bytes for number in step.buffers)
                after = members[(members.index(worker) + 1) % len(members)]
                if step.root < 0:  # to the next one of the ring
                    crossing = host[after] != host[worker]
                    total += crossing * 2 * (len(members) - 1) / len(members) * size_bytes
                elif isinstance(step, Reduce):
                    total += (host[members[step.root]] != host[worker]) * size_bytes
                elif members[step.root] == worker:
                    total += sum(host[other] != host[worker] for other in members) * size_bytes
    return total


def test_less_crosses_from_host_to_host() -> None:
    members = (0, 1, 2, 3)
    flat, near = lower(MORE["four replicas"], 8), lower(MORE["four replicas"], 8, ways=ways(members, *HOSTS))
    size_bytes = sum(flat.gradients.specs[name].size_bytes for name in flat.trained)
    assert far_bytes(flat, HOSTS) == pytest.approx(2 * 1.5 * size_bytes)
    assert far_bytes(near, HOSTS) == pytest.approx(2 * 1.0 * size_bytes)


def test_a_bucket_goes_the_way_that_is_quicker_for_its_size() -> None:
    """One that is quicker for large sums only is not taken for small ones."""
    members = (0, 1, 2, 3)
    late = {
        members: (
            AllReduceAlgorithm((members,), TransferTime(0.0, 1.0)),
            AllReduceAlgorithm(HOSTS, TransferTime(1e6, 0.5)),
        )
    }
    holdings = lower(MORE["four replicas"], 8, ways=late).holdings
    assert holdings.parts(members, 1 << 10) == (members,)
    assert holdings.parts(members, 1 << 30) == HOSTS
    assert holdings.parts((0, 1), 1 << 30) == ((0, 1),)


def pool(hosts: Sequence[Members], link: Link | None) -> tuple[Any, LinkMap]:
    """Return the devices and links of a pool whose hosts are joined by emulated links."""
    host = {worker: number for number, members in enumerate(hosts) for worker in members}
    pairs = {(a, b): link for a in host for b in host if host[a] != host[b]} if link else {}
    return [SimpleNamespace(number=worker, host="localhost") for worker in sorted(host)], pairs


def test_ways_are_found_by_the_links_that_are_known() -> None:
    slow = Link(latency_s=1e-3, bandwidth_bps=1e7)
    found = find_reductions(*pool(HOSTS, slow), [(0, 1, 2, 3), (0, 1), (0, 1, 2, 3)])
    assert list(found) == [(0, 1, 2, 3)]
    assert [way.parts for way in found[0, 1, 2, 3]] == [HOSTS], "one ring is slower for sums of any size"
    assert subgroups(found[0, 1, 2, 3]) == [(0, 1), (2, 3), (0, 2)]
    assert group_leaders(HOSTS) == (0, 2)
    assert find_reductions(*pool(HOSTS, None), [(0, 1, 2, 3)]) == {}, "nothing is known to be slow"
    assert find_reductions(*pool([(0,), (1,), (2,)], slow), [(0, 1, 2)]) == {}, "each is a host"


@pytest.mark.parametrize(
    ("hosts", "device", "plain_links", "parts"),
    [
        (HOSTS, "cpu", False, HOSTS),
        (HOSTS, "cpu", True, HOSTS),
        (((0, 3), (1, 2)), "cpu", False, ((0, 3), (1, 2))),
        (((0,), (1,), (2, 3)), "cpu", False, ((0,), (1,), (2, 3))),
        (((0,), (1,), (2,), (3,)), "cpu", False, None),
        (((0, 1, 2, 3),), "cpu", False, None),
        (HOSTS, "cuda:0", False, HOSTS),
        (HOSTS, "cuda:0", True, None),
    ],
    ids=[
        "two hosts",
        "two hosts, plain links",
        "in turn",
        "some hosts of one",
        "all hosts of one",
        "one host",
        "GPUs, encrypted links",
        "GPUs, perhaps by NCCL",
    ],
)
def test_each_host_sums_first_where_no_link_was_measured(
    hosts: Sequence[Members], device: str, plain_links: bool, parts: Sequence[Members] | None
) -> None:
    of = {worker: f"never-measured-{number}" for number, own in enumerate(hosts) for worker in own}
    card: dict[str, Any] = {"device": device, "name": "", "threads": 1, "memory_bytes": 1 << 30}
    devices = [DeviceInfo(number=worker, host=of[worker], **card) for worker in sorted(of)]
    found = find_reductions(devices, {}, [(0, 1, 2, 3)], plain_links=plain_links)
    assert {members: [way.parts for way in own] for members, own in found.items()} == (
        {(0, 1, 2, 3): [parts]} if parts else {}
    )


@pytest.mark.parametrize("plain_links", [False, True], ids=["encrypted", "plain"])
def test_measurements_of_encrypted_and_of_plain_links_are_not_mixed_up(plain_links: bool) -> None:
    """Links that are as quick as memory are known of one kind of connections: one ring is taken there alone."""
    numbers, own = range(4), f"links-{plain_links}"
    card: dict[str, Any] = {"device": "cpu", "name": "", "threads": 1, "memory_bytes": 1 << 30}
    devices = [DeviceInfo(number=number, host=f"{own}-{number // 2}", **card) for number in numbers]
    assert store(profile_key(devices, {}, plain_links=plain_links), between(4e9, "aabb"))
    members = tuple(numbers)
    assert find_reductions(devices, {}, [members], plain_links=plain_links) == {}
    (way,) = find_reductions(devices, {}, [members], plain_links=not plain_links)[members]
    assert way.parts == HOSTS
    assert known_links(devices, {}, plain_links=plain_links) is not None
    assert known_links(devices, {}, plain_links=not plain_links) is None
    assert not forecast_job(devices, nn.Linear(3, 2), plain_links).compiler(MORE["four replicas"]).holdings.ways
    assert forecast_job(devices, nn.Linear(3, 2), not plain_links).compiler(MORE["four replicas"]).holdings.ways


def forecast_job(devices: Sequence[DeviceInfo], model: nn.Module, plain_links: bool = False) -> TrainingJob:
    """Return the training of a model of three inputs and two outputs, of which no worker knows."""
    trained = {f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    spec = CaptureSpec(
        model=model,
        loss=nn.functional.mse_loss,
        metrics={},
        precision="fp32",
        device_type="cpu",
        trained=frozenset(trained),
    )
    return TrainingJob(
        captures=Captures(spec),
        optimizer=torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1),
        batch=as_batch(torch.zeros(8, 3), torch.zeros(8, 2)),
        devices=devices,
        plain_links=plain_links,
    )


@pytest.mark.parametrize(
    ("optimizer", "norm", "groups"),
    [
        ("replicated", False, {(0, 1), (2, 3), (0, 2)}),
        ("sharded", False, {(0, 1, 2, 3)}),
        ("sharded", True, {(0, 1, 2, 3), (0, 1), (2, 3), (0, 2)}),
    ],
    ids=["replicated", "sharded", "sharded, with statistics"],
)
def test_groups_are_formed_only_for_sums_that_are_made(optimizer: Any, norm: bool, groups: set[Members]) -> None:
    """Sums for an owner go over all at once, those of statistics in each host first."""
    card: dict[str, Any] = {"device": "cpu", "name": "", "threads": 1, "memory_bytes": 1 << 30}
    devices = [DeviceInfo(number=number, host=f"unknown-{number // 2}", **card) for number in range(4)]
    model = nn.Sequential(nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Linear(4, 2))
    found = forecast_job(devices, model).compiler(replace(MORE["four replicas"], optimizer=optimizer))
    assert set(found.groups) == groups | {(0, 1, 2, 3)}, "all of them vote on each step"
