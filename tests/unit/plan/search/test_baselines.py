"""Baseline plans: each row of several devices is a plan that uses every one of them, or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan import Plan, PlanCandidate, predict, search
from onebox.plan.model.problem import DeviceSpec, Problem
from onebox.plan.search.baselines import DATA_PARALLEL
from tests.unit.plan.problems import links, segment

HOUR_S = 3600.0
EFFORT = 20_000


def problem(
    devices: int, batch: int, sizes: Iterable[int], *, bandwidth_bps: float = 1e9, kinds: tuple[str, ...] = ("quick",)
) -> Problem:
    """Return a problem of two segments of 1 ms a sample, with gradients of 1 MB each."""
    return Problem(
        segments=tuple(segment(name, 1e-3, state=4_000_000) for name in ("one", "two")),
        devices=tuple(DeviceSpec(number=number, type=kinds[number % len(kinds)]) for number in range(devices)),
        links=links(devices, latency_s=1e-3, bandwidth_bps=bandwidth_bps),
        batch=batch,
        micro_batches=tuple(sizes),
    )


def rows(given: Problem) -> dict[str, PlanCandidate]:
    """Return the baseline plans of several devices."""
    found = search(given, budget_s=HOUR_S, effort=EFFORT).candidates
    return {one.label: one for one in found if one.label.startswith((DATA_PARALLEL, "even cuts"))}


def working(plan: Plan, batch: int) -> set[int]:
    """Return the devices to which samples go."""
    return {device for route in plan.routes(batch) for replica in route for device in replica}


@given(st.integers(2, 5), st.integers(1, 40), st.sets(st.integers(1, 40), min_size=1), st.booleans())
@settings(max_examples=40)
def test_each_row_of_several_devices_uses_every_one_or_says_why_it_cannot(
    devices: int, batch: int, sizes: set[int], uneven: bool
) -> None:
    allowed = sorted(size for size in sizes if size <= batch) or [batch]
    found = rows(problem(devices, batch, allowed, kinds=("quick", "slow") if uneven else ("quick",)))
    for label, row in found.items():
        used = working(row.plan, batch)
        if label.startswith("even cuts"):
            assert len(used) == 2
            assert (f"over 2 of {devices} devices" in label) == (devices > 2)
        elif row.refused:
            (idle,) = [number for number in range(devices) if row.refused == f"device {number} would have no samples"]
            assert idle not in used
        else:
            assert used == set(range(devices))


def test_data_parallel_over_a_slow_link_pays_for_it() -> None:
    """Its one micro-batch of all samples lay on one device, at no cost, and the row was as quick as that device."""
    given = problem(2, 64, (16, 32, 64), bandwidth_bps=4e6)
    known = {one.label: one for one in search(given, budget_s=HOUR_S, effort=EFFORT).candidates}
    row = known[f"{DATA_PARALLEL}, equal shares"]
    assert known["device 0 alone"].step_s < row.step_s
    assert row.plan.micro_batch in (None, 32), "of samples for both"
    by_hand = Plan.data_parallel((0, 1), (0.5, 0.5))
    assert row.step_s == pytest.approx(predict(given, by_hand)[0].step_s, rel=0.02)
    assert row.step_s > 64 / 2 * 6e-3 + 0.9 * 2e6 / 4e6, "the work of half of the samples, and the sum of gradients"


def test_no_plan_has_a_device_without_samples() -> None:
    result = search(problem(3, 4, (4,)), budget_s=HOUR_S, effort=EFFORT)
    assert working(result.plan, 4) == set(result.plan.devices)
    refused = rows(problem(3, 2, (1, 2)))[f"{DATA_PARALLEL}, equal shares"].refused
    assert refused == "device 2 would have no samples"
