"""Profiles of models: the devices and sizes that are measured."""

from __future__ import annotations

from dataclasses import replace

from onebox.engine.planning.profile import measured_devices
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
