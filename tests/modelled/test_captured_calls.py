"""Calls of captured programs by a worker's executor, on a modelled accelerator."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from onebox.wire import Operator, Program, SlotArgument, TensorSpec, with_deaths
from onebox.wire.protocol.instructions import Call, Free
from onebox.wire.protocol.requests import Define, Put, Routine, Run, SetNumerics
from onebox.worker.device import ComputeDevice
from tests.kit.accelerator import ModelAccelerator
from tests.unit.machines import Rig, define

SPEC = TensorSpec("float64", (8, 64))
X = torch.arange(512, dtype=torch.float64).view(8, 64) / 512
STEPS = 5


@pytest.fixture(autouse=True)
def accelerator() -> None:
    """No device beside the one of :func:`model`."""


@pytest.fixture
def model(seed: int, collected: None) -> Iterator[ModelAccelerator]:
    made = ModelAccelerator(seed, memory_bytes=64 << 20)
    try:
        yield made
        made.synchronize()
        assert made.races == ()
    finally:
        made.close()


def operator(name: str, source: int, target: int, *args: float, position: int = -1) -> Operator:
    return Operator(f"aten.{name}", (SlotArgument(source), *args), {}, (target,), (SPEC,), (), position)


DRAWN = with_deaths(
    Program(
        (SPEC,),
        (
            operator("sin.default", 0, 1),
            operator("bernoulli.p", 1, 2, 0.5, position=4),
            operator("exp.default", 2, 3),
            operator("cos.default", 1, 4),
            operator("tanh.default", 4, 5),
        ),
        (3, 5),
        6,
    )
)


def rig_on(device: ComputeDevice, quota_bytes: int = 0) -> Rig:
    """Return a machine whose routine 200 calls the program on buffer 1, filling 2 and 3."""
    rig = Rig(quota_bytes, device=device)
    rig.do(define(100, DRAWN), Define(200, Routine((Call(100, (1,), (2, 3)),), 0)))
    return rig


def steps(rig: Rig, *before: SetNumerics) -> list[torch.Tensor]:
    """Run some steps, each with another batch; return what they made."""
    made = []
    for step in range(STEPS):
        rig.put(b1=X + step)
        rig.do(*before, Run(200, step=step, seed=3))
        made += [rig.get(2).clone(), rig.get(3).clone()]
        rig.do(Free((2, 3)))
    assert rig.failures == []
    return made


def test_steps_of_a_worker_are_the_same_as_graphs(model: ModelAccelerator) -> None:
    state = torch.default_generator.get_state()
    expected = steps(rig_on(ComputeDevice("cpu", 1)))
    device = ComputeDevice("cpu", 1, accelerator=model)
    rig = rig_on(device)
    found = steps(rig)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert rig.machine.graphs.replays == STEPS - 2
    assert rig.used == X.nbytes, "a graph's memory is not in use"
    rig.do(Free((), (100,)))
    gc.collect()
    assert rig.machine.graphs.size_bytes == 0
    assert not torch.equal(found[0], found[2]), "steps draw other numbers"
    torch.default_generator.set_state(state)


def test_graphs_are_switched_off_by_the_run(model: ModelAccelerator) -> None:
    rig = rig_on(ComputeDevice("cpu", 1, accelerator=model))
    steps(rig, SetNumerics(cuda_graphs=False))
    assert rig.machine.graphs.captures == 0
    steps(rig)
    assert rig.machine.graphs.captures == 1


def test_a_worker_that_is_short_of_memory_drops_its_graphs(model: ModelAccelerator) -> None:
    quota_bytes = 12 * X.nbytes
    rig = rig_on(ComputeDevice("cpu", 1, accelerator=model), quota_bytes)
    found = steps(rig)
    graphs = rig.machine.graphs
    assert graphs.replays == STEPS - 2
    count = (quota_bytes - rig.used) // X.nbytes
    names = tuple(range(10, 10 + count))
    rig.do(Put(names, (SPEC,) * count), frames=[X.numpy().tobytes()] * count)
    assert rig.failures == []
    assert graphs.size_bytes == 0
    rig.do(Free(names))
    again = steps(rig)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


class BusyGroup:
    """A group whose operations go on as long as it is busy."""

    busy = True

    def check(self) -> bool:
        return self.busy

    def close(self) -> None:
        """Leave it."""


def test_nothing_is_captured_while_operations_between_workers_go_on(model: ModelAccelerator) -> None:
    """A capture waits for the whole device: for a receive, too, whose peer may wait for what this worker sends next."""
    rig = rig_on(ComputeDevice("cuda:0", 1, accelerator=model))
    group = BusyGroup()
    rig.machine._groups._groups[3] = group  # type: ignore[assignment]
    rig.put(b1=X)
    for _ in range(4):
        rig.do(Run(200), Free((2, 3)))
    assert rig.machine.graphs.captures == 0
    group.busy = False
    rig.do(Run(200))
    assert rig.machine.graphs.captures == 1
    assert not rig.failures
    rig.do(Free((1, 2, 3)))
    rig.machine.close()
