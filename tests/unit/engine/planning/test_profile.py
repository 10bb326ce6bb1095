"""Profiles of models: the devices that are measured, and the quantiles of the machine's slowdown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.cost.model_profile import SegmentTimes, Slowdown
from onebox.engine.planning.profile import measured_devices
from onebox.engine.planning.trace_times import at_median
from onebox.engine.problem.planner_problem import allowed_sizes, measured_sizes
from onebox.pool import DeviceInfo

CARD = DeviceInfo(number=0, host="lab1", device="cuda:0", name="a card", threads=1, memory_bytes=1 << 30)


def devices(*hosts: str, **changed: object) -> list[DeviceInfo]:
    return [replace(CARD, number=number, host=host, **changed) for number, host in enumerate(hosts)]  # type: ignore[arg-type]


def test_devices_that_are_alike_are_measured_on_one_host() -> None:
    assert measured_devices(devices("lab1", "lab2", "lab1", "lab3")) == [0, 2]


def test_this_host_goes_first() -> None:
    assert measured_devices(devices("lab1", "localhost", "lab2")) == [1]


def test_each_kind_of_device_is_measured() -> None:
    cards = devices("lab1", "lab1", "lab2", "lab2")
    cards[2] = replace(cards[2], name="another card")
    cards[3] = replace(cards[3], device="cpu", name="a processor")
    assert measured_devices(cards) == [0, 1, 2, 3]
    cards[3] = replace(cards[3], threads=4)
    assert measured_devices([*cards, replace(cards[3], number=4, threads=1)]) == [0, 1, 2, 3, 4]


def test_a_device_that_computes_nothing_is_not_measured() -> None:
    assert measured_devices(devices("localhost", "localhost", device="sim")) == []


def test_two_sizes_of_micro_batches_are_measured() -> None:
    assert measured_sizes(256, allowed_sizes(256)) == (8, 256), "32 micro-batches and one"
    assert measured_sizes(8, allowed_sizes(8, [2, 4, 8])) == (2, 8)
    assert measured_sizes(1, allowed_sizes(1)) == (1,)


def test_times_are_those_of_the_median_slowdown_and_its_quantiles_need_enough_slices() -> None:
    undisturbed = SegmentTimes(size=1, seconds=((1.0, 2.0, 3.0),), update_s=0.5, call_s=0.25)
    found = at_median(undisturbed, [1.0 + n / 8 for n in range(11)])
    assert found.seconds == ((1.625, 3.25, 4.875),)
    assert found.slowdown == Slowdown(low=1.125, median=1.625, high=2.125, slices=11)
    assert (found.update_s, found.call_s) == (0.5, 0.25)
    few = at_median(undisturbed, [1.0, 2.0, 4.0])
    assert (few.seconds, few.slowdown) == (((2.0, 4.0, 6.0),), None)


@pytest.mark.parametrize("factor", [1.1, 1.2, 1.3, 1.7])
def test_equal_slowdowns_have_equal_quantiles_whatever_their_rounding(factor: float) -> None:
    undisturbed = SegmentTimes(size=1, seconds=((1.0, 2.0, 3.0),), update_s=0.5, call_s=0.25)
    found = at_median(undisturbed, [factor] * 12).slowdown
    assert found is not None
    assert found.low == pytest.approx(factor) == found.high
