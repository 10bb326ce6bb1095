"""Any plan gives the result of one process, whatever meets in it: a covering array of strength two over all settings.

Every two values of different kinds that may go together meet in some run: schedule, model, layout, optimizer, where
gradients are summed, where the optimizer steps, activation policies, late gradients, precision, clipping, code in front
of the model, memory format, fused activations. Each run is compared with plain PyTorch in this process: in float64 to
1e-10, in bf16 with a process that rounds the same products.

Tests of single features have what is their own: errors, edges, memory. That a feature goes together with all the others
is tested here.
"""

from __future__ import annotations

import functools
import itertools
from collections import ChainMap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils._pytree import tree_map

import onebox
from onebox.plan import ASYNC, Plan, Stage
from tests.kit.covering import Run, completed, covering_array, pairs_of
from tests.kit.late import AHEAD, train_late
from tests.kit.models import COVERED, OPTIMIZERS, WORDS
from tests.kit.reference import Outcome, assert_same, drawing, train
from tests.kit.stages import SEED, expected, segments, staged, tabled, tensors_of
from tests.kit.trainer_arguments import grouped
from tests.process.test_precision import AGREE, Rounding, furthest, single

SIZES = (8, 5, 2, 9, 8)
"""Samples of the steps: with a rest and without, with fewer micro-batches than stages, with less than one."""

MICRO_BATCH, MAX_NORM, WARM_UP = 3, 0.3, 1

KINDS = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "auto", "table", ASYNC),
    "model": ("cnn", "unet", "gpt2", "dropping", "recurrent", "complex"),
    "layout": ("replicas", "stages", "folded", "split"),
    "optimizer": ("sgd", "adamw", "adam-in-groups", "muon-and-adamw"),
    "sync": ("workers", "client", "sharded"),
    "update": ("device", "host"),
    "policy": ("keep", "recompute", "offload", "mixed"),
    "delay": ("exact", "overlap", "none", "predict", "extrapolate", "lookahead", "both", "feedback"),
    "precision": ("float64", "bf16"),
    "clipping": ("unclipped", "clipped"),
    "front": ("whole", "on-device"),
    "format": ("contiguous", "channels-last"),
    "activations": ("written-out", "fused"),
}
EXACT = ("exact", "overlap")
MIXED = ("offload", "recompute", "swap", "recompute")


def refused(run: Run) -> bool:
    """Tell whether some settings do not go together: a plan or a trainer refuses them, or there is nothing to compare.

    Bf16 is compared under SGD alone: Adam makes whole steps of what float32 leaves of a gradient of nothing; and where
    one process can round in the same places. Muon steps matrices, of which the U-Net has none, and whole ones. The
    momentum of complex weights has no formula here.
    """

    def has(kind: str, *values: str) -> bool:
        return run.get(kind) in values

    def lacks(kind: str, *values: str) -> bool:
        return kind in run and run[kind] not in values

    late, exact = lacks("delay", *EXACT), has("delay", *EXACT)
    return (
        (has("schedule", ASYNC) and exact)
        or (lacks("schedule", ASYNC) and late)
        or (lacks("policy", "keep") and has("layout", "replicas"))
        or (lacks("policy", "keep", "recompute") and lacks("delay", "exact"))
        or (has("sync", "client") and (lacks("layout", "replicas") or lacks("delay", "exact")))
        or (has("update", "host") and has("delay", "overlap"))
        or (has("optimizer", "muon-and-adamw") and late and lacks("delay", "none", "feedback"))
        or (has("optimizer", "muon-and-adamw") and (has("layout", "split") or has("model", "unet")))
        or (has("precision", "bf16") and (lacks("optimizer", "sgd") or has("layout", "split")))
        or (
            has("precision", "bf16")
            and (has("model", "dropping", "recurrent", "complex") or has("format", "channels-last"))
        )
        or (has("format", "channels-last") and (lacks("model", "cnn", "unet") or has("layout", "split")))
        or (has("model", "complex") and (has("optimizer", "muon-and-adamw") or has("delay", *AHEAD)))
    )


RUNS = covering_array(KINDS, refused)


def test_every_two_settings_that_may_meet_do() -> None:
    assert not any(refused(run) for run in RUNS)
    met = {pair for run in RUNS for pair in pairs_of(run)}
    for one, other in itertools.combinations(sorted(KINDS), 2):
        for a, b in itertools.product(KINDS[one], KINDS[other]):
            meets = ((one, a), (other, b)) in met
            assert meets == (completed({one: a, other: b}, KINDS, refused) is not None), (a, b)


class Together(torch.optim.Optimizer):
    """Several optimizers, as a loop of one process steps them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._each = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = ChainMap(*(each.state for each in optimizers))  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self._each:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        for each in self._each:
            each.step()


def optimizers_of(run: Run, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizer of a run, or both."""
    if run["precision"] == "bf16":  # smaller steps: float32 is compared
        return [torch.optim.SGD(model.parameters(), lr=1e-2 if run["clipping"] == "unclipped" else 2e-2, momentum=0.9)]
    if run["optimizer"] != "muon-and-adamw":
        return [OPTIMIZERS[run["optimizer"]](model)]
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def model_of(run: Run) -> nn.Module:
    model = COVERED[run["model"]].model()
    return model.float() if run["precision"] == "bf16" else model


def batches_of(run: Run) -> list[tuple[Any, Any]]:
    batches = COVERED[run["model"]].batches(list(SIZES))
    return tree_map(single, batches) if run["precision"] == "bf16" else batches


def before(inputs: Any) -> Any:
    """Change inputs in front of the model: numbers by a line, words by another one."""
    return tree_map(lambda x: x * 1.5 - 0.25 if x.is_floating_point() else (x + 1) % WORDS, inputs)


