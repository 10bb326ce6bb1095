"""Runs that go on after workers died or hung, at moments drawn from seeds, end with the bits of undisturbed ones."""

from __future__ import annotations

import contextlib
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
from msgspec.structs import replace
from torch import Tensor, nn

import onebox
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.errors import PoolError, UsageError, WorkerDied
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from onebox.pool import Fault, open_pool
from onebox.pool.backends.local import LocalSource
from onebox.wire.protocol.instructions import Ask
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.stages import staged
from tests.kit.trainer_arguments import grouped
from tests.process.faults.conftest import SETTLE_S, leaving_nothing

SEED = 5
STEPS = 14
SAMPLES = 8
MICRO_BATCH = 2
EVERY = 4
"""Steps between snapshots."""

Outcome = tuple[list[float], dict[str, Tensor], tuple[RecoveryRecord, ...]]


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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is trained, and how.

    Args:
        plan: Makes the plan.
        case: The model.
        optimizer: By name.
    """

    plan: Callable[[], Plan]
    case: str = "dropping"
    optimizer: str = "adamw"


@functools.cache
def batches(case: str = "dropping") -> list[tuple[Any, Any]]:
    """Return the batches of a run."""
    return CASES[case].batches([SAMPLES] * STEPS)


def trainer_on(pool: onebox.Pool, kind: Kind, **options: Any) -> onebox.Trainer:
    """Return a trainer."""
    case = CASES[kind.case]
    model = case.model()
    arguments = {"seed": SEED, "check_every": 3, "recover": True, "snapshot_every": EVERY, **options}
    return onebox.Trainer(
        model, case.loss, OPTIMIZERS[kind.optimizer](model), **grouped(pool=pool, plan=kind.plan(), **arguments)
    )


def run(pool: onebox.Pool, kind: Kind, blows: Sequence[Blow] = (), **options: Any) -> Outcome:
    """Train, and return losses, weights and what was lost; the rate changes with the steps.

    A blow falls when what the one before it did has been noticed: two at once are more than a run need survive.
    """
    timers: list[threading.Timer] = []

    def strike(blow: Blow) -> None:
        os.kill(pool.process_ids[blow.worker], blow.signal)

    with trainer_on(pool, kind, **options) as trainer:
        losses = []
        for number, batch in enumerate(batches(kind.case)):
            for group in trainer.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number // 3)
            for blow in blows:
                if blow.step == number:
                    finish(timers, trainer)
                    timers.append(threading.Timer(blow.delay_s, strike, (blow,)))
                    timers[-1].start()
            if number == STEPS - 1:  # which needs all workers
                finish(timers, trainer)
            losses.append(trainer.step(*batch))
        weights = trainer.tensors()
        return [float(loss) for loss in losses], weights, trainer.recoveries


def finish(timers: list[threading.Timer], trainer: onebox.Trainer) -> None:
    """Wait until the last blow has fallen and all workers have answered, those in the places of the lost ones too."""
    if timers:
        timers[-1].join()
        trainer.wait()
        trainer.memory()


def data_parallel(devices: int = 2, sync: Any = "workers") -> Plan:
    return Plan.data_parallel(range(devices), [1.0] * devices, micro_batch=MICRO_BATCH, sync=sync)


def pipelined() -> Plan:
    return staged("dropping", [0, 1], micro_batch=MICRO_BATCH)


def on_host() -> Plan:
    """Return a plan whose optimizer steps in the host's memory."""
    return replace(pipelined(), update="host")


def split() -> Plan:
    """Return a plan whose only stage is split over two workers."""
    return Plan(stages=(Stage(segments=(), replicas=((0, 1),), shares=(1.0,)),), micro_batch=MICRO_BATCH)


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


KINDS = {
    "workers": Kind(plan=data_parallel),
    "client": Kind(plan=lambda: data_parallel(sync="client")),
    "stages": Kind(plan=pipelined),
    "shared out": Kind(plan=lambda: replace(data_parallel(), optimizer="sharded")),
    "alone": Kind(plan=lambda: data_parallel(1, sync="client")),
    "stepped on the host": Kind(plan=on_host),
    "split with running statistics": Kind(plan=split, case="cnn", optimizer="sgd"),
}


