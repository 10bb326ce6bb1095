"""Runs that go on after workers died or hung, at moments drawn from seeds, end with the bits of undisturbed ones."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onebox
from onebox.engine.history import Recovery
from onebox.errors import OneboxError, PlanError
from onebox.plan import Plan
from onebox.pool import Fault, open_pool
from onebox.pool.local import LocalSource
from tests.models import CASES, OPTIMIZERS
from tests.process.stages import staged

SEED = 5
STEPS = 14
SAMPLES = 8
MICRO_BATCH = 2

Moment = tuple[int, str, str, int]
"""A fault: worker, kind, instruction, its count."""


@functools.cache
def batches() -> list[tuple[Any, Any]]:
    """Return the batches of a run."""
    return CASES["dropping"].batches([SAMPLES] * STEPS)


def trainer_on(pool: onebox.Pool, plan: Plan, **options: Any) -> onebox.Trainer:
    """Return a trainer of a model with dropout."""
    case = CASES["dropping"]
    model = case.model()
    arguments = {"seed": SEED, "check_every": 3, "plan": plan, "recover": True, "snapshot_every": 4, **options}
    return onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, **arguments)


def run(pool: onebox.Pool, plan: Plan) -> tuple[list[float], dict[str, Tensor], tuple[Recovery, ...]]:
    """Train, and return losses, weights and what was lost; the rate changes with the steps."""
    with trainer_on(pool, plan) as trainer:
        losses = []
        for number, batch in enumerate(batches()):
            for group in trainer.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number // 3)
            losses.append(trainer.step(*batch))
        weights = trainer.tensors()
        return [float(loss) for loss in losses], weights, trainer.recoveries


def data_parallel(devices: int = 2, sync: Any = "workers") -> Plan:
    return Plan.data_parallel(range(devices), [1.0] * devices, micro_batch=MICRO_BATCH, sync=sync)


def pipelined() -> Plan:
    return staged("dropping", [0, 1], micro_batch=MICRO_BATCH)


def drawn(seed: int, kinds: Sequence[str], instructions: Sequence[str]) -> list[Moment]:
    """Draw a moment for each kind of fault, each on a worker of its own, early in the run and late."""
    draw = random.Random(seed)
    workers = draw.sample(range(2), len(kinds))
    most = {"call": 40, "reduce": 9, "optimizerstep": 9, "send": 16, "receive": 16, "get": 3}
    found = []
    for worker, kind in zip(workers, kinds, strict=True):
        instruction = draw.choice(instructions)
        found.append((worker, kind, instruction, draw.randint(1, most[instruction])))
    return found


def disturbed(moments: Sequence[Moment], count: int = 2) -> onebox.Pool:
    """Open a pool whose workers have faults."""
    faults: dict[int, list[Fault]] = {}
    for worker, kind, instruction, number in moments:
        faults.setdefault(worker, []).append(Fault(kind, instruction, number))  # type: ignore[arg-type]
    return open_pool(f"cpu*{count}", threads=1, faults={worker: tuple(found) for worker, found in faults.items()})


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Losses and weights of runs in which nothing is lost."""
    with open_pool("cpu*2", threads=1) as pool:
        plans = {"workers": data_parallel(), "client": data_parallel(sync="client"), "stages": pipelined()}
        return {name: run(pool, plan) for name, plan in plans.items()}


def assert_same(found: Any, expected: Any) -> None:
    assert not expected[2]
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


PARALLEL = drawn(3, ["kill", "stop"], ["call", "reduce", "optimizerstep"])
STAGES = drawn(4, ["stop", "kill"], ["call", "send", "receive", "optimizerstep"])

