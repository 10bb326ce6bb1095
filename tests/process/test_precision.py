"""Stages of bf16 train as one process does that rounds the same products; the memory of a step is the predicted one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import onebox
from onebox.engine.planning.profile import profile_model
from onebox.errors import UsageError
from onebox.graph import Precision
from onebox.plan import Plan
from onebox.report.tables.memory import compare_memory
from tests.kit.models import CASES, Case
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, train
from tests.kit.stages import staged, tensors_of
from tests.kit.trainer_arguments import grouped

SIZES = (6, 6, 6)

AGREE = 2e-6
"""By which results may differ: float32 sums of gradients, and by them elements that are rounded to the other side. In
float32 throughout they differ by ten times as much or more."""

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
    _aten.convolution_backward.default,
}  # fmt: skip


NORMS = {_aten.native_batch_norm.default: (0,), _aten.native_batch_norm_backward.default: (0, 1)}
"""Batch norms, all of which are behind convolutions here; and what they read in bfloat16."""


class Rounding(TorchDispatchMode):
    """Computes products and the batch norms behind them in bfloat16, and widens what they make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NORMS:
            given = [cast(value, torch.bfloat16) if n in NORMS[func] else value for n, value in enumerate(args)]
            first, *rest = func(*given, **(kwargs or {}))
            return cast(first, torch.float32), *rest
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        narrow = tree_map(functools.partial(cast, dtype=torch.bfloat16), args)
        return tree_map(functools.partial(cast, dtype=torch.float32), func(*narrow, **(kwargs or {})))


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def batches(case: Case, sizes: Sequence[int] = SIZES) -> list[tuple[Any, Any]]:
    return [tree_map(functools.partial(single), batch) for batch in case.batches(list(sizes))]


def single(value: Tensor) -> Tensor:
    return cast(value, torch.float32)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def run(pool: onebox.Pool, name: str, plan: Plan, *, halfway: Path | None = None, **options: Any) -> Outcome:
    """Train a case of float32 as a plan says, with a checkpoint after two steps; each step has the predicted memory."""
    case, model = CASES[name], CASES[name].model().float()
    steps, losses = batches(case), []
    with onebox.Trainer(
        model, case.loss, sgd(model), **grouped(pool=pool, plan=plan, recover=False, **options)
    ) as trainer:
        for step, batch in enumerate(steps):
            losses.append(float(trainer.step(*batch)))
            if halfway is not None and step == 1:
                trainer.save(halfway)
        found = tensors_of(trainer)
        for one in compare_memory(trainer.predicted_curves(*steps[-1]), trainer.events(), len(steps) - 1):
            assert (one.difference_bytes, one.where) == (0, "")
    return Outcome(losses=losses, norms=[], tensors=found)


