"""Whether hosts have the memory for what waits there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.engine.memory.forecast import MemoryForecast
from onebox.engine.memory.limits import host_shortage
from onebox.engine.problem.memory_search import search_within
from onebox.errors import DeviceMemoryError, PlanError
from onebox.plan import Plan
from onebox.pool import DeviceInfo
from tests.unit.plan.policies.test_apply import alone


def device(number: int, *, host: str = "one", may: int = 0, free: int = 0, kind: str = "cuda:0") -> DeviceInfo:
    return DeviceInfo(
        number=number,
        host=host,
        device=kind,
        name="a GPU",
        threads=1,
        memory_bytes=1 << 30,
        host_bytes=may,
        host_free_bytes=free,
    )


def test_each_device_has_a_bound_of_its_own() -> None:
    found = {0: 24_500, 1: 16_000}
    assert host_shortage(found, [device(0, may=24_500), device(1, may=16_000)]) is None
    lack = host_shortage(found, [device(0, may=24_499), device(1, may=16_000)])
    assert lack is not None
    assert (lack.device.number, lack.needed_bytes, lack.allowed_bytes, lack.together) == (0, 24_500, 24_499, False)
    assert "device 0 may take there" in str(lack)
    error = lack.error()
    assert isinstance(error, DeviceMemoryError)
    assert (error.worker, error.asked_bytes, error.allowed_bytes) == (0, 24_500, 24_499)
    assert "no step was begun" in str(error)


def test_the_devices_of_a_host_share_what_it_has() -> None:
    found = {0: 8_000, 1: 8_000, 2: 8_000}
    hosts = [device(0, free=16_000), device(1, free=16_000), device(2, host="other", free=8_000)]
    assert host_shortage(found, hosts) is None
    lack = host_shortage(found, [replace(one, host="one") for one in hosts])
    assert lack is not None
    assert (lack.needed_bytes, lack.allowed_bytes, lack.together) == (24_000, 8_000, True)
    assert "all its devices" in str(lack)
    assert host_shortage(found, [replace(one, host="one", device="sim") for one in hosts]) is None, "it keeps nothing"


def test_a_search_finds_what_needs_no_memory_of_the_host() -> None:
    """All that waits there is refused: what is found is recomputed. Where nothing else fits, it says what lacked."""
    problem = replace(alone(7, 0.5), updates=("device", "host"))

    def exact(plan: Plan) -> MemoryForecast:
        waits = plan.update == "host" or any(stage.policy in ("offload", "swap") for stage in plan.stages)
        assert plan.predicted is not None
        return MemoryForecast({0: plan.predicted.peak_bytes[0]}, "the host is full" if waits else "")

    _, plan = search_within(problem, exact, 3600.0)
    assert plan.update == "device"
    assert {stage.policy for stage in plan.stages} == {"keep", "recompute"}
    with pytest.raises(PlanError, match="the host is full"):
        search_within(replace(problem, policies=("keep", "swap", "offload")), exact, 3600.0)


@pytest.mark.parametrize("count_s", [0.1, 1.0, 20.0])
def test_a_search_begins_nothing_after_its_budget_once_something_fits(count_s: float) -> None:
    """Counting a plan takes as long as here it is said to, and nothing else takes any time."""
    problem, now, begun = replace(alone(7, 0.5), updates=("device", "host")), [0.0], list[tuple[float, bool]]()
    fitting: list[bool] = []

    def exact(plan: Plan) -> MemoryForecast:
        begun.append((now[0], bool(fitting)))
        now[0] += count_s
        assert plan.predicted is not None
        peak = plan.predicted.peak_bytes[0]  # so much less than is estimated that it is sought once more
        fitting.append(True)
        return MemoryForecast({0: peak * 2 // 3}, "")

    _, plan = search_within(problem, exact, 2.0, lambda: now[0])
    assert plan.predicted is not None
    assert begun
    assert all(start < 2.0 for start, fits in begun if fits)
