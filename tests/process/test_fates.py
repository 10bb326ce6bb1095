"""Whatever the policy of a stage's activations, training ends with the same bits, and with the result of one process.

A model is cut into spans of segments, and each of them in turn is recomputed or offloaded, then several at once: on one
device, in a pipeline, and on replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import onebox
from onebox.engine.workload.captures import Captures
from onebox.plan import Plan
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.reference import Outcome, assert_same
from tests.kit.stages import SEED, outcome, reference, segments, staged

MODELS = ("cnn", "unet", "resnet", "gpt2", "dropping")
SIZES = (8, 5)
"""Samples of each step's batch; the last micro-batches are smaller."""

MICRO_BATCH = 3
MIXED = ("offload", "recompute", "swap", "recompute")


@functools.cache
def spans(name: str) -> int:
    """Return how many spans a model is cut into."""
    return min(4, len(segments(name)))


def cut(name: str, devices: Sequence[int | Sequence[int]], policies: Sequence[str], **more: Any) -> Plan:
    """Return a plan of spans with policies."""
    plan = staged(name, devices, micro_batch=MICRO_BATCH, **more)
    return replace(plan, stages=tuple(replace(s, policy=f) for s, f in zip(plan.stages, policies, strict=True)))


CAPTURES: dict[str, Captures] = {}
"""A model is captured once for all runs: its graph does not depend on the plan."""


def run(pool: onebox.Pool, name: str, plan: Plan) -> Outcome:
    """Train a case as a plan says."""
    case = CASES[name]
    model = case.model()
    optimizer = OPTIMIZERS["adamw"](model)
    with onebox.Trainer(
        model, case.loss, optimizer, pool=pool, plan=plan, seed=SEED, engine=onebox.Engine(check_every=1)
    ) as trainer:
        trainer.share_captures(CAPTURES.setdefault(name, trainer.captures))
        return outcome(trainer, [trainer.step(*batch) for batch in case.batches(list(SIZES))])


def require_same_bits(found: Outcome, expected: Outcome) -> None:
    """Require that two runs ended with the same losses, parameters and buffers."""
    assert found.losses == expected.losses
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[key], tensor), key


@pytest.mark.feature("Memory: Recompute, offload or swap activations")
@pytest.mark.parametrize("name", MODELS)
def test_each_span_in_turn_on_one_device(name: str, pool: onebox.Pool) -> None:
    """Offloading is so of few models: what goes to the host does not depend on what made it."""
    count = spans(name)
    devices, plain = (0,) * count, ("keep",) * count
    kept = run(pool, name, cut(name, devices, plain))
    assert_same(kept, reference(name, cut(name, devices, plain), SIZES))
    turns = [(*plain[:place], "recompute", *plain[place + 1 :]) for place in range(count)]
    if name in ("cnn", "dropping"):
        turns += [(*plain[:place], "offload", *plain[place + 1 :]) for place in range(count)]
    for policies in (*turns, MIXED[-count:], ("recompute",) * count, ("offload",) * count):
        require_same_bits(run(pool, name, cut(name, devices, policies)), kept)


LAYOUTS: dict[str, tuple[int | tuple[int, ...], ...]] = {
    "pipeline": (0, 0, 1, 1),
    "folded": (0, 1, 0, 1),
    "replicas": ((0, 1),) * 4,
    "replicas and one": ((0, 1), (0, 1), 1, 1),
}
RUNS = [
    ("dropping", "pipeline", "zb-h1"),
    ("resnet", "replicas", "gpipe"),
    ("gpt2", "folded", "interleaved"),
    ("unet", "replicas and one", "1f1b"),
]
"""Each layout once, for the bits; that policies go with all schedules and models is in ``test_covering_array``."""


@pytest.mark.parametrize(("name", "layout", "schedule"), RUNS)
def test_mixed_fates_on_two_devices(name: str, layout: str, schedule: str, pool: onebox.Pool) -> None:
    devices = LAYOUTS[layout]
    plain = cut(name, devices, ("keep",) * 4, schedule=schedule)
    kept = run(pool, name, plain)
    assert_same(kept, reference(name, plain, SIZES))
    for policies in (MIXED, MIXED[::-1]):
        require_same_bits(run(pool, name, cut(name, devices, policies, schedule=schedule)), kept)


def test_the_memory_of_a_step_is_less_and_is_known_before(pool: onebox.Pool) -> None:
    case, count = CASES["unet"], spans("unet")
    (batch,) = case.batches([24])
    peaks: dict[str, int] = {}
    for policy in ("keep", "recompute", "offload"):
        plan = replace(cut("unet", (0,) * count, (policy,) * count), micro_batch=24)
        model = case.model()
        with onebox.Trainer(
            model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan, engine=onebox.Engine(check_every=0)
        ) as trainer:
            for _ in range(2):  # the optimizer's state is there when the second begins
                trainer.step(*batch).item()
            peaks[policy] = max(event.peak_bytes for event in trainer.events())
            assert trainer.predicted_memory(*batch)[0] == peaks[policy]
    assert peaks["recompute"] < 0.9 * peaks["keep"]
    assert peaks["offload"] < 0.9 * peaks["keep"]


def test_a_run_with_fates_is_saved_resumed_and_evaluated(pool: onebox.Pool, tmp_path: Path) -> None:
    """With the same plan, and with another one."""
    case, count = CASES["dropping"], spans("dropping")
    plan = cut("dropping", (0, 0, 1, 1), MIXED)
    batches = case.batches([*SIZES, *SIZES])
    model = case.model()
    with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), pool=pool, plan=plan, seed=SEED) as trainer:
        for batch in batches[:2]:
            trainer.step(*batch)
        trainer.save(tmp_path)
        evaluated = trainer.evaluate(batches[2:])
        for batch in batches[2:]:
            trainer.step(*batch)
        straight = trainer.tensors()
    for other, exact in ((plan, True), (cut("dropping", (0,) * count, ("recompute",) * count), False)):
        model = case.model()
        optimizer = OPTIMIZERS["adamw"](model)
        with onebox.Trainer.resume(tmp_path, model, case.loss, optimizer, pool=pool, plan=other) as trainer:
            assert trainer.evaluate(batches[2:]).loss == pytest.approx(evaluated.loss, abs=1e-12)
            for batch in batches[2:]:
                trainer.step(*batch)
            for name, tensor in trainer.tensors().items():
                torch.testing.assert_close(tensor, straight[name], rtol=0, atol=0 if exact else 1e-10)
