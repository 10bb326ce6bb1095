"""Profiles as data: what cannot be is refused, whatever is JSON comes back."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from onebox.cost import DeviceProfile, PoolProfile, Speeds, link_age_line
from onebox.plan.model.work import Links

SPEEDS = Speeds(call_s=5e-6, operator_s=2e-6, matmul_flops=5e10, pointwise_bps=1e10)
LATENCY = {0: {1: 1e-4, 2: 2e-3}, 1: {0: 1e-4, 2: 2e-3}, 2: {0: 2e-3, 1: 2e-3}}
BANDWIDTH = {0: {1: 4e9, 2: 1e8}, 1: {0: 4e9, 2: 1e8}, 2: {0: 1e8, 1: 1e8}}


def device(number: int, **changed: Any) -> DeviceProfile:
    fields = {
        "number": number,
        "device": "cpu",
        "name": "a processor",
        "host": f"host{number // 2}",
        "threads": 2,
        "memory_bytes": 1 << 30,
        "speed": 1.0,
        "emulated": False,
        "speeds": SPEEDS,
    }
    return DeviceProfile(**(fields | changed))


def profile(**changed: Any) -> PoolProfile:
    fields = {
        "devices": tuple(map(device, range(3))),
        "latency_s": LATENCY,
        "bandwidth_bps": BANDWIDTH,
        "emulated_links": ((0, 2),),
        "groups": (((0, 1), (2,)),),
        "torch": "2.13.0",
        "measured_at": "2026-11-21T04:00:00+00:00",
        "links_at_s": {a: dict.fromkeys(row, 1.8e9) for a, row in LATENCY.items()},
    }
    return PoolProfile(**(fields | changed))


def test_json_and_back() -> None:
    one = profile()
    assert msgspec.json.decode(msgspec.json.encode(one), type=PoolProfile) == one


def test_links_are_as_a_planner_takes_them() -> None:
    found = profile()
    links = Links(latency_s=found.latency_s, bandwidth_bps=found.bandwidth_bps)
    assert links.seconds(0, 2, 10**6) == pytest.approx(2e-3 + 1e-2)


def test_types_of_devices() -> None:
    assert device(0).type == "cpu"
    assert device(0, device="sim").type == "sim"
    card = device(0, device="cuda:1", name="NVIDIA H200")
    assert (card.kind, card.type) == ("cuda", "NVIDIA H200")


def test_hosts_of_a_group() -> None:
    assert profile().host_names((0, 1)) == ("host0",)
    assert profile().host_names((2, 0, 1)) == ("host1", "host0")


@pytest.mark.parametrize(
    "changed",
    [
        {"devices": ()},
        {"devices": (device(0), device(2), device(1))},
        {"devices": (device(0), device(1))},
        {"latency_s": {0: {}, 1: {}}},
        {"latency_s": LATENCY | {2: {0: 2e-3}}},
        {"latency_s": LATENCY | {2: {0: -1.0, 1: 2e-3}}},
        {"latency_s": LATENCY | {2: {0: math.inf, 1: 2e-3}}},
        {"latency_s": LATENCY | {2: {0: 2e-3, 1: 2e-3, 2: 0.0}}},
        {"latency_s": LATENCY | {2: {0: 2e-3, 3: 2e-3}}},
        {"bandwidth_bps": BANDWIDTH | {2: {0: 0.0, 1: 1e8}}},
        {"links_at_s": {0: {}, 1: {}, 2: {}}},
        {"groups": ()},
        {"groups": (((0, 1),),)},
        {"groups": (((0, 1), (1, 2)),)},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_when_it_is_made_and_when_it_is_read(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"device|finite|link|has a row|level"):
        profile(**changed)
    fields = msgspec.to_builtins(profile(), str_keys=True) | msgspec.to_builtins(changed, str_keys=True)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(fields), type=PoolProfile)


@pytest.mark.parametrize("figure", [{"call_s": 0.0}, {"call_s": 1e-6, "matmul_flops": -1.0}, {"call_s": math.nan}])
def test_a_speed_is_positive(figure: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Speeds(**figure)


def test_the_age_of_links_is_that_of_the_oldest_of_each_kind() -> None:
    found = profile()
    assert found.links_between_hosts() == [(0, 2), (1, 2), (2, 0), (2, 1)]
    at_s = {0: {1: 1000.0, 2: 1150.0}, 1: {0: 1000.0, 2: 1170.0}, 2: {0: 1170.0, 1: 1170.0}}
    line = link_age_line(profile(links_at_s=at_s), 1180.0)
    assert line == "links measured between hosts 30 s ago, within a host 3 min ago; --fresh measures all of them anew"
    one_host = profile(devices=tuple(device(number, host="here") for number in range(3)), links_at_s=at_s)
    assert link_age_line(one_host, 1180.0) == "links measured 3 min ago; --fresh measures all of them anew"
    assert "just now" in link_age_line(one_host, 900.0), "a clock that was put back"
    alone = {"devices": (device(0),), "groups": (((0,),),), "emulated_links": ()}
    empty: dict[str, Any] = {name: {0: {}} for name in ("latency_s", "bandwidth_bps", "links_at_s")}
    assert link_age_line(profile(**alone, **empty), 0.0) == ""
