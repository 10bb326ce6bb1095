"""Two GPUs: groups over NCCL, whose operations run in order, have no tags, and are interrupted by nothing.

On devices that are no GPUs the same runs go through shared memory, which shows that the tests themselves are right.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsFloat

import pytest

import onebox
from onebox.errors import OneboxError
from onebox.plan import Plan
from tests.gpu_run.checks import TEST_S
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import SEED, outcome, reference, run, staged
from tests.kit.trainer_arguments import grouped
from tests.process.test_migration import moved

pytestmark = pytest.mark.gpu

SIZES = [8, 5, 8, 8]
TOLERANCE = 1e-8

NOTICED_S = 30.0
"""Longest time until the death of a peer is an error; until a run has gone on, twice as long."""

IDLE_S = 60


@pytest.fixture(scope="module")
def pool(devices: Callable[[int], str]) -> Iterator[onebox.Pool]:
    """Two workers."""
    with onebox.open(devices(2), threads=1) as pool:
        yield pool


def _outcome(trainer: onebox.Trainer, losses: Sequence[SupportsFloat]) -> Outcome:
    """Return how a run went that has had all its steps."""
    return outcome(trainer, losses)


@pytest.mark.feature("GPUs: Train on two GPUs")
@pytest.mark.parametrize("shares", [(1.0, 1.0), (2.0, 1.0)], ids=["equal", "uneven"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt2"])
def test_replicas(model: str, shares: tuple[float, float], pool: onebox.Pool) -> None:
    plan = Plan.data_parallel([0, 1], list(shares), micro_batch=3)
    assert_same(run(pool, model, plan, SIZES), reference(model, plan, SIZES), TOLERANCE)


def test_replicas_that_share_the_state_of_the_optimizer(pool: onebox.Pool) -> None:
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=3, optimizer="sharded")
    assert_same(run(pool, "gpt2", plan, SIZES), reference("gpt2", plan, SIZES), TOLERANCE)


@pytest.mark.feature("GPUs: Train on two GPUs")
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", (0, 1)), ("1f1b", (0, 1)), ("zb-h1", (0, 1)), ("interleaved", (0, 1, 0, 1)), ("zbv", (0, 1, 1, 0))],
)
def test_schedules(schedule: str, stages: tuple[int, ...], pool: onebox.Pool) -> None:
    plan = staged("gpt2", stages, schedule=schedule)
    sizes = [12, 5, 12, 12]
    assert_same(run(pool, "gpt2", plan, sizes), reference("gpt2", plan, sizes), TOLERANCE)


def test_schedules_with_many_micro_batches(pool: onebox.Pool) -> None:
    """Sends that no receive has been posted for yet."""
    plan = staged("gpt2", (0, 1), micro_batch=1, schedule="1f1b")
    assert_same(run(pool, "gpt2", plan, [24, 24]), reference("gpt2", plan, [24, 24]), TOLERANCE)


def test_schedules_without_a_pause_between_steps(pool: onebox.Pool) -> None:
    plan = staged("gpt2", (0, 1), schedule="async-1f1b")
    found = run(pool, "gpt2", plan, SIZES, staleness=1, delay="none", warm_up=1)
    with onebox.open("cpu,cpu", threads=1) as other:
        expected = run(other, "gpt2", plan, SIZES, staleness=1, delay="none", warm_up=1)
    assert_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("stages", [(0, 1), (1, 0), (0, 1, 0), (0, 1, 0, 1)])
def test_skips(stages: tuple[int, ...], pool: onebox.Pool) -> None:
    """Tensors of equal sizes go from one device to the other on several channels, and are received in another order."""
    plan = staged("unet", stages, schedule="1f1b" if len(stages) == 2 else "gpipe")
    assert_same(run(pool, "unet", plan, SIZES), reference("unet", plan, SIZES), TOLERANCE)


def test_skips_over_three_devices(devices: Callable[[int], str]) -> None:
    """Each pair has a communicator of its own, which are made when they are first used."""
    plan = staged("unet", (0, 1, 2))
    with onebox.open(devices(3), threads=1) as three:
        assert_same(run(three, "unet", plan, SIZES), reference("unet", plan, SIZES), TOLERANCE)


def test_skips_between_gpus_and_a_cpu(devices: Callable[[int], str]) -> None:
    plan = staged("unet", (0, 1, 2))
    with onebox.open(f"{devices(2)},cpu", threads=1) as three:
        assert_same(run(three, "unet", plan, SIZES), reference("unet", plan, SIZES), TOLERANCE)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_migration(optimizer: str, pool: onebox.Pool) -> None:
    plan = staged("unet", (0, 1))
    there = moved(plan, 0, 1)
    swapped = staged("unet", (1, 0))
    case = CASES["unet"]
    model = case.model()
    losses = []
    with onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), pool=pool, plan=plan, seed=SEED) as trainer:
        for step, batch in enumerate(case.batches([8] * 6)):
            if step in (1, 2, 4):
                trainer._run.adopt({1: there, 2: swapped, 4: plan}[step])
            losses.append(trainer.step(*batch))
        found = _outcome(trainer, losses)
    assert_same(found, reference("unet", plan, [8] * 6, optimizer=optimizer), TOLERANCE)


def _begun(pool: onebox.Pool, plan: Plan, **options: object) -> onebox.Trainer:
    case = CASES["gpt2"]
    model = case.model()
    arguments = {"seed": SEED, "plan": plan, **options}
    return onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **grouped(pool=pool, **arguments))


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
def test_a_killed_peer_is_an_error_in_time(layout: str, devices: Callable[[int], str]) -> None:
    """The other one waits for it in NCCL."""
    plan = staged("gpt2", (0, 1)) if layout == "pipeline" else Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=3)
    batches = CASES["gpt2"].batches([8] * 200)
    with onebox.open(devices(2), threads=1) as own, _begun(own, plan, recover=False) as trainer:
        for batch in batches[:3]:
            trainer.step(*batch).item()
        killed = threading.Timer(0.05, os.kill, (own.process_ids[1], signal.SIGKILL))
        killed.start()
        with pytest.raises(OneboxError, match="worker 1"):
            for batch in batches[3:]:
                trainer.step(*batch).item()
                time.sleep(0.01)
        killed.join()
        assert 1 in own.recover_workers().replaced
        assert_same(run(own, "gpt2", plan, SIZES), reference("gpt2", plan, SIZES), TOLERANCE)


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
@pytest.mark.timeout(2 * NOTICED_S + TEST_S)
def test_a_run_goes_on_after_a_killed_peer(layout: str, devices: Callable[[int], str]) -> None:
    plan = staged("gpt2", (0, 1)) if layout == "pipeline" else Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=3)
    batches = CASES["gpt2"].batches([8] * 12)
    with onebox.open(devices(2), threads=1) as own, _begun(own, plan, recover=True, snapshot_every=2) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches[:5]]
        os.kill(own.process_ids[1], signal.SIGKILL)
        losses += [float(trainer.step(*batch)) for batch in batches[5:]]
        assert len(trainer.recoveries) == 1
        found = _outcome(trainer, losses)
    assert_same(found, reference("gpt2", plan, [8] * 12, optimizer="sgd"), TOLERANCE)


@pytest.mark.timeout(IDLE_S + TEST_S)
def test_an_idle_minute(real: bool, pool: onebox.Pool) -> None:
    """NCCL's heartbeat and watchdog threads run meanwhile, and a loss that nobody reads waits on the device."""
    plan = staged("gpt2", (0, 1))
    batches = CASES["gpt2"].batches([8] * 4)
    before = list(pool.process_ids)
    with _begun(pool, plan) as trainer:
        losses = [trainer.step(*batch) for batch in batches[:2]]
        time.sleep(IDLE_S if real else 2)
        losses += [trainer.step(*batch) for batch in batches[2:]]
        found = _outcome(trainer, losses)
    assert list(pool.process_ids) == before
    assert_same(found, reference("gpt2", plan, [8] * 4, optimizer="sgd"), TOLERANCE)
