"""A CPU at a fraction of its speed: what it computes takes longer, what it waits for does not."""

from __future__ import annotations

import time

import pytest
import torch

from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Call, Free, OptimizerStep
from onebox.wire.protocol.requests import Define, OptimizerSpec
from onebox.worker.device import ComputeDevice
from onebox.worker.execution import throttled
from tests.unit.machines import Rig, define, elementwise

SPEC = TensorSpec("float64", (2,))
X = torch.tensor([1.0, -2.0], dtype=torch.float64)
WORK_NS, WAIT_NS = 1_000, 50_000
"""How long each instruction works, and waits for others, on the clock of the tests."""


class Clock:
    """A clock that goes on with work and waits only, and for how long it was to sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.slept_ns: list[int] = []
        self.waiting: list[bool] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def rig(self, speed: float) -> Rig:
        """Return a worker with a program and an optimizer, whose inputs have to be waited for."""
        rig = Rig(device=ComputeDevice("cpu", 1, speed))
        rig.put(b1=X, b2=X)
        sgd = OptimizerSpec("SGD", (((0,), {"lr": 1.0}),), (2,))
        rig.do(define(5, elementwise("aten.relu.default", SPEC)), Define(6, sgd))
        plain, progress = rig.machine.store.get, rig.machine.progress

        def get(number: int) -> torch.Tensor:
            self.now_ns += WORK_NS
            with progress.wait():
                with progress.wait():
                    self.now_ns += WAIT_NS
                self.now_ns += WAIT_NS
            return plain(number)

        def sleep_until(end_ns: int) -> None:
            self.slept_ns.append(end_ns - self.now_ns)
            self.waiting.append(progress.waiting)

        self._monkeypatch.setattr(throttled, "sleep_until", sleep_until)
        self._monkeypatch.setattr(rig.machine.store, "many", lambda numbers: [get(number) for number in numbers])
        return rig


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(("speed", "more_ns"), [(0.5, 1_000), (0.25, 3_000), (0.001, 999_000)])
def test_work_takes_so_much_longer_and_waits_do_not(clock: Clock, speed: float, more_ns: int) -> None:
    rig = clock.rig(speed)
    assert clock.slept_ns == []
    rig.do(Call(5, (1,), (3,)), Free((9,)))
    assert clock.slept_ns == [more_ns]
    assert clock.waiting == [True], "or it would be taken for one that hangs"
    assert not rig.machine.progress.waiting
    assert torch.equal(rig.get(3), X.relu()), "and it computes all the same"


def test_steps_of_optimizers_are_throttled(clock: Clock) -> None:
    rig = clock.rig(0.5)
    rig.do(OptimizerStep(6, (1,)))
    assert len(clock.slept_ns) == 1
    assert torch.equal(rig.get(2), X - X)


def test_a_cpu_at_full_speed_never_sleeps(clock: Clock) -> None:
    clock.rig(1.0).do(Call(5, (1,), (3,)))
    assert clock.slept_ns == []
