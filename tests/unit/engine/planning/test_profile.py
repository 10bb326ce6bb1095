"""Profiles of models: the devices and sizes that are measured, and the order in which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.engine.planning import profile
from onebox.engine.planning.partial_profile import TimeLimit
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


class Counted:
    """A format whose first step takes a while, and whose slices take as long as a step."""

    def __init__(self, clock: list[float], log: list[str], name: str, step_s: float) -> None:
        self.clock, self.log, self.name, self.step_s = clock, log, name, step_s
        self.enough = self.cut = False
        self.set_up_s = 0.0

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(f"close {self.name}")

    def _take(self, what: str, limit: TimeLimit) -> None:
        if limit.over:
            self.cut = self.enough = True
        else:
            self.clock[0] += self.step_s
            self.log.append(f"{what} {self.name}")

    def first_step(self, limit: TimeLimit, set_up_s: float) -> None:
        self.set_up_s = 0.5
        self._take(f"first after {set_up_s}", limit)

    def warm_up(self, limit: TimeLimit) -> None:
        self._take("warm up", limit)

    def slice(self, limit: TimeLimit) -> None:
        self._take("slice", limit)

    def evaluate(self) -> None:
        self.log.append(f"evaluate {self.name}")


ORDER = ["first after 0.0 a", "first after 0.5 b", "warm up a", "warm up b", "slice a", "slice b", "slice a", "slice b"]


@pytest.mark.parametrize("units", range(len(ORDER)))
def test_all_sizes_have_a_first_step_before_any_has_another(units: int) -> None:
    clock, log = [0.0], list[str]()
    formats = [Counted(clock, log, name, 1.0) for name in "ab"]
    limit = TimeLimit(units, lambda: clock[0])
    profile._train(formats, limit, limit, 0.0)  # type: ignore[arg-type]
    assert log == [*ORDER[:units], "evaluate a", "evaluate b", "close b", "close a"]


def test_without_a_limit_no_first_step_is_executed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_PATIENCE_S", 0.0)
    clock, log = [0.0], list[str]()
    profile._train([Counted(clock, log, "a", 1.0)], TimeLimit(), TimeLimit(), 0.0)  # type: ignore[list-item]
    assert log == ["warm up a", "evaluate a", "close a"]


def test_first_steps_may_use_the_time_of_other_sizes() -> None:
    clock, log = [0.0], list[str]()
    share, whole = TimeLimit(1.0, lambda: clock[0]), TimeLimit(3.0, lambda: clock[0])
    profile._train([Counted(clock, log, name, 1.0) for name in "ab"], share, whole, 0.25)  # type: ignore[misc]
    assert log[:2] == ["first after 0.25 a", "first after 0.5 b"] and "warm up a" not in log
