"""Runs that go on after workers died or hung, at moments drawn from seeds, end with the bits of undisturbed ones."""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onebox
from onebox.engine.history import Recovery
from onebox.errors import UsageError
from onebox.plan import Plan
from onebox.pool import Fault, open_pool
from onebox.pool.local import LocalSource
from tests.models import CASES, OPTIMIZERS
from tests.process.faults.conftest import SETTLE_S, belongings
from tests.process.stages import staged

SEED = 5
STEPS = 14
SAMPLES = 8
MICRO_BATCH = 2
EVERY = 4
"""Steps between snapshots."""

Outcome = tuple[list[float], dict[str, Tensor], tuple[Recovery, ...]]


@dataclass(frozen=True, kw_only=True)
class Blow:
    """A signal to a worker.

    Args:
        worker: Which.
        signal: Which.
        step: Before which step.
        delay_s: How long after that.
    """

    worker: int
    signal: signal.Signals
    step: int
    delay_s: float


@functools.cache
def batches() -> list[tuple[Any, Any]]:
    """Return the batches of a run."""
    return CASES["dropping"].batches([SAMPLES] * STEPS)


def trainer_on(pool: onebox.Pool, plan: Plan, **options: Any) -> onebox.Trainer:
    """Return a trainer of a model with dropout."""
    case = CASES["dropping"]
    model = case.model()
    arguments = {"seed": SEED, "check_every": 3, "plan": plan, "recover": True, "snapshot_every": EVERY, **options}
    return onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, **arguments)


def run(pool: onebox.Pool, plan: Plan, blows: Sequence[Blow] = ()) -> Outcome:
    """Train, and return losses, weights and what was lost; the rate changes with the steps."""
    timers: list[threading.Timer] = []

    def strike(blow: Blow) -> None:
        os.kill(pool.process_ids[blow.worker], blow.signal)

    with trainer_on(pool, plan) as trainer:
        losses = []
        for number, batch in enumerate(batches()):
            for group in trainer.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number // 3)
            for blow in blows:
                if blow.step == number:
                    timers.append(threading.Timer(blow.delay_s, strike, (blow,)))
                    timers[-1].start()
            if number == STEPS - 1:  # which needs all workers
                for timer in timers:
                    timer.join()
            losses.append(trainer.step(*batch))
        weights = trainer.tensors()
        return [float(loss) for loss in losses], weights, trainer.recoveries


def data_parallel(devices: int = 2, sync: Any = "workers") -> Plan:
    return Plan.data_parallel(range(devices), [1.0] * devices, micro_batch=MICRO_BATCH, sync=sync)


def pipelined() -> Plan:
    return staged("dropping", [0, 1], micro_batch=MICRO_BATCH)


