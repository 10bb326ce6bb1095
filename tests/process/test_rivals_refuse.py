"""Where PyTorch's own pipeline is wrong or refuses, ours is right.

What is said here of ``torch.distributed.pipelining`` was measured with PyTorch 2.13 on CPU, or stands in its code or in
its issues, which are named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onebox
from onebox.errors import UsageError
from onebox.plan import Plan, Stage
from tests.kit.models import CASES, adamw, sgd
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import SEED, outcome, reference, run, segments, staged

SIZES = [8, 5, 12, 8, 2, 8]


DEVICES = 4
"""Workers of the pool."""


def same(pool: onebox.Pool, name: str, plan: Plan, sizes: list[int], **options: Any) -> Outcome:
    """Require that a plan gives the result of one process; return what it gave."""
    clip = options.pop("clip_grad_norm", None)
    found = run(pool, name, plan, sizes, clip_grad_norm=clip, **options)
    wanted = reference(name, plan, sizes, max_norm=clip, **options)
    assert_same(found, wanted)
    if clip is not None:
        assert found.norms == pytest.approx(wanted.norms, abs=1e-10)
    return found


# ---- what a model may have


@pytest.mark.feature("Pipelines: Tie weights and skip connections across stages")
@pytest.mark.parametrize(("name", "devices"), [("tied", (0, 1, 1, 0)), ("gpt2", (0, 1)), ("tied", ((0, 1), (2, 3)))])
def test_tied_weights(name: str, devices: Any, pool: onebox.Pool) -> None:
    """PyTorch's pipeline keeps a copy in each stage, with a part of the gradient each, and says nothing (measured)."""
    plan = staged(name, devices)
    holding = [s for s in plan.stages if any(part in ("model.transformer.wte", "model.lm_head") for part in s.segments)]
    assert name == "tied" or len(holding) == 2
    same(pool, name, plan, SIZES)


@pytest.mark.feature("Pipelines: Tie weights and skip connections across stages")
@pytest.mark.parametrize(("name", "devices"), [("unet", (3, 1, 0, 2)), ("resnet", (0, 1)), ("resnet", ((0, 1), (2,)))])
def test_skip_connections(name: str, devices: Any, pool: onebox.Pool) -> None:
    """PyTorch's splitter refuses them (pytorch issue 127964); here they go straight to where they are read."""
    sizes = [size for size in SIZES if name == "unet" or size > 2]  # batch norm of one value has no variance
    same(pool, name, staged(name, devices), sizes)


def test_stages_that_are_no_run_of_layers(pool: onebox.Pool) -> None:
    """Branches side by side, each in a stage of its own; PyTorch's stages are a chain."""
    names = segments("inception")
    first = [[n for n in names if n.startswith(f"model.blocks.0.{branch}")] for branch in range(4)]
    rest = [n for n in names if n not in {*first[0], *first[1], *first[2], "model.stem"}]
    parts = [["model.stem", *first[0]], first[1], first[2], rest]
    stages = tuple(Stage(segments=tuple(part), replicas=((d,),), shares=(1.0,)) for d, part in enumerate(parts))
    same(pool, "inception", Plan(stages=stages, micro_batch=3, schedule="zb-h1"), SIZES)


def test_batch_norm_in_a_replicated_stage(pool: onebox.Pool) -> None:
    """Running statistics are those of one process, though replicas see other micro-batches; DDP keeps rank 0's."""
    for shares in (((1.0, 1.0), (1.0, 2.0)), ((3.0, 1.0), (1.0, 0.0))):
        same(pool, "cnn", staged("cnn", ((0, 1), (2, 3)), shares=shares, micro_batch=2), [8, 6, 4, 12, 2])


def test_clipping_over_stages(pool: onebox.Pool) -> None:
    """The norm is of the gradients of all stages; in PyTorch's pipeline each rank has those of its own stage alone."""
    for devices in ((0, 1, 2), ((0, 1), (2, 3)), (0, 1, 1, 0)):
        found = same(pool, "gpt2", staged("gpt2", devices), SIZES, clip_grad_norm=0.05)
        assert min(found.norms) > 0.05, "it does clip"