CASES_OF_LOSS: dict[str, tuple[str, list[Moment]]] = {
    "data parallel": ("workers", PARALLEL),
    "pipeline": ("stages", STAGES),
    "sums at the client": ("client", drawn(5, ["kill"], ["call", "reduce"])),
    "during a snapshot": ("stages", [(1, "kill", "get", 2)]),
    "both at once": ("workers", [(0, "kill", "reduce", 6), (1, "kill", "reduce", 6)]),
    "while it begins": ("stages", [(0, "kill", "define", 2)]),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What each disturbed run ended with; three at a time, because they mostly wait."""

    def outcome(name: str) -> Any:
        kind, moments = CASES_OF_LOSS[name]
        plan = {"workers": data_parallel(), "client": data_parallel(sync="client"), "stages": pipelined()}[kind]
        with disturbed(moments) as pool:
            return run(pool, plan)

    batches()
    pipelined()
    with ThreadPoolExecutor(3) as threads:
        return dict(zip(CASES_OF_LOSS, threads.map(outcome, CASES_OF_LOSS), strict=True))


@pytest.mark.parametrize("name", CASES_OF_LOSS)
def test_a_disturbed_run_ends_with_the_same_bits(
    name: str, outcomes: dict[str, Any], undisturbed: dict[str, Any]
) -> None:
    kind, moments = CASES_OF_LOSS[name]
    assert_same(outcomes[name], undisturbed[kind])
    stories = outcomes[name][2]
    assert {worker for story in stories for worker in story.lost} == {moment[0] for moment in moments}, moments
    for story in stories:
        assert story.lost == story.replaced
        assert not story.gone
        assert story.plan is None
        assert story.step - story.snapshot_step == story.redone <= 2 * 4 + 1


def test_evaluating_and_saving_go_on_and_each_loss_is_one_logged_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moments = [(1, "kill", "call", 3 * 8 + 2), (0, "kill", "get", 1)]
    with disturbed(moments) as pool, caplog.at_level(logging.WARNING, "onebox"):
        with trainer_on(pool, pipelined(), snapshot_every=100) as trainer:
            for batch in batches()[:3]:
                trainer.step(*batch)
            found = trainer.evaluate(iter(batches()[:4]))
            trainer.save(tmp_path)
            assert len(trainer.recoveries) == 2
            assert [str(story) for story in trainer.recoveries] == [record.getMessage() for record in caplog.records]
        case = CASES["dropping"]
        model = case.model()
        optimizer = OPTIMIZERS["adamw"](model)
        with onebox.Trainer.resume(tmp_path, model, case.loss, optimizer, pool=pool) as resumed:
            assert resumed.steps_done == 3
            assert resumed.evaluate(batches()[:4]) == found


def test_a_worker_that_dies_again_while_it_is_brought_back(
    undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, again = LocalSource._start, [(Fault("kill", "put", 2),), (Fault("kill", "call", 3),)]

    def faulty(self: LocalSource, number: int, request: Any, key: str, folder: str, faults: Any) -> Any:
        return start(self, number, request, key, folder, faults or (again.pop() if again else ()))

    with disturbed([(1, "kill", "reduce", 6)]) as pool:
        monkeypatch.setattr(LocalSource, "_start", faulty)
        found = run(pool, data_parallel())
    assert_same(found, undisturbed["workers"])
    assert not again
    assert sum(story.attempts for story in found[2]) == 3


def test_what_is_left_goes_on_with_the_same_micro_batches(
    undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSource, "replace", lambda *_: None)
    with disturbed([(1, "kill", "reduce", 6)]) as pool:
        losses, weights, (story,) = run(pool, data_parallel())
        assert pool.present == (0,)
    assert (story.gone, story.replaced) == ((1,), ())
    assert story.plan is not None
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed["workers"][0]))
    for name, tensor in undisturbed["workers"][1].items():
        torch.testing.assert_close(weights[name], tensor)


def test_a_stage_that_nobody_can_compute_any_more_is_one_error_and_the_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSource, "replace", lambda *_: None)
    with disturbed([(1, "kill", "optimizerstep", 4)]) as pool:
        trainer = trainer_on(pool, pipelined())
        for batch in batches()[:3]:
            trainer.step(*batch)
        saved = trainer.save(tmp_path)
        with pytest.raises(PlanError, match="stage 1 was on device 1") as caught:
            trainer.step(*batches()[3]).item()
        for call in (trainer.tensors, lambda: trainer.step(*batches()[3]), lambda: trainer.save(tmp_path)):
            with pytest.raises(OneboxError) as again:
                call()
            assert again.value is caught.value
        case = CASES["dropping"]
        model = case.model()
        with onebox.Trainer.resume(
            saved, model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, plan=Plan.data_parallel([0], [1.0])
        ) as resumed:
            assert resumed.step(*batches()[3]).item() > 0


def test_settings_that_cannot_be_are_refused() -> None:
    with open_pool("cpu*1", threads=1) as pool:
        for options in ({"recover": False, "snapshot_every": 3}, {"snapshot_every": 0}):
            with pytest.raises(onebox.errors.UsageError, match="snapshot_every"):
                trainer_on(pool, data_parallel(1), **options)