def drawn(seed: int, signals: Sequence[signal.Signals]) -> list[Blow]:
    """Draw a moment for each signal, one after the other; the worker, too."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, STEPS - 1), len(signals)))
    return [
        Blow(worker=draw.randrange(2), signal=kind, step=step, delay_s=draw.uniform(0.0, 0.02))
        for kind, step in zip(signals, steps, strict=True)
    ]


def disturbed(faults: dict[int, list[Fault]]) -> onebox.Pool:
    """Open a pool of two workers that have faults."""
    return open_pool("cpu*2", threads=1, faults={worker: tuple(found) for worker, found in faults.items()})


PLANS: dict[str, Callable[[], Plan]] = {
    "workers": data_parallel,
    "client": lambda: data_parallel(sync="client"),
    "stages": pipelined,
}


@pytest.fixture(autouse=True, scope="module")
def nothing_left(warm: None) -> Iterator[None]:
    """Fail if these tests leave something behind; a pool that heals is another one after each of them."""
    before = belongings()
    yield
    end_s = time.monotonic() + SETTLE_S
    while (after := belongings()) != before and time.monotonic() < end_s:
        time.sleep(0.02)
    assert after == before, (before.descriptors - after.descriptors, after.descriptors - before.descriptors)


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    """A pool that every test leaves whole, because it heals."""
    with open_pool("cpu*2", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def undisturbed(pool: onebox.Pool) -> dict[str, Outcome]:
    """Losses and weights of runs in which nothing is lost."""
    return {name: run(pool, plan()) for name, plan in PLANS.items()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert not expected[2]
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


@pytest.mark.parametrize(
    ("plan", "seed", "signals"),
    [
        ("workers", 3, [signal.SIGKILL, signal.SIGSTOP]),
        ("stages", 4, [signal.SIGSTOP, signal.SIGKILL]),
        ("client", 5, [signal.SIGKILL]),
    ],
)
def test_a_run_with_losses_ends_with_the_same_bits(
    plan: str, seed: int, signals: list[signal.Signals], pool: onebox.Pool, undisturbed: dict[str, Outcome]
) -> None:
    blows = drawn(seed, signals)
    found = run(pool, PLANS[plan](), blows)
    assert_same(found, undisturbed[plan])
    stories = found[2]
    assert {worker for story in stories for worker in story.lost} == {blow.worker for blow in blows}, blows
    for story in stories:
        assert story.lost == story.replaced
        assert not story.gone
        assert story.plan is None
        assert story.step - story.snapshot_step == story.redone <= 2 * EVERY + 1


def test_all_workers_die_at_once(pool: onebox.Pool, undisturbed: dict[str, Outcome]) -> None:
    blows = [Blow(worker=worker, signal=signal.SIGKILL, step=7, delay_s=0.0) for worker in range(2)]
    found = run(pool, PLANS["stages"](), blows)
    assert_same(found, undisturbed["stages"])
    assert {worker for story in found[2] for worker in story.lost} == {0, 1}


def test_workers_die_while_a_run_begins_and_during_a_snapshot(undisturbed: dict[str, Outcome]) -> None:
    with disturbed({0: [Fault("kill", "define", 2)], 1: [Fault("kill", "get", 2)]}) as pool:
        found = run(pool, PLANS["stages"]())
    assert_same(found, undisturbed["stages"])
    first, second = found[2]
    assert (first.lost, first.snapshot_step) == ((0,), 0)
    assert (second.lost, second.snapshot_step) == ((1,), EVERY)


def test_evaluating_and_saving_go_on_and_each_loss_is_one_logged_line(
    pool: onebox.Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def some() -> Iterator[Any]:
        for number, batch in enumerate(batches()[:4]):
            if number == 3:
                os.kill(pool.process_ids[1], signal.SIGKILL)
            yield batch

    with caplog.at_level(logging.WARNING, "onebox"), trainer_on(pool, pipelined(), snapshot_every=100) as trainer:
        for batch in batches()[:3]:
            trainer.step(*batch)
        found = trainer.evaluate(some())
        os.kill(pool.process_ids[0], signal.SIGKILL)
        trainer.save(tmp_path)
        assert [story.lost for story in trainer.recoveries] == [(1,), (0,)]
        assert [str(story) for story in trainer.recoveries] == [record.getMessage() for record in caplog.records]
        assert trainer.evaluate(batches()[:4]) == found
    case = CASES["dropping"]
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["adamw"](model), pool=pool) as resumed:
        assert resumed.steps_done == 3
        assert resumed.evaluate(batches()[:4]) == found


def test_a_worker_that_dies_again_while_it_is_brought_back(
    pool: onebox.Pool, undisturbed: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, again = LocalSource._start, [(Fault("kill", "put", 2),), (Fault("kill", "call", 3),)]

    def faulty(self: LocalSource, number: int, request: Any, key: str, folder: str, _: Any) -> Any:
        return start(self, number, request, key, folder, again.pop() if again else ())

    monkeypatch.setattr(LocalSource, "_start", faulty)
    found = run(pool, data_parallel(), [Blow(worker=1, signal=signal.SIGKILL, step=6, delay_s=0.0)])
    assert_same(found, undisturbed["workers"])
    assert not again
    assert sum(story.attempts for story in found[2]) == 3


def test_what_is_left_goes_on_with_the_same_micro_batches(
    undisturbed: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSource, "replace", lambda *_: None)
    with disturbed({1: [Fault("kill", "reduce", 6)]}) as pool:
        losses, weights, (story,) = run(pool, data_parallel())
        assert pool.present == (0,)
    assert (story.gone, story.replaced) == ((1,), ())
    assert story.plan is not None
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed["workers"][0]))
    for name, tensor in undisturbed["workers"][1].items():
        torch.testing.assert_close(weights[name], tensor)


def test_settings_that_cannot_be_are_refused(pool: onebox.Pool) -> None:
    for options in ({"recover": False, "snapshot_every": 3}, {"snapshot_every": 0}):
        with pytest.raises(UsageError, match="snapshot_every"):
            trainer_on(pool, data_parallel(), **options)
