"""Steps with a staleness of one give the result of one process that applies each gradient one step late, in float64."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import onebox
from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.memory.timeline import memory_timeline
from onebox.engine.workload import index_ranges
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.engine.workload.delay_compensation import DELAYS
from onebox.errors import OperatorError, UsageError
from onebox.plan import ASYNC, ActivationPolicy, Plan, Stage
from onebox.report.tables.memory import compare_memory
from tests.kit.late import train_late
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.reference import Outcome, assert_same, drawing
from tests.kit.stages import SEED, staged, tensors_of
from tests.kit.trainer_arguments import grouped

SIZES = (6, 6, 6, 5, 6, 6, 6)
"""Samples of each batch; the odd one is of another shape, and of fewer micro-batches."""


DEVICES = 4
"""Workers of the pool."""


def late(name: str, plan: Plan, optimizer: str, sizes: Sequence[int] = SIZES, **options: Any) -> Outcome:
    """Train a case in this process, each gradient applied one step late."""
    case = CASES[name]
    model = case.model()
    around = drawing(SEED) if case.draws else None

    batches = case.batches(list(sizes))
    return train_late(model, case.loss, OPTIMIZERS[optimizer](model), batches, plan, around=around, **options)


def run(
    pool: onebox.Pool,
    name: str,
    plan: Plan,
    optimizer: str,
    sizes: Sequence[int] = SIZES,
    between: Callable[[onebox.Trainer, int], object] = lambda trainer, step: None,
    **options: Any,
) -> tuple[Outcome, dict[int, int]]:
    """Train a case on a pool; return how it went, and the delays that the workers measured."""
    case = CASES[name]
    model = case.model()
    arguments = {"seed": SEED, "check_every": 1, "plan": plan, "staleness": 1, "delay": "none", "warm_up": 0, **options}
    with onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), **grouped(pool=pool, **arguments)) as trainer:
        losses = []
        for step, batch in enumerate(case.batches(list(sizes))):
            losses.append(trainer.step(*batch))
            between(trainer, step)
        found = tensors_of(trainer)
        norms = [loss.gradient_norm or 0.0 for loss in losses]
        delays = dict(trainer.delays)
    return Outcome(losses=[float(loss) for loss in losses], norms=norms, tensors=found), delays


@pytest.mark.feature("Late gradients: Apply gradients one step late")
@pytest.mark.parametrize(
    ("name", "devices", "optimizer"),
    [
        ("cnn", ((0, 1), (2, 3)), "adamw"),
        ("tied", (0, 1, 2), "sgd"),
    ],
)
def test_every_gradient_is_applied_one_step_late(
    name: str, devices: Sequence[int | Sequence[int]], optimizer: str, pool: onebox.Pool
) -> None:
    """Batch norm on replicas, a weight in all stages, a batch of another shape; others are in the covering array."""
    plan = staged(name, devices, micro_batch=2, schedule=ASYNC)
    found, delays = run(pool, name, plan, optimizer)
    assert_same(found, late(name, plan, optimizer))
    assert delays == {0: 1, 1: len(SIZES) - 1}


@pytest.mark.parametrize("devices", [(0,), (2, 0, 1)], ids=str)
def test_averaging_hides_under_the_next_step(devices: Sequence[int], pool: onebox.Pool) -> None:
    """Plans of one stage: everything of a step is done in its window but the sums and the update."""
    plan = Plan.data_parallel(devices, [1.0] * len(devices), micro_batch=2)
    found, delays = run(pool, "cnn", plan, "adamw")
    assert_same(found, late("cnn", plan, "adamw"))
    assert delays == {0: 1, 1: len(SIZES) - 1}


@pytest.mark.parametrize("layout", ["stages", "replicas", "tied"])
def test_norms_and_clipping(layout: str, pool: onebox.Pool) -> None:
    """The norm of a step comes with the window of the next one."""
    name = "tied" if layout == "tied" else "cnn"
    plan = Plan.data_parallel((0, 1), (1.0, 1.0), micro_batch=2)
    if layout != "replicas":
        plan = staged(name, (0, (1, 2), 3) if layout == "stages" else (0, 1, 2), micro_batch=2, schedule=ASYNC)
    found, _ = run(pool, name, plan, "sgd", SIZES[:6], clip_grad_norm=0.5)
    expected = late(name, plan, "sgd", SIZES[:6], max_norm=0.5)
    assert_same(found, expected)
    assert found.norms == pytest.approx(expected.norms, abs=1e-10)


def test_looking_at_a_run_changes_nothing(pool: onebox.Pool) -> None:
    """The state, an evaluation, a norm and a wait each end the overlap; the next step has the older weights still."""
    plan = staged("cnn", (0, 1, 2), micro_batch=2, schedule=ASYNC)
    case = CASES["cnn"]

    def look(trainer: onebox.Trainer, step: int) -> None:
        if step == 1:
            trainer.tensors()
        if step in (3, 4):
            trainer.evaluate(case.batches([4]))
        if step == 5:
            trainer.wait()
            trainer.optimizer_state()

    plain, _ = run(pool, "cnn", plan, "sgd")
    found, delays = run(pool, "cnn", plan, "sgd", between=look)
    assert found.losses == plain.losses
    assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in found.tensors.items())
    assert delays == {0: 1, 1: len(SIZES) - 1}


@pytest.mark.feature("Late gradients: Correct late gradients after exact first steps")
def test_exact_steps_come_first(pool: onebox.Pool) -> None:
    plan = staged("cnn", (0, 1), micro_batch=2, schedule=ASYNC)
    found, delays = run(pool, "cnn", plan, "sgd", warm_up=3)
    assert_same(found, late("cnn", plan, "sgd", warm_up=3))
    assert delays == {0: 1, 1: len(SIZES) - 4}


def test_a_schedule_of_learning_rates(pool: onebox.Pool) -> None:
    """A gradient is applied with the learning rate of its own step."""
    plan = staged("mlp", (0, 1), micro_batch=2, schedule=ASYNC)
    case = CASES["mlp"]
    rates = [0.1, 0.1, 0.02, 0.3, 0.3, 0.001, 0.2]
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0], momentum=0.9)
    left = iter([*rates[1:], 0.0])

    def change() -> None:
        optimizer.param_groups[0]["lr"] = next(left)

    expected = train_late(model, case.loss, optimizer, case.batches(list(SIZES)), plan, after_step=change)
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0], momentum=0.9)
    with onebox.Trainer(
        model, case.loss, optimizer, pool=pool, plan=plan, stale=onebox.StaleGradients(correction="none", warm_up=0)
    ) as trainer:
        for batch, rate in zip(case.batches(list(SIZES)), rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            trainer.step(*batch)
        tensors = tensors_of(trainer)
    assert_same(Outcome(losses=expected.losses, norms=[], tensors=tensors), expected)


@pytest.mark.parametrize(
    ("name", "devices", "delay"),
    [("tied", (0, 1, 0), "none"), *(("mlp", (0, (1, 2)), delay) for delay in DELAYS if delay not in ("auto", "none"))],
)
def test_memory_is_what_was_predicted(
    name: str, devices: Sequence[int | Sequence[int]], delay: Any, pool: onebox.Pool
) -> None:
    """The worker's account of all versions and of what two steps have under way, to the byte, at every instruction."""
    plan = staged(name, devices, micro_batch=2, schedule=ASYNC)
    case, model = CASES[name], CASES[name].model()
    (batch,) = case.batches([4])
    arguments = {"plan": plan, "staleness": 1, "delay": delay, "warm_up": 0, "check_every": 0}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **grouped(pool=pool, **arguments)) as trainer:
        for _ in range(4):
            trainer.step(*batch)
        trainer.wait()
        curves = trainer.predicted_curves(*batch)
        found = compare_memory(curves, trainer.events(), 3)
    assert [(one.device, one.difference_bytes, one.where) for one in found] == [
        (n, 0, "") for n in sorted(plan.devices)
    ]
    trained = frozenset(f"model.{key}" for key, _ in model.named_parameters())
    recipe = CaptureSpec(model=model, loss=case.loss, metrics={}, precision="fp32", device_type="cpu", trained=trained)
    job = TrainingJob(
        captures=Captures(recipe),
        optimizer=OPTIMIZERS["sgd"](model),
        batch=as_batch(*batch),
        devices=pool.devices,
        delay=delay,
    )
    for device, contents in job.contents(plan).items():
        forecast, seen = memory_timeline(device, contents), curves[device]
        assert [use.used_bytes for use in forecast.uses] == [use.used_bytes for use in seen.uses], "for nobody, too"


