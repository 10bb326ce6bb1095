"""Faults by (worker, instruction): one clear error, in time, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import onebox
from onebox.errors import DeviceMemoryError, OneboxError, OperatorError, WorkerDied, WorkerHung
from onebox.pool import Fault, open_pool
from tests.process.faults.training import (
    STEPS,
    WITHIN_S,
    Stopwatch,
    Tensors,
    fails,
    fails_with_one_error,
    faulty_pool,
    parts,
    steps,
    train,
    trainer_on,
)

Case = tuple[str, str, int, int]
"""Sync, instruction, its count, worker."""

KILLS: list[Case] = [
    ("workers", "formgroup", 1, 1),
    ("workers", "reduce", 3, 0),
    ("workers", "get", 3, 0),
    ("client", "reduce", 4, 1),
]

HANGS: list[tuple[str, Case]] = [
    ("hang", ("workers", "reduce", 3, 1)),
    ("stop", ("client", "call", 7, 0)),
    ("hang", ("client", "optimizerstep", 3, 1)),
    ("stop", ("workers", "formgroup", 1, 1)),
]

FAILURES = [
    ("error", "call", 4),
    ("memory", "call", 4),
    ("memory", "reduce", 2),
    ("error", "reduce", 2),
    ("error", "ask", 2),
    ("memory", "ask", 2),
    ("error", "optimizerstep", 2),
    ("memory", "optimizerstep", 2),
]
"""Faults of the second step of a pool: a step has two calls, and one instruction of each of the other kinds."""

VOTED = ("call", "reduce")
"""Instructions before the vote on a step: their failure costs the step alone."""


@pytest.fixture(scope="module")
def whole() -> Iterator[onebox.Pool]:
    """A pool without faults."""
    with open_pool("cpu*2", threads=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def undisturbed(whole: onebox.Pool) -> dict[str, Tensors]:
    """Weights after an undisturbed run, for each sync."""
    return {sync: train(whole, sync) for sync in ("workers", "client")}


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.feature("Recovery: Learn which worker died or hangs, and why")
@pytest.mark.parametrize("case", KILLS, ids=lambda case: "-".join(map(str, case)))
def test_a_killed_worker_is_reported_with_its_signal(case: Case) -> None:
    sync, instruction, count, worker = case
    with faulty_pool("kill", instruction, count, worker) as pool:
        error = fails(lambda: train(pool, sync)).error
        assert isinstance(error, WorkerDied)
        assert (error.worker, error.device, error.host, error.exit_status) == (worker, "cpu", "localhost", -9)
        assert f"worker {worker} (cpu on localhost)" in str(error)
        assert "SIGKILL" in str(error)
        assert fails(lambda: train(pool, sync)).error is error


def hang(kind: str, case: Case) -> OneboxError:
    """Train until a worker hangs; return the error."""
    sync, instruction, count, worker = case
    with faulty_pool(kind, instruction, count, worker) as pool, trainer_on(pool, sync) as trainer:
        return fails_with_one_error(trainer)


@pytest.mark.feature("Recovery: Learn which worker died or hangs, and why")
def test_a_stopped_or_hanging_worker_is_reported() -> None:
    with ThreadPoolExecutor(2) as executor:
        errors = list(executor.map(lambda arguments: hang(*arguments), HANGS))
    for (kind, (_, instruction, _, worker)), error in zip(HANGS, errors, strict=True):
        assert isinstance(error, WorkerHung), error
        assert (error.worker, error.device) == (worker, "cpu")
        says = "gave no sign of life" if kind == "stop" else f"no progress with its {instruction} instruction"
        assert says in str(error)


@pytest.mark.parametrize("sync", ["workers", "client"])
def test_a_failing_instruction_is_reported_and_the_pool_stays_usable(
    sync: str, undisturbed: dict[str, Tensors]
) -> None:
    for kind, instruction, count in FAILURES:
        with faulty_pool(kind, instruction, count) as pool:
            with trainer_on(pool, sync) as trainer:
                if instruction in VOTED:
                    raised = fails(lambda trainer=trainer: steps(trainer, STEPS))
                    assert isinstance(raised.error, OperatorError) and raised.error.kept
                    assert_injected(raised.error, kind, instruction, worker=1)
                    assert_same_bits(steps(trainer, STEPS), undisturbed[sync])
                else:
                    assert_injected(fails_with_one_error(trainer), kind, instruction, worker=1)
            assert_same_bits(train(pool, sync), undisturbed[sync])


def test_a_failure_outside_of_a_step_is_reported_and_the_trainer_goes_on(undisturbed: dict[str, Tensors]) -> None:
    first = [Fault("error", "formgroup", 1), Fault("memory", "get", 1)]
    reads = STEPS + 1  # of the first trainer, each of four tensors
    second = [Fault("memory", "formgroup", 3), Fault("error", "get", 4 * reads + 1)]
    with open_pool("cpu*2", threads=1, faults={0: [*first, *second]}) as pool:
        for sync, faults in (("workers", first), ("client", second)):
            with trainer_on(pool, sync) as trainer:
                for fault in faults:
                    watch = Stopwatch()
                    raised = fails(lambda trainer=trainer, watch=watch: steps(trainer, STEPS, watch), watch)
                    assert raised.after_s < WITHIN_S
                    assert_injected(raised.error, fault.kind, fault.instruction, worker=0)
                assert_same_bits(steps(trainer, STEPS), undisturbed[sync])


def assert_injected(error: Any, kind: str, instruction: str, worker: int) -> None:
    assert type(error) is {"error": OperatorError, "memory": DeviceMemoryError}[kind], error
    assert (error.worker, error.device, error.operator) == (worker, "cpu", instruction)
    of_a_step = f" in {error.doing}" if error.instruction else ""
    assert bool(of_a_step) == (instruction not in ("formgroup", "get"))
    assert f"worker {worker} (cpu on localhost): {instruction} failed{of_a_step}: injected fault" in str(error)


def test_a_checkpoint_from_before_the_fault_resumes_to_the_same_bits(
    tmp_path: Path, whole: onebox.Pool, undisturbed: dict[str, Tensors]
) -> None:
    with faulty_pool("kill", "optimizerstep", 6) as pool, trainer_on(pool, "workers") as trainer:
        steps(trainer, 3)
        trainer.save(tmp_path)
        error = fails(lambda: steps(trainer, STEPS)).error
        assert fails(lambda: trainer.save(tmp_path)).error is error
    with onebox.Trainer.resume(tmp_path, *parts(seed=1), pool=whole) as trainer:
        assert trainer.steps_done == 3
        assert_same_bits(steps(trainer, STEPS), undisturbed["workers"])
