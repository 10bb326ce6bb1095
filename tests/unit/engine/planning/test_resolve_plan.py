"""The plan of a trainer without a request: by the hosts of its devices, and how it is explained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from onebox.engine.planning.make_plan import PlanningResult
from onebox.engine.planning.resolve_plan import cautious, default_plan, explain_choice
from onebox.plan import DeviceSpec, PlanCandidate, Problem, Stage, search
from onebox.pool import DeviceInfo, Pool
from onebox.pool.devices import distinct_hosts
from onebox.trainer_options import DataParallel
from tests.unit.plan.problems import links, segment


def device(number: int, host: str, address: str) -> DeviceInfo:
    return DeviceInfo(
        number=number, host=host, address=address, device="cpu", name="a processor", threads=1, memory_bytes=1 << 30
    )


def devices(*places: tuple[str, str]) -> tuple[DeviceInfo, ...]:
    return tuple(device(number, host, address) for number, (host, address) in enumerate(places))


@pytest.mark.parametrize(
    ("places", "hosts"),
    [
        ([("localhost", "127.0.0.1")] * 2, 1),
        ([("localhost", "127.0.0.1"), ("127.0.0.1:7172", "127.0.0.1")], 1),
        ([("a:1", "127.0.0.1"), ("b:2", "::1")], 1),
        ([("localhost", "10.0.0.5"), ("me", "10.0.0.5")], 1),
        ([("localhost", "10.0.0.5"), ("red", "10.0.0.6")], 2),
        ([("red", "10.0.0.6"), ("red", "10.0.0.6"), ("green", "fe80::1%eth0")], 2),
        ([("red", "red.example"), ("green", "green.example")], 2),
    ],
)
def test_hosts_and_the_default_plan(places: list[tuple[str, str]], hosts: int) -> None:
    found = devices(*places)
    assert len(distinct_hosts(found)) == hosts
    assert sorted(number for own in distinct_hosts(found).values() for number in own) == list(range(len(places)))
    pool = cast(Pool, type("Devices", (), {"devices": found}))
    assert default_plan(pool) == ("auto" if hosts > 1 else DataParallel())


def planned(bandwidth_bps: float, **changed: Any) -> PlanningResult:
    problem = Problem(
        segments=(segment("whole", 1e-3, state=4_000_000),),
        devices=tuple(DeviceSpec(number=number, type="quick") for number in range(2)),
        links=links(2, latency_s=1e-4, bandwidth_bps=bandwidth_bps),
        batch=64,
        micro_batches=(16, 32, 64),
    )
    problem = replace(problem, **changed)
    result = search(problem, budget_s=3600.0, effort=20_000)
    return PlanningResult(plan=result.plan, result=result, problem=problem, profile=cast(Any, None))


def test_the_choice_is_explained_in_a_line() -> None:
    pair = devices(("red", "10.0.0.1"), ("green", "10.0.0.2"))
    slow = explain_choice(planned(1.2e6), pair)
    assert slow.startswith("2 hosts joined at 9.6 Mbit/s: plan auto, 1 stage on device 0, micro-batches of ")
    assert slow.endswith("; data parallel would take 4.8 times as long")
    quick = explain_choice(planned(1e9), pair)
    assert quick.startswith("2 hosts joined at 8 Gbit/s: plan auto, 1 stage, 2 replicas")
    assert quick.endswith(", which is data parallel")
    alone = planned(1.2e6)
    candidates = tuple(one for one in alone.result.candidates if not one.label.startswith("data"))
    without = replace(alone, result=replace(alone.result, candidates=candidates))
    assert explain_choice(without, pair).endswith("; data parallel does not fit")


@pytest.mark.parametrize(("bandwidth_bps", "used"), [(1e9, (0, 1)), (1.2e6, (0,))])
def test_by_default_a_plan_over_two_hosts_is_taken_where_it_gains_a_tenth(
    bandwidth_bps: float, used: tuple[int, ...]
) -> None:
    pair, found = devices(("red", "10.0.0.1"), ("green", "10.0.0.2")), planned(bandwidth_bps)
    assert cautious(found, pair).plan.devices == used == found.plan.devices


@pytest.mark.parametrize(("gain", "used"), [(0.05, (0,)), (0.15, (0, 1))])
def test_a_small_gain_is_not_worth_a_link(gain: float, used: tuple[int, ...]) -> None:
    pair, found = devices(("red", "10.0.0.1"), ("green", "10.0.0.2")), planned(1e9)
    near = next(one for one in found.result.candidates if one.plan.devices == (0,))
    assert found.plan.predicted is not None
    predicted = msgspec.structs.replace(found.plan.predicted, step_s=(1 - gain) * near.step_s)
    chosen = replace(found, plan=msgspec.structs.replace(found.plan, predicted=predicted))
    assert cautious(chosen, pair).plan.devices == used
    assert cautious(chosen, devices(("red", "10.0.0.1"), ("red", "10.0.0.1"))).plan.devices == (0, 1)


def test_a_split_plan_of_one_host_has_to_gain_enough_over_whole_layers() -> None:
    hosts, found = devices(("red", "10.0.0.1"), ("red", "10.0.0.1"), ("green", "10.0.0.2")), planned(1e9)
    assert found.plan.predicted is not None

    def taking(step_s: float, *replicas: tuple[int, ...]) -> PlanCandidate:
        assert found.plan.predicted is not None
        stage = Stage(replicas=replicas, shares=(1.0,) * len(replicas))
        predicted = msgspec.structs.replace(found.plan.predicted, step_s=step_s)
        plan = msgspec.structs.replace(found.plan, stages=(stage,), micro_batch=1, predicted=predicted)
        return PlanCandidate(label=str(replicas), plan=plan)

    for split_s, replica in ((0.97, (0,)), (0.93, (0, 1))):
        candidates = taking(0.92, (0,), (2,)), taking(split_s, (0, 1)), taking(1.0, (0,))
        chosen = replace(found, plan=candidates[0].plan, result=replace(found.result, candidates=candidates))
        assert cautious(chosen, hosts).plan.stages[0].replicas == (replica,)
