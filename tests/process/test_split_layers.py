"""Layers split over workers give the result of one process: alone, replicated, and in stages, in float64 to 1e-10."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import onebox
from onebox.errors import UsageError
from onebox.plan import ActivationPolicy, Plan, Stage
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.reference import assert_same
from tests.kit.stages import reference, run, segments

SIZES = (6, 6, 5, 6)
"""Samples of the steps; the third has a micro-batch that is smaller than the others."""


DEVICES = 4
"""Workers of the pool."""


def split(name: str, layout: str) -> Plan:
    """Return a plan that splits the layers of a case."""
    names = segments(name)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]

    def stage(part: tuple[str, ...], *replicas: tuple[int, ...]) -> Stage:
        return Stage(segments=part, replicas=replicas, shares=(1.0,) * len(replicas))

    stages = {
        "over two": (stage((), (0, 1)),),
        "over three": (stage((), (0, 1, 2)),),
        "twice over two": (stage((), (0, 1), (2, 3)),),
        "both stages": (stage(first, (0, 1)), stage(second, (2, 3))),
        "behind replicas": (stage(first, (2,), (3,)), stage(second, (0, 1))),
    }
    return Plan(stages=stages[layout], micro_batch=2, schedule="zb-h1" if layout == "behind replicas" else "1f1b")


RUNS = [
    ("mlp", "over three", "adamw"),
    ("cnn", "twice over two", "sgd"),
    ("unet", "over two", "adamw"),
    ("gpt2", "both stages", "sgd"),
    ("vit", "behind replicas", "adamw"),
    ("tied", "over two", "adam-in-groups"),
]
"""Each layout and most models once; that split layers go with all other settings is in ``test_covering_array``."""


@pytest.mark.feature("Split layers: Split layers over devices")
@pytest.mark.parametrize(("name", "layout", "optimizer"), RUNS)
def test_layers_split_over_workers_give_the_result_of_one_process(
    pool: onebox.Pool, name: str, layout: str, optimizer: str
) -> None:
    plan = split(name, layout)
    found = run(pool, name, plan, SIZES, optimizer=optimizer, clip_grad_norm=0.5)
    assert_same(found, reference(name, plan, SIZES, optimizer=optimizer, max_norm=0.5))


@pytest.mark.parametrize(("name", "schedule"), [("cnn", "1f1b"), ("dropping", "zb-h1")])
def test_split_layers_are_recomputed_and_offloaded_too(pool: onebox.Pool, name: str, schedule: str) -> None:
    """What the ranks of a stage exchange in forward they exchange again."""
    plan = split(name, "both stages")
    policies: tuple[ActivationPolicy, ActivationPolicy]
    for policies in (("recompute", "offload"), ("offload", "recompute")):
        stages = tuple(replace(stage, policy=policy) for stage, policy in zip(plan.stages, policies, strict=True))
        fated = replace(plan, stages=stages, schedule=schedule)
        assert_same(run(pool, name, fated, SIZES[:3]), reference(name, fated, SIZES[:3]))


@pytest.mark.feature("Split layers: Split layers over devices")
def test_workers_hold_shares_and_predict_their_memory(pool: onebox.Pool) -> None:
    case = CASES["cnn"]
    model = case.model()
    (batch,) = case.batches([6])
    plan = split("cnn", "over two")
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan) as trainer:
        trainer.evaluate([batch])
        before = trainer.memory()
        predicted = trainer.predicted_memory(*batch)
        trainer.step(*batch)
        trainer.wait()
        whole = sum(tensor.nbytes for tensor in model.state_dict().values())
        assert all(memory.used_bytes < 0.8 * whole for memory in before[:2])
        assert set(predicted) == {0, 1}


def test_a_run_with_split_layers_goes_on_on_one_device(pool: onebox.Pool, tmp_path: Path) -> None:
    """Shares of parameters and of the optimizer's state are put together in a checkpoint, and cut again from it."""
    case, plan = CASES["cnn"], split("cnn", "over two")
    alone = Plan.data_parallel([3], [1.0], micro_batch=2)
    batches = case.batches(list(SIZES))
    for first, second in ((plan, alone), (alone, plan)):
        model = case.model()
        with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, plan=first) as trainer:
            for batch in batches[:2]:
                trainer.step(*batch)
            saved = trainer.save(tmp_path / f"{first.split}")
        model = case.model()
        resumed = onebox.Trainer.resume(saved, model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, plan=second)
        with resumed as trainer:
            for batch in batches[2:]:
                trainer.step(*batch)
            found = trainer.tensors()
        expected = reference("cnn", plan, SIZES, optimizer="adamw").tensors
        for name, tensor in expected.items():
            torch.testing.assert_close(found[f"model.{name}"], tensor, rtol=1e-10, atol=1e-10)


def test_an_optimizer_that_looks_at_whole_parameters_is_refused(pool: onebox.Pool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=2)
    optimizer = torch.optim.Adafactor(model.parameters())
    with (
        onebox.Trainer(model, nn.functional.mse_loss, optimizer, pool=pool, plan=plan) as trainer,
        pytest.raises(UsageError, match="looks at a parameter as a whole"),
    ):
        trainer.step(torch.ones(4, 8), torch.zeros(4, 4))