def plan_of(run: Run) -> Plan:
    """Return the plan of a run; a model of three segments has three stages where another one has four."""
    name, schedule = run["model"], run["schedule"]
    names = segments(name)
    table: dict[str, Any] = {"micro_batch": MICRO_BATCH}
    match run["layout"]:
        case "replicas":
            whole = Stage(segments=(), replicas=((2,), (0,), (1,)), shares=(3.0, 1.0, 2.0))
            plan = Plan(stages=(whole,), **table)
        case "stages":
            plan = staged(name, (0, (1, 2), 3), shares=((1.0,), (2.0, 1.0), (1.0,)), **table)
        case "folded":
            order = (0, 1, 1, 0) if schedule == "zbv" else (0, 1, 0, 1)
            plan = staged(name, order[-min(4, len(names)) :], **table)
        case "split":
            middle = len(names) // 2
            first = Stage(segments=names[:middle], replicas=((2,), (3,)), shares=(1.0, 1.0))
            second = Stage(segments=names[middle:], replicas=((0, 1),), shares=(1.0,))
            plan = Plan(stages=(first, second), **table)
    policies = MIXED[-len(plan.stages) :] if run["policy"] == "mixed" else (run["policy"],) * len(plan.stages)
    narrow = "bf16" if run["precision"] == "bf16" else None
    formats: dict[str, Any] = {"precision": narrow, "channels_last": run["format"] == "channels-last"}
    stages = [replace(s, policy=policy, **formats) for s, policy in zip(plan.stages, policies, strict=True)]
    plan = replace(
        plan,
        stages=tuple(stages),
        sync="client" if run["sync"] == "client" else "workers",
        optimizer="sharded" if run["sync"] == "sharded" else "replicated",
        update=run["update"],
    )
    match schedule:
        case "table":
            return replace(plan, schedule="table", table=tabled(plan, SIZES[0]))
        case "auto":
            return replace(plan, schedule="auto", predicted=expected(plan, SIZES[0]))
    return replace(plan, schedule=schedule)


def train_on(pool: onebox.Pool, run: Run) -> Outcome:
    """Train on a pool; the replicas are compared after each step."""
    case, model = COVERED[run["model"]], model_of(run)
    optimizers = optimizers_of(run, model)
    options: dict[str, Any] = {"overlap": run["delay"] == "overlap", "seed": SEED, "check_every": 1}
    options["loss_reduction"] = "mean"  # not tested here
    if run["delay"] not in EXACT:
        options |= {"staleness": 1, "delay": run["delay"], "warm_up": WARM_UP}
    if run["clipping"] == "clipped":
        options["clip_grad_norm"] = MAX_NORM
    if run["front"] == "on-device":
        options["on_device"] = before
    options["fuse"] = run["activations"] == "fused"
    optimizer = optimizers if len(optimizers) > 1 else optimizers[0]
    with onebox.Trainer(model, case.loss, optimizer, **grouped(pool=pool, plan=plan_of(run), **options)) as trainer:
        losses = [trainer.step(*batch) for batch in batches_of(run)]
        found = tensors_of(trainer)
        norms = [loss.gradient_norm or 0.0 for loss in losses]
        exact = len(SIZES) if run["delay"] in EXACT else WARM_UP + 1
        assert sum(count for delay, count in trainer.delays.items() if delay) == len(SIZES) - exact
    return Outcome(losses=[float(loss) for loss in losses], norms=norms, tensors=found)


@functools.cache
def _reference(*settings: tuple[str, str], rounded: bool) -> Outcome:
    run = dict(settings)
    case, model = COVERED[run["model"]], model_of(run)
    optimizers = optimizers_of(run, model)
    optimizer = Together(optimizers) if len(optimizers) > 1 else optimizers[0]
    options: dict[str, Any] = {"around": drawing(SEED) if case.draws else None}
    if run["clipping"] == "clipped":
        options["max_norm"] = MAX_NORM
    trained: Callable[..., Outcome] = train
    if run["delay"] not in EXACT:
        trained = functools.partial(train_late, delay=run["delay"], warm_up=WARM_UP)

    batches = batches_of(run)
    if run["front"] == "on-device":
        batches = [(before(inputs), targets) for inputs, targets in batches]
    rounding: AbstractContextManager[Any] = Rounding() if rounded else nullcontext()
    with rounding:
        return trained(model, case.loss, optimizer, batches, MICRO_BATCH, **options)


def reference(run: Run, *, rounded: bool) -> Outcome:
    """Train in this process; what is the same for several runs is done once."""
    seen = [(kind, run[kind]) for kind in ("model", "optimizer", "delay", "precision", "clipping", "front")]
    return _reference(*((kind, "exact" if value in EXACT else value) for kind, value in seen), rounded=rounded)


DEVICES = 4
"""Workers of the pool."""


@pytest.mark.short
@pytest.mark.parametrize("run", RUNS, ids=lambda run: "/".join(run.values()))
def test_any_plan_gives_the_result_of_one_process(run: Run, pool: onebox.Pool) -> None:
    found = train_on(pool, run)
    if run["precision"] == "float64":
        wanted = reference(run, rounded=False)
        assert_same(found, wanted)
        if run["clipping"] == "clipped":
            assert found.norms == pytest.approx(wanted.norms, abs=1e-10)
        return
    rounded, wide = reference(run, rounded=True), reference(run, rounded=False)
    assert furthest(found, rounded) < AGREE < furthest(found, wide) / 5
    torch.testing.assert_close(found.losses, rounded.losses, rtol=1e-6, atol=0)