@pytest.fixture(autouse=True, scope="module")
def nothing_left(warm: None) -> Iterator[None]:
    """Fail if these tests leave something behind; a pool that heals is another one after each of them."""
    with leaving_nothing():
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    """A pool that every test leaves whole, because it heals."""
    with open_pool("cpu*2", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def undisturbed(pool: onebox.Pool) -> Callable[[str], Outcome]:
    """Losses and weights of runs in which nothing is lost."""
    return functools.cache(lambda name: run(pool, KINDS[name]))


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert not expected[2]
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


@pytest.mark.feature("Recovery: Replace workers that die or hang, with the same bits")
@pytest.mark.parametrize(
    ("kind", "seed", "signals"),
    [
        ("workers", 3, [signal.SIGKILL, signal.SIGSTOP]),
        ("stages", 4, [signal.SIGSTOP, signal.SIGKILL]),
        ("client", 5, [signal.SIGKILL]),
        ("shared out", 8, [signal.SIGKILL]),
        ("stepped on the host", 6, [signal.SIGKILL]),
        ("split with running statistics", 7, [signal.SIGKILL]),
    ],
)
def test_a_run_with_losses_ends_with_the_same_bits(
    kind: str, seed: int, signals: list[signal.Signals], pool: onebox.Pool, undisturbed: Callable[[str], Outcome]
) -> None:
    blows = drawn(seed, signals)
    found = run(pool, KINDS[kind], blows)
    assert_same(found, undisturbed(kind))
    stories = found[2]
    assert {worker for story in stories for worker in story.lost} == {blow.worker for blow in blows}, blows
    for story in stories:
        assert story.lost == story.replaced
        assert not story.gone
        assert story.plan is None
        assert story.step - story.snapshot_step == story.redone <= 2 * EVERY + 1


@pytest.mark.parametrize("kinds", [("workers", "stages"), ("workers", "workers")])
def test_two_trainers_that_recover_on_one_pool_do_not_disturb_each_other(
    kinds: tuple[str, str], pool: onebox.Pool, undisturbed: Callable[[str], Outcome]
) -> None:
    """Each in a thread; both workers are lost, one after the other, at moments of which only the step is known."""
    expected = [undisturbed(name) for name in kinds]
    barrier = threading.Barrier(3, timeout=60)
    found: dict[int, Outcome] = {}
    with contextlib.ExitStack() as stack:
        trainers = [stack.enter_context(trainer_on(pool, KINDS[name])) for name in kinds]
        losses: list[list[Any]] = [[], []]

        def steps(number: int, until: int) -> None:
            trainer = trainers[number]
            for step in range(trainer.steps_done, until):
                for group in trainer.optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + step // 3)
                losses[number].append(trainer.step(*batches()[step]))

        def train(number: int) -> None:
            trainer = trainers[number]
            for until in (5, 10):
                steps(number, until)
                trainer.wait()
                trainer.memory()
                barrier.wait()
            steps(number, STEPS)
            weights = trainer.tensors()
            found[number] = [float(loss) for loss in losses[number]], weights, trainer.recoveries

        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for number in range(2):
            steps(number, 1)  # here, as models are captured in one thread only
        for thread in threads:
            thread.start()
        for worker in (1, 0):
            barrier.wait()
            time.sleep(0.003)
            os.kill(pool.process_ids[worker], signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert found.keys() == {0, 1}, "a trainer failed, or waits for ever"
    for number, outcome in found.items():
        assert_same(outcome, expected[number])
        assert {worker for story in outcome[2] for worker in story.lost} == {0, 1}


def uneven(*, width: int, memory: str | None = None, lose: bool = False, steps: int = 12) -> tuple[list[float], int]:
    """Train a pipeline whose first stage has nearly all of the state; return losses and steps done again.

    The second worker keeps a copy of that state, where it has room for it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8), nn.Linear(8, 4)).double()
    optimizer, loss = torch.optim.AdamW(model.parameters()), nn.functional.mse_loss
    names = TracedModel(capture(model, loss, (torch.ones(4, 8).double(), torch.ones(4, 4).double())), backward=True)
    stages = [
        Stage(segments=part, replicas=((device,),), shares=(1.0,))
        for device, part in enumerate((names.segments[:-1], names.segments[-1:]))
    ]
    plan = Plan(stages=tuple(stages), micro_batch=2, schedule="1f1b")
    with (
        open_pool("cpu*2", threads=1, memory=memory) as pool,
        onebox.Trainer(
            model, loss, optimizer, pool=pool, plan=plan, recovery=onebox.Recovery(snapshot_every=2)
        ) as trainer,
    ):
        losses = []
        for step in range(steps):
            if lose and step == steps - 1:
                os.kill(pool.process_ids[0], signal.SIGKILL)
            x_BD = torch.full((4, 8), 0.1 * step, dtype=torch.float64)
            losses.append(trainer.step(x_BD, torch.ones(4, 4, dtype=torch.float64)).item())
        return losses, sum(story.redone for story in trainer.recoveries)


NO_ROOM = "a snapshot of the run found no room and is given up"


def test_a_snapshot_that_finds_no_room_is_given_up_and_the_one_before_stays(caplog: pytest.LogCaptureFixture) -> None:
    """There is room for the state of the other worker at first, and not when its optimizer has one, too."""
    losses, redone = uneven(width=512, memory="8MiB,64KiB", lose=True)
    (said,) = [record.getMessage() for record in caplog.records if NO_ROOM in record.getMessage()]
    assert "the one after step 0 stays" in said
    assert redone >= 10
    assert losses == uneven(width=512)[0]


def test_a_run_whose_snapshots_find_no_room_goes_on_until_it_would_need_one(caplog: pytest.LogCaptureFixture) -> None:
    losses, _ = uneven(width=2048, memory="32MiB,32KiB")
    assert losses == uneven(width=2048)[0]
    (said,) = [record.getMessage() for record in caplog.records if NO_ROOM in record.getMessage()]
    assert "there is none" in said
    with pytest.raises(PoolError, match="no snapshot of its state has found room so far; resume from a checkpoint"):
        uneven(width=2048, memory="32MiB,32KiB", lose=True)


def test_a_worker_that_reaches_no_other_has_its_state_kept_by_the_client(
    pool: onebox.Pool, undisturbed: Callable[[str], Outcome]
) -> None:
    blows = [
        Blow(worker=0, signal=signal.SIGKILL, step=step, delay_s=delay_s) for step, delay_s in ((5, 0.01), (9, 0.0))
    ]
    found = run(pool, KINDS["alone"], blows)
    assert_same(found, undisturbed("alone"))
    assert [story.replaced for story in found[2]] == [(0,), (0,)]


def test_a_worker_that_died_before_the_first_step_is_replaced(pool: onebox.Pool) -> None:
    kind = KINDS["workers"]
    with trainer_on(pool, kind) as trainer:
        os.kill(pool.process_ids[1], signal.SIGKILL)
        assert len(trainer.memory()) == len(pool)
        (story,) = trainer.recoveries
        assert (story.lost, story.redone, story.plan) == ((1,), 0, None)
        assert trainer.step(*batches(kind.case)[0]).item() > 0


def test_a_worker_dies_while_a_run_begins(undisturbed: Callable[[str], Outcome]) -> None:
    with disturbed({0: [Fault("kill", "define", 2)]}) as pool:
        found = run(pool, KINDS["stages"])
    assert_same(found, undisturbed("stages"))
    (story,) = found[2]
    assert (story.lost, story.snapshot_step) == ((0,), 0)


def test_workers_die_while_they_copy_send_and_take_a_snapshot(
    pool: onebox.Pool, undisturbed: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LocalSource._start
    again = [("copying", 30), ("taking", 2), ("giving", 2)]  # of the workers that come in the places of others

    def faulty(self: LocalSource, number: int, key: str, folder: str, _: Any) -> Any:
        faults = (Fault("kill", *again.pop()),) if again else ()
        return start(self, number, key, folder, faults)

    monkeypatch.setattr(LocalSource, "_start", faulty)
    blow = Blow(worker=1, signal=signal.SIGKILL, step=2, delay_s=0.0)
    found = run(pool, KINDS["stages"], [blow], snapshot_every=2)
    assert_same(found, undisturbed("stages"))
    assert not again
    assert [story.lost for story in found[2]] == [(1,)] * 4


def test_workers_that_cannot_send_a_snapshot_are_brought_together_again(
    undisturbed: Callable[[str], Outcome],
) -> None:
    with disturbed({0: [Fault("error", "giving", 2)]}) as pool:
        found = run(pool, KINDS["stages"])
        answers = [pool.post(worker, [Ask("memory")], answer=True).result(SETTLE_S) for worker in pool.present]
        assert [memory.kept_bytes for answer in answers for memory in answer.results] == [0, 0], "none stays behind"
    assert_same(found, undisturbed("stages"))
    (story,) = found[2]
    assert story.lost == ()
    assert story.snapshot_step == 0
    assert "injected fault" in story.failure or "lost each other" in story.failure


def test_what_nobody_has_any_more_is_one_error_and_the_checkpoint_is_whole(pool: onebox.Pool, tmp_path: Path) -> None:
    trainer = trainer_on(pool, KINDS["stages"])
    for batch in batches()[:3]:
        trainer.step(*batch)
    saved = trainer.save(tmp_path)
    for process in pool.process_ids:
        os.kill(process, signal.SIGKILL)
    with pytest.raises(PoolError, match="kept by worker 0 and 1 only") as caught:
        trainer.step(*batches()[3]).item()
    assert str(saved) in str(caught.value)
    for call in (trainer.tensors, lambda: trainer.step(*batches()[3])):
        with pytest.raises(PoolError) as later:
            call()
        assert later.value is caught.value
    trainer.close()
    case = CASES["dropping"]
    model = case.model()
    with onebox.Trainer.resume(saved, model, case.loss, OPTIMIZERS["adamw"](model), pool=pool) as resumed:
        assert resumed.step(*batches()[3]).item() > 0


def test_evaluating_and_saving_go_on_and_each_loss_is_one_logged_line(
    pool: onebox.Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def some() -> Iterator[Any]:
        for number, batch in enumerate(batches()[:4]):
            if number == 3:
                os.kill(pool.process_ids[1], signal.SIGKILL)
            yield batch

    with caplog.at_level(logging.WARNING, "onebox"), trainer_on(pool, KINDS["stages"], snapshot_every=100) as trainer:
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


@pytest.mark.short
@pytest.mark.parametrize("options", [{"overlap": True}, {"staleness": 1, "warm_up": 0, "delay": "none"}], ids=str)
def test_a_loss_that_comes_up_when_the_state_is_read_leaves_no_update_out(
    options: dict[str, Any], pool: onebox.Pool
) -> None:
    """Steps overlap: the last one that is done again has its update before the state is read again."""
    found = []
    for kills in (False, True):
        with trainer_on(pool, KINDS["workers"], snapshot_every=100, **options) as trainer:
            for batch in batches()[:3]:
                trainer.step(*batch)
            trainer.wait()
            if kills:
                os.kill(pool.process_ids[0], signal.SIGKILL)
            tensors = trainer.tensors()
            assert len(trainer.recoveries) == kills
            if kills:
                os.kill(pool.process_ids[1], signal.SIGKILL)
            state = trainer.optimizer_state()
            found.append((tensors, state, [float(trainer.step(*batch)) for batch in batches()[3:6]]))
    (tensors, state, losses), (other, other_state, other_losses) = found
    assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())
    assert [entry[:2] for entry in state] == [entry[:2] for entry in other_state]
    assert all(
        torch.equal(torch.as_tensor(a[2]), torch.as_tensor(b[2])) for a, b in zip(state, other_state, strict=True)
    )
    assert losses == other_losses


def test_all_but_one_worker_are_lost_at_once_and_come_back() -> None:
    """Who is left has all of the state; those that are started together do not get into each other's way."""
    with onebox.open("cpu*4", threads=1) as pool:
        with trainer_on(pool, Kind(plan=lambda: data_parallel(4)), snapshot_every=1) as trainer:
            for batch in batches()[:3]:
                trainer.step(*batch).item()
            before = trainer.tensors()
            for worker in (1, 2, 3):
                os.kill(pool.process_ids[worker], signal.SIGKILL)
            trainer.memory()
            after = trainer.tensors()
            assert trainer.recoveries
            assert not any(story.gone for story in trainer.recoveries)
            assert pool.present == (0, 1, 2, 3)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_worker_that_dies_again_while_it_is_brought_back(
    pool: onebox.Pool, undisturbed: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, again = LocalSource._start, [(Fault("kill", "write", 2),), (Fault("kill", "call", 3),)]

    def faulty(self: LocalSource, number: int, key: str, folder: str, _: Any) -> Any:
        return start(self, number, key, folder, again.pop() if again else ())

    monkeypatch.setattr(LocalSource, "_start", faulty)
    found = run(pool, KINDS["workers"], [Blow(worker=1, signal=signal.SIGKILL, step=6, delay_s=0.0)])
    assert_same(found, undisturbed("workers"))
    assert not again
    assert sum(story.attempts for story in found[2]) == 3


def test_what_is_left_goes_on_with_the_same_micro_batches(
    undisturbed: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSource, "replace", lambda *_: None)
    with disturbed({1: [Fault("kill", "reduce", 6)]}) as pool:
        losses, weights, (story,) = run(pool, KINDS["workers"])
        assert pool.present == (0,)
    assert (story.gone, story.replaced) == ((1,), ())
    assert story.plan is not None
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed("workers")[0]))
    for name, tensor in undisturbed("workers")[1].items():
        torch.testing.assert_close(weights[name], tensor)


@pytest.mark.parametrize("kind", ["workers", "stages"])
def test_a_worker_whose_device_failed_ends_and_is_replaced(undisturbed: Callable[[str], Outcome], kind: str) -> None:
    with disturbed({1: [Fault("device", "call", 9)]}) as pool:
        found = run(pool, KINDS[kind])
    assert_same(found, undisturbed(kind))
    (story,) = found[2]
    assert (story.lost, story.replaced) == ((1,), (1,))
    assert "WorkerDied: worker 1" in story.failure
    assert story.seconds < 10


def test_a_step_that_fails_a_device_each_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a label out of bounds would."""
    start, starts = LocalSource._start, []

    def faulty(self: LocalSource, number: int, key: str, folder: str, _: Any) -> Any:
        starts.append(number)
        return start(self, number, key, folder, (Fault("device", "call", 3),))

    monkeypatch.setattr(LocalSource, "_start", faulty)
    with (
        disturbed({1: [Fault("device", "call", 9)]}) as pool,
        pytest.raises(PoolError, match="workers were lost 6 times and no step ended in between") as caught,
    ):
        run(pool, KINDS["alone"])
    assert "device-side assert triggered" in str(caught.value)


def test_the_failure_of_a_device_is_told_with_the_end_of_its_worker() -> None:
    with (
        disturbed({0: [Fault("device", "call", 3)]}) as pool,
        pytest.raises(WorkerDied, match="injected fault: device-side assert triggered") as caught,
    ):
        run(pool, KINDS["workers"], recover=False, snapshot_every=None)
    assert (caught.value.worker, caught.value.exit_status) == (0, 1)


def test_settings_that_cannot_be_are_refused(pool: onebox.Pool) -> None:
    with pytest.raises(UsageError, match="snapshot_every"):
        trainer_on(pool, KINDS["workers"], snapshot_every=0)