def test_random_numbers_do_not_depend_on_the_plan(pool: onebox.Pool) -> None:
    """Dropout draws the same on one device and in any stages; in PyTorch it depends on the rank's generator."""
    alone = Plan.data_parallel([0], [1.0], micro_batch=3)
    expected = run(pool, "dropping", alone, SIZES)
    plans = [
        staged("dropping", (0, 1), schedule="gpipe"),
        staged("dropping", (2, 1, 0), schedule="zb-h1"),
        staged("dropping", ((0, 1), (2, 3))),
    ]
    for plan in plans:
        assert_same(run(pool, "dropping", plan, SIZES), expected)
    assert run(pool, "dropping", plans[0], SIZES, seed=SEED + 1).losses != expected.losses


# ---- what a batch may be


def test_a_batch_size_that_changes_from_step_to_step(pool: onebox.Pool) -> None:
    """PyTorch's stages fix the shapes of what they send and receive with the first step."""
    same(pool, "vit", staged("vit", (0, 1, 2, 3), micro_batch=2), [8, 3, 12, 1, 8, 5])


@pytest.mark.feature("Data parallel: Give uneven devices uneven shares")
@pytest.mark.parametrize(
    "devices", [(0, (1, 2)), ((0, 1), 2, 3), ((0, 1, 2), 3), (3, (0, 1, 2)), ((0, 1), (1, 0))], ids=str
)
def test_uneven_replicas(devices: Any, pool: onebox.Pool) -> None:
    """Each stage has replicas of its own; PyTorch composes a pipeline with replicas of all of it alone."""
    for name in ("mlp", "unet"):
        if len(devices) <= len(segments(name)):
            same(pool, name, staged(name, devices, micro_batch=2), [8, 6, 2, 12])


# ---- what can be done with a run


@pytest.mark.feature("Checkpoints: Resume on other devices or with another plan")
def test_a_run_goes_on_under_another_plan(pool: onebox.Pool, tmp_path: Path) -> None:
    """Two stages, then one device, then two by two: it ends as if nothing had happened."""
    name, sizes = "unet", [8, 5, 8, 12, 8, 3]
    case = CASES[name]
    plans = [
        staged(name, (0, 1), schedule="zb-h1"),
        Plan.data_parallel([2], [1.0], micro_batch=3),
        staged(name, ((3, 0), (1, 2))),
    ]
    batches = case.batches(sizes)
    losses: list[float] = []
    model = case.model()
    trainer = onebox.Trainer(model, case.loss, adamw(model), pool=pool, plan=plans[0], seed=SEED)
    for place, plan in enumerate(plans):
        if place:
            model = case.model()
            trainer = onebox.Trainer.resume(tmp_path, model, case.loss, adamw(model), pool=pool, plan=plan)
            assert trainer.steps_done == 2 * place
        with trainer:
            losses += [trainer.step(*batch).item() for batch in batches[2 * place : 2 * place + 2]]
            trainer.save(tmp_path)
            found = outcome(trainer, losses)
    assert_same(found, reference(name, plans[0], sizes))


def test_a_resumed_run_keeps_its_stages_unless_told_otherwise(pool: onebox.Pool, tmp_path: Path) -> None:
    case = CASES["mlp"]
    plan = staged("mlp", (2, 1), schedule="zb-h1")
    batches = case.batches([8, 8])
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pool, plan=plan) as trainer:
        trainer.step(*batches[0]).item()
        trainer.save(tmp_path)
        trainer.step(*batches[1]).item()
        straight = trainer.tensors()
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, sgd(model), pool=pool) as trainer:
        trainer.step(*batches[1]).item()
        assert trainer.plan == plan
        found = trainer.tensors()
    assert all(torch.equal(found[name], tensor) for name, tensor in straight.items())