def reference(name: str, *, rounded: bool) -> Outcome:
    """Train a case of float32 in this process, on micro-batches of three."""
    case, model = CASES[name], CASES[name].model().float()
    with Rounding() if rounded else contextlib.nullcontext():
        return train(model, case.loss, sgd(model), batches(case), lambda size: [3] * (size // 3))


def furthest(one: Outcome, other: Outcome) -> float:
    """Return the largest difference between parameters and buffers, relative to those above one."""
    pairs = [(one.tensors[key].double(), tensor.double()) for key, tensor in other.tensors.items()]
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)


def narrowed(plan: Plan, *stages: int) -> Plan:
    """Return a plan with some stages of bf16; with none named, all."""
    pairs = enumerate(plan.stages)
    chosen = stages or range(len(plan.stages))
    return replace(plan, stages=tuple(replace(s, precision="bf16") if n in chosen else s for n, s in pairs))


@pytest.mark.feature("Precision: Train in bf16, or in stages that gain by it")
@pytest.mark.parametrize(
    ("name", "devices", "schedule"), [("cnn", (0, 1, 0), "1f1b"), ("gpt2", (1, 0), "zb-h1"), ("tied", (0, 1), "gpipe")]
)
def test_stages_of_bf16_train_as_one_process_that_rounds(
    name: str, devices: tuple[int, ...], schedule: str, pool: onebox.Pool
) -> None:
    found = run(pool, name, narrowed(staged(name, devices, schedule=schedule)))
    rounded, wide = reference(name, rounded=True), reference(name, rounded=False)
    assert furthest(found, rounded) < AGREE < furthest(found, wide) / 5
    torch.testing.assert_close(found.losses, rounded.losses, rtol=1e-6, atol=0)


def test_mixed_plans_with_fates_and_replicas(pool: onebox.Pool) -> None:
    """Whatever becomes of activations and wherever stages are, the results are the same; and from a checkpoint on."""
    plain = staged("cnn", (0, (0, 1), 1))
    mixed = narrowed(plain, 0, 2)
    expected = run(pool, "cnn", mixed)
    assert furthest(expected, reference("cnn", rounded=False)) > 5 * AGREE
    policies = ("recompute", "keep", "offload")
    pairs = zip(narrowed(staged("cnn", (0, 1, 1)), 0, 2).stages, policies, strict=True)
    fated = replace(mixed, stages=tuple(replace(stage, policy=policy) for stage, policy in pairs))
    assert furthest(run(pool, "cnn", fated), expected) < AGREE


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(pool: onebox.Pool, tmp_path: Path) -> None:
    """Of a plan of one stage, too, which is made anew where nothing is said of its format."""
    plan = narrowed(Plan.data_parallel((0, 1), (1.0, 1.0), micro_batch=3))
    expected = run(pool, "mlp", plan, halfway=tmp_path)
    case, model = CASES["mlp"], CASES["mlp"].model().float()
    with onebox.Trainer.resume(tmp_path, model, case.loss, sgd(model), pool=pool) as trainer:
        for batch in batches(case)[2:]:
            trainer.step(*batch)
        found = tensors_of(trainer)
        assert trainer.plan is not None
        assert trainer.plan.narrow == {0}
    assert furthest(Outcome(losses=[], norms=[], tensors=found), expected) == 0


@pytest.mark.short
def test_a_tied_weight_that_is_rounded_in_one_stage_is_not_split_in_another(pools: Pools) -> None:
    plain = staged("tied", (0, 1))
    halves = replace(plain, stages=(plain.stages[0], replace(plain.stages[1], replicas=((1, 2),))))
    wide, found = (run(pools(3), "tied", plan) for plan in (halves, narrowed(halves, 0)))
    assert 0 < furthest(found, wide) < 1e-3


def test_evaluation_rounds_as_training_does(pool: onebox.Pool) -> None:
    case, model = CASES["mlp"], CASES["mlp"].model().float()
    (batch,) = batches(case, [4])
    losses = []
    for plan in (staged("mlp", (0, 1)), narrowed(staged("mlp", (0, 1)))):
        with onebox.Trainer(model, case.loss, sgd(model), pool=pool, plan=plan) as trainer:
            losses.append(trainer.evaluate([batch]).loss)
    with Rounding(), torch.no_grad():
        rounded = float(case.loss(model(batch[0]), batch[1]))
    assert losses[1] == pytest.approx(rounded, rel=1e-6)
    assert abs(losses[0] - rounded) > 1e-5


def large() -> nn.Module:
    """A model with enough work for its ways to be measured."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 8))


@pytest.mark.feature("Precision: Train in bf16, or in stages that gain by it")
def test_precision_is_measured_where_that_is_asked_for(
    pool: onebox.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors that have instructions for it; a plan that is not given is of what has been found faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inputs, targets = torch.randn(64, 512), torch.randint(8, (64,))
    loss, model = nn.functional.cross_entropy, large()
    rounds = all(device.has_bf16 for device in pool.devices)
    with onebox.Trainer(model, loss, sgd(model), pool=pool, precision="auto") as trainer:
        with torch.no_grad():
            expected = float(loss(model(inputs), targets))
        assert float(trainer.step(inputs, targets)) == pytest.approx(expected, rel=1e-3)
        assert trainer.plan is not None
        assert trainer.plan.stages[0].precision in (("bf16", None) if rounds else (None,))
    precisions: list[tuple[Precision, list[bool]]] = [("auto", [False, True] if rounds else []), ("fp32", [])]
    for precision, ways in precisions:
        profile, _ = profile_model(
            model, loss, sgd(model), inputs, targets, pool=pool, sizes=[64], precision=precision, cache=False
        )
        (times,) = profile.times["cpu"]
        assert [way.bf16 for way, _ in times.ways] == ways


def test_what_cannot_be(pool: onebox.Pool) -> None:
    case, model = CASES["mlp"], CASES["mlp"].model()
    plan = staged("mlp", (0, 1))
    (batch,) = case.batches([3])
    with (
        onebox.Trainer(model, case.loss, sgd(model), pool=pool, plan=narrowed(plan)) as trainer,
        pytest.raises(UsageError, match="products are of float64"),
    ):
        trainer.step(*batch)
    wide = Plan.data_parallel((0, 1), (1.0, 1.0))
    wide = replace(wide, stages=tuple(replace(stage, precision="fp32") for stage in wide.stages))
    with (
        onebox.Trainer(model, case.loss, sgd(model), pool=pool, plan=wide, precision="bf16") as trainer,
        pytest.raises(UsageError, match="a stage of the plan is of precision 'fp32'"),
    ):
        trainer.step(*batch)
    with pytest.raises(UsageError, match="'fp32', 'bf16' and 'auto'"):
        onebox.Trainer(model, case.loss, sgd(model), pool=pool, precision="fp8")  # type: ignore[arg-type]