@pytest.mark.parametrize("delay", ["predict", "feedback"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(delay: str, pool: onebox.Pool, tmp_path: Path) -> None:
    """A checkpoint has the older weights, too, and the expected ones."""
    plan = staged("cnn", (0, (1, 2)), micro_batch=2, schedule=ASYNC)
    case = CASES["cnn"]
    expected, _ = run(pool, "cnn", plan, "sgd", delay=delay)

    batches = case.batches(list(SIZES))
    model = case.model()
    arguments = {"pool": pool, "plan": plan, "staleness": 1, "delay": delay, "warm_up": 0, "seed": SEED}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **grouped(**arguments)) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches[:5]]
        trainer.save(tmp_path)
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), pool=pool) as trainer:
        assert trainer.stale == onebox.StaleGradients(correction=delay, warm_up=0)
        losses += [float(trainer.step(*batch)) for batch in batches[5:]]
        found = tensors_of(trainer)
        assert trainer.delays == {1: len(SIZES) - 5}
    assert losses == expected.losses
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.items())


def test_a_run_that_lost_a_worker_has_the_bits_of_one_that_lost_none() -> None:
    """Snapshots have the older weights, too, and the expected ones; the steps since are done again."""
    plan = staged("cnn", (0, 1, 2), micro_batch=2, schedule=ASYNC)
    outcomes = []
    for killed in (False, True):

        def kill(trainer: onebox.Trainer, step: int, *, killed: bool = killed) -> None:
            if killed and step == 5:
                os.kill(trainer.pool.process_ids[1], signal.SIGKILL)

        with onebox.open("cpu*3") as pool:
            outcome, delays = run(
                pool, "cnn", plan, "sgd", between=kill, delay="predict", recover=True, snapshot_every=3, check_every=0
            )
            outcomes.append(outcome)
            assert delays == {0: 1, 1: len(SIZES) - 1}
    assert outcomes[0].losses == outcomes[1].losses
    assert all(torch.equal(tensor, outcomes[0].tensors[name]) for name, tensor in outcomes[1].tensors.items())