@pytest.mark.parametrize("name", ["cnn", "unet", "dropping"])
def test_evaluation_under_a_plan_of_stages(name: str, pool: onebox.Pool) -> None:
    """Before and between steps; it changes nothing, draws nothing, and takes batches of any size."""
    case = CASES[name]
    model, plain = case.model(), case.model().eval().requires_grad_(False)
    batches = case.batches([9, 4, 1])
    plan = staged(name, ((0, 1), 2))
    with onebox.Trainer(model, case.loss, sgd(model), pool=pool, plan=plan, metrics={"again": case.loss}) as trainer:
        first = trainer.evaluate(batches)
        total = sum(len(y) * float(case.loss(plain(x), y)) for x, y in batches)
        assert (first.loss, first.samples) == (pytest.approx(total / 14, abs=1e-10), 14)
        assert first.metrics["again"] == pytest.approx(first.loss, abs=1e-12)
        trainer.step(*case.batches([8])[0]).item()
        before = trainer.tensors()
        again = trainer.evaluate(batches)
        assert trainer.evaluate(batches) == again
        after = trainer.tensors()
        assert all(torch.equal(before[n], after[n]) for n in before)
        trainer.pull()
    trained = model.eval().requires_grad_(False)
    total = sum(len(y) * float(case.loss(trained(x), y)) for x, y in batches)
    assert again.loss == pytest.approx(total / 14, abs=1e-10)


# ---- plans that cannot be


def wrong(change: str) -> Plan:
    """Return a plan for the MLP with something wrong in it."""
    good = staged("mlp", (0, 1, 2), micro_batch=4)
    first, second, third = good.stages
    match change:
        case "another model":
            return staged("cnn", (0, 1, 2), micro_batch=4)
        case "a segment too few":
            return Plan(stages=(first, second), micro_batch=4)
        case "another order":
            return Plan(stages=(second, first, third), micro_batch=4)
        case "deadlock":
            rows = ("0: 0F0 0B0 0F1 0B1", "1: 1F1 1F0 1B0 1B1", "2: 2F0 2B0 2F1 2B1")
            return Plan(stages=good.stages, micro_batch=4, schedule="table", table=rows)
        case "circle":
            rows = ("0: 0F0 0B0 0F1 0B1", "1: 1F0 1F1 1B0 1B1", "2: 2F0 2F1 2B0 2B1")
            return Plan(stages=good.stages, micro_batch=4, schedule="table", table=rows)
        case "missing action":
            rows = ("0: 0F0 0F1 0B0", "1: 1F0 1B0 1F1 1B1", "2: 2F0 2B0 2F1 2B1")
            return Plan(stages=good.stages, micro_batch=4, schedule="table", table=rows)
        case _:
            raise AssertionError(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("another model", r"for another model: it names segment 'model\.4'.*the segments are model\.0, model\.2"),
        ("a segment too few", r"for another model: it leaves out 'model\.5'"),
        ("another order", r"stage 0 \(segment 'model\.2'\) needs a value of stage 1"),
        ("deadlock", "1F0 comes after 1F1 on device 1; forwards of a stage ascend"),
        ("circle", "would wait for ever: 0B0 on device 0 waits for 1B0"),
        ("missing action", r"0B1 \(or 0I1 and 0W1\) is missing on device 0"),
    ],
)
def test_a_plan_that_cannot_be_is_one_clear_error_and_the_pool_stays(
    change: str, message: str, pool: onebox.Pool
) -> None:
    """Before anything runs; PyTorch's pipeline waits until a timeout of the process group ends every rank."""
    case = CASES["mlp"]
    ((x_BD, y_B),) = case.batches([8])
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pool, plan=wrong(change)) as trainer:
        for _ in range(2):
            with pytest.raises(UsageError, match=message):
                trainer.step(x_BD, y_B)
        assert trainer.steps_done == 0
    same(pool, "mlp", staged("mlp", (0, 1)), [4])


def test_a_plan_for_more_devices_than_there_are_is_refused_at_once(pool: onebox.Pool) -> None:
    model = CASES["mlp"].model()
    with pytest.raises(UsageError, match="the plan uses device 4, but the pool has 4, numbered from 0"):
        onebox.Trainer(model, CASES["mlp"].loss, sgd(model), pool=pool, plan=staged("mlp", (0, 4)))


@pytest.mark.feature("Plans: Train by a plan file")
def test_a_plan_may_come_from_a_file(pool: onebox.Pool, tmp_path: Path) -> None:
    plan = staged("mlp", (0, 1), schedule="zb-h1")
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    case = CASES["mlp"]
    model = case.model()
    with onebox.Trainer(model, case.loss, sgd(model), pool=pool, plan=path) as trainer:
        trainer.step(*case.batches([8])[0]).item()
        assert trainer.plan == plan
