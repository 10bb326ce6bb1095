"""Late gradients wherever layers and the optimizer's state are: the result of one process, in float64 to 1e-10."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import onebox
from onebox.plan import ASYNC, Plan, Stage
from onebox.report.tables.memory import compare_memory
from tests.kit.late import train_late
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, drawing
from tests.kit.stages import SEED, segments, staged, tensors_of
from tests.kit.trainer_arguments import grouped
from tests.process.test_precision import AGREE, Rounding, batches, furthest, narrowed, sgd

SIZES = (4, 4, 3, 4, 4, 4)
"""Samples of each batch; the odd one has a smaller micro-batch."""

WIDE = (6, 6, 6, 6)
HALF = 3


def layout(name: str, which: str) -> Plan:
    """Return a plan of a case."""
    names = segments(name)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]

    def stages(*replicas: tuple[tuple[int, ...], ...]) -> tuple[Stage, ...]:
        parts = (first, second) if len(replicas) > 1 else ((),)
        pairs = zip(parts, replicas, strict=True)
        return tuple(Stage(segments=part, replicas=own, shares=(1.0,) * len(own)) for part, own in pairs)

    late = {"micro_batch": 2, "schedule": ASYNC}
    match which:
        case "split":
            return Plan(stages=stages(((0, 1),)), micro_batch=2)
        case "split in stages":
            return Plan(stages=stages(((0, 1),), ((2, 3),)), **late)
        case "split behind replicas":
            return Plan(stages=stages(((2,), (3,)), ((0, 1),)), **late)
        case "split twice, shared out":
            return Plan(stages=stages(((0, 1), (2, 3))), micro_batch=2, optimizer="sharded")
        case "shared out":
            return Plan(stages=stages(((0,), (1,), (2,))), micro_batch=2, optimizer="sharded")
        case "shared out in stages":
            return staged(name, ((0, 1), (2, 3)), optimizer="sharded", **late)
        case "shared out, tied":
            return staged(name, (0, (1, 2), 3), optimizer="sharded", **late)
        case "stages":
            return staged(name, (0, 1, 2), **late)
        case "on the host":
            return staged(name, (0, (1, 2)), update="host", **late)
    raise AssertionError(which)


def reference(name: str, plan: Plan, optimizer: str, **options: Any) -> Outcome:
    case, model = CASES[name], CASES[name].model()

    around = drawing(SEED) if case.draws else None
    given = case.loss, OPTIMIZERS[optimizer](model), case.batches(list(SIZES)), plan
    return train_late(model, *given, around=around, **options)


def trainer_on(pool: onebox.Pool, name: str, plan: Plan, optimizer: str, delay: str, **options: Any) -> onebox.Trainer:
    case, model = CASES[name], CASES[name].model()
    arguments = {"seed": SEED, "check_every": 1, "staleness": 1, "delay": delay, "warm_up": 1, **options}
    return onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), **grouped(pool=pool, plan=plan, **arguments))


def steps(trainer: onebox.Trainer, name: str, first: int = 0, last: int = len(SIZES)) -> Outcome:
    losses = [trainer.step(*batch) for batch in CASES[name].batches(list(SIZES))[first:last]]
    tensors = tensors_of(trainer)
    norms = [loss.gradient_norm or 0.0 for loss in losses]
    return Outcome(losses=[float(loss) for loss in losses], norms=norms, tensors=tensors)


def predicted(trainer: onebox.Trainer, name: str, step: int) -> None:
    """Require that a step took the memory that was predicted, at every instruction, on every device."""
    curves = trainer.predicted_curves(*CASES[name].batches([SIZES[step]])[0])
    found = compare_memory(curves, trainer.events(), step)
    assert [one.device for one in found] == sorted(curves)
    assert [(one.device, one.difference_bytes, one.where) for one in found] == [(one.device, 0, "") for one in found]


RUNS = [
    ("mlp", "split", "adamw", "both"),
    ("cnn", "split in stages", "sgd", "none"),
    ("mlp", "split behind replicas", "adam-in-groups", "feedback"),
    ("mlp", "split twice, shared out", "sgd", "predict"),
    ("mlp", "shared out", "adamw", "none"),
    ("mlp", "shared out in stages", "sgd", "extrapolate"),
    ("tied", "shared out, tied", "adamw", "predict"),
    ("mlp", "on the host", "adamw", "both"),
]


@pytest.mark.feature("Late gradients: Combine with splits, shards and host updates")
@pytest.mark.parametrize(("name", "which", "optimizer", "delay"), RUNS)
def test_late_gradients_wherever_things_are(name: str, which: str, optimizer: str, delay: str, pools: Pools) -> None:
    """Replicas are compared after each step; the memory is the predicted one."""
    plan = layout(name, which)
    clipping = {"clip_grad_norm": 0.5} if which == "split in stages" or "tied" in which else {}
    with trainer_on(pools(4), name, plan, optimizer, delay, **clipping) as trainer:
        found = steps(trainer, name)
        delays = dict(trainer.delays)
        predicted(trainer, name, len(SIZES) - 1)
    expected = reference(name, plan, optimizer, delay=delay, warm_up=1, max_norm=clipping.get("clip_grad_norm"))
    assert_same(found, expected)
    assert delays == {0: 1, 1: len(SIZES) - 2}


@pytest.mark.parametrize(("which", "devices"), [("stages", (0, (1, 2))), ("replicas", (0, 1))])
def test_stages_of_bf16_round_the_version_that_a_step_is_computed_with(which: str, devices: Any, pools: Pools) -> None:
    """Once a step, though what is left of it is computed a window later; the same products as in one process."""
    plan = staged("cnn", devices, micro_batch=3, schedule=ASYNC)
    plan = narrowed(plan if which == "stages" else Plan.data_parallel(devices, (1.0, 1.0), micro_batch=3))
    case, model = CASES["cnn"], CASES["cnn"].model().float()
    given: dict[str, Any] = {"pool": pools(4), "plan": plan, "staleness": 1, "delay": "predict", "warm_up": 0}
    with onebox.Trainer(model, case.loss, sgd(model), **grouped(**given)) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches(case, WIDE)]
        tensors = tensors_of(trainer)
        for one in compare_memory(trainer.predicted_curves(*batches(case, WIDE)[-1]), trainer.events(), len(WIDE) - 1):
            assert (one.difference_bytes, one.where) == (0, ""), one.device
    found = Outcome(losses=losses, norms=[], tensors=tensors)
    expected = []
    for around in (Rounding(), contextlib.nullcontext()):
        model = case.model().float()
        late = model, case.loss, sgd(model), batches(case, WIDE), lambda size: [3] * (size // 3)
        with around:
            expected.append(train_late(*late, delay="predict"))
    rounded, wide = expected
    assert furthest(found, rounded) < AGREE < furthest(found, wide) / 5


def test_a_checkpoint_of_a_state_that_is_shared_out_has_its_versions(pools: Pools, tmp_path: Path) -> None:
    """On other replicas, too, which hand out what each of them steps."""
    plan = layout("mlp", "shared out")
    with trainer_on(pools(4), "mlp", plan, "adamw", "both") as trainer:
        losses = steps(trainer, "mlp", 0, HALF).losses
        saved = trainer.save(tmp_path)
    case, model = CASES["mlp"], CASES["mlp"].model()
    two = replace(plan, stages=(replace(plan.stages[0], replicas=((3,), (1,)), shares=(1.0, 1.0)),))
    given = saved, model, case.loss, OPTIMIZERS["adamw"](model)
    with onebox.Trainer.resume(*given, pool=pools(4), plan=two) as trainer:
        found = steps(trainer, "mlp", HALF)
    found = Outcome(losses=[*losses, *found.losses], norms=[], tensors=found.tensors)
    assert_same(found, reference("mlp", plan, "adamw", delay="both", warm_up=1))