@pytest.mark.feature("Data parallel: Overlap averaging with the next step")
@pytest.mark.parametrize("layout", ["replicas", "stages", "tied", "sharded", "clipped", "folded"])
def test_exact_steps_that_overlap_have_the_same_bits(layout: str, pool: onebox.Pool) -> None:
    """The update of a step comes in the next one, bucket by bucket, and the result is that of one process."""
    name = {"tied": "tied", "folded": "tied"}.get(layout, "cnn")
    plan = {
        "replicas": lambda: Plan.data_parallel((0, 1, 2), (1.0, 1.0, 1.0), micro_batch=2),
        "stages": lambda: staged(name, ((0, 1), (2, 3)), micro_batch=2),
        "tied": lambda: staged(name, (0, 1, 2), micro_batch=2, schedule="zb-h1"),
        "sharded": lambda: staged(name, ((0, 1), (2, 3)), micro_batch=2, optimizer="sharded"),
        "clipped": lambda: staged(name, (0, (1, 2)), micro_batch=2),
        "folded": lambda: staged(name, (0, 1, 0), micro_batch=2, schedule="interleaved"),
    }[layout]()
    options = {"clip_grad_norm": 0.5} if layout == "clipped" else {}
    plain, _ = run(pool, name, plan, "adamw", staleness=0, **options)
    found, delays = run(pool, name, plan, "adamw", staleness=0, overlap=True, **options)
    assert (found.losses, found.norms, delays) == (plain.losses, plain.norms, {})
    assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in found.tensors.items())


def test_recomputed_stages(pool: onebox.Pool) -> None:
    """What is drawn at random is drawn again as it was, a step later, too."""
    plan = staged("dropping", (0, 1, 2), micro_batch=2, schedule=ASYNC)
    plan = replace(plan, stages=tuple(replace(stage, policy="recompute") for stage in plan.stages))
    found, _ = run(pool, "dropping", plan, "sgd", SIZES[:5])
    assert_same(found, late("dropping", plan, "sgd", SIZES[:5]))


def test_what_fails_in_a_window_says_where(pool: onebox.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is out of range, behind steps that were right: the loss names stage, operator and worker."""
    monkeypatch.setattr(index_ranges, "MOST_ELEMENTS", 0)  # as if the batch was too large to be looked at before
    plan = staged("dropping", (0, 1), micro_batch=2, schedule=ASYNC)
    case = CASES["dropping"]
    model = case.model()
    arguments = {"pool": pool, "plan": plan, "staleness": 1, "delay": "none", "warm_up": 0}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **grouped(**arguments)) as trainer:
        ((inputs, targets),) = case.batches([4])
        trainer.step(inputs, targets)
        loss = trainer.step(torch.full_like(inputs, 10**6), targets)
        with pytest.raises(OperatorError, match="embedding") as caught:
            loss.item()
        assert (caught.value.worker, caught.value.stage) == (0, 0)


def fated(policy: ActivationPolicy) -> Plan:
    """Return an asynchronous plan of a stage with a policy and another one."""
    first, second = (Stage(segments=(name,), replicas=((0,),), shares=(1.0,)) for name in ("first", "second"))
    return Plan(stages=(replace(first, policy=policy), second), micro_batch=2, schedule=ASYNC)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": 1, "sync": "client"}, "sync='client'"),
        ({"overlap": True, "update": "host"}, "update='host'"),
        ({"staleness": 1, "plan": fated("offload")}, "stages offloaded or swapped"),
        ({"staleness": 1, "plan": fated("swap")}, "stages offloaded or swapped"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str, pool: onebox.Pool) -> None:
    case = CASES["mlp"]
    model = case.model()
    with pytest.raises(UsageError, match=message):
        onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **grouped(pool=pool, **options))


def test_a_schedule_that_ends_with_each_step_is_refused(pool: onebox.Pool) -> None:
    case = CASES["mlp"]
    model = case.model()
    for schedule, staleness in (("1f1b", 1), (ASYNC, 0)):
        with pytest.raises(UsageError, match=schedule):
            onebox.Trainer(
                model,
                case.loss,
                OPTIMIZERS["sgd"](model),
                **grouped(pool=pool, plan=staged("mlp", (0, 1), micro_batch=2, schedule=schedule), staleness=staleness),
            )
