"""The memory that a device uses over a step is the one that was predicted, byte for byte, at every instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

import onebox
from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.memory.timeline import MemoryTimeline, memory_peak, memory_timeline
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.plan import ActivationPolicy, Plan, Stage
from onebox.report.tables.memory import compare_memory
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.stages import staged
from tests.kit.trainer_arguments import grouped

STEPS = 3
BATCH = 8


def plan_of(name: str, which: str) -> Plan:
    """Return a plan of a case; each has something else in its routines."""
    match which:
        case "replicas":
            return Plan.data_parallel([0, 1], [1.0, 1.0])
        case "micro-batches":
            return Plan.data_parallel([1], [1.0], micro_batch=3)
        case "split":
            return Plan(stages=(Stage(replicas=((0, 1),), shares=(1.0,)),), micro_batch=4)
        case "policies":
            policies: tuple[ActivationPolicy, ...] = ("offload", "recompute", "offload", "keep")
            plan = staged(name, [0, 0, 0, 0], update="host")
            stages = zip(plan.stages, policies, strict=True)
            return msgspec.structs.replace(
                plan, stages=tuple(msgspec.structs.replace(one, policy=policy) for one, policy in stages)
            )
    return staged(name, [0, 1], schedule=which)


RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("resnet", "replicas", {"clip_grad_norm": 0.1}),
    ("unet", "micro-batches", {}),
    ("unet", "policies", {}),
    ("cnn", "1f1b", {}),
    ("gpt2", "zb-h1", {"clip_grad_norm": 0.1}),
    ("mlp", "split", {}),
]


@pytest.mark.feature("Memory: Predict memory at every instruction, and show it")
@pytest.mark.parametrize(("name", "which", "options"), RUNS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_instruction_uses_what_was_predicted(
    pools: Pools, name: str, which: str, options: Mapping[str, Any]
) -> None:
    case, pool, plan = CASES[name], pools(2), plan_of(name, which)
    model = case.model()
    batch = case.batches([BATCH])[0]
    optimizer = OPTIMIZERS["adamw"](model)
    with onebox.Trainer(
        model, case.loss, optimizer, **grouped(pool=pool, plan=plan, recover=False, **options)
    ) as trainer:
        trainer.step(*case.batches([BATCH - 3])[0])  # what another batch needs stays on the workers
        for _ in range(STEPS - 1):
            trainer.step(*batch)
        trainer.wait()
        curves = trainer.predicted_curves(*batch)
        found = compare_memory(curves, trainer.events(), STEPS - 1)
    assert [one.device for one in found] == sorted(plan.devices)
    for one in found:
        assert (one.difference_bytes, one.where) == (0, "")
        assert one.peak_bytes.measured == one.peak_bytes.predicted
    forecast = forecast_curves(name, plan, pool, options.get("clip_grad_norm", 0.0))
    assert list(forecast) == list(curves), "a forecast needs no workers"
    for ahead, seen in zip(forecast.values(), curves.values(), strict=True):
        more = seen.start_bytes - ahead.start_bytes
        assert [use.used_bytes + more for use in ahead.uses] == [use.used_bytes for use in seen.uses]


def forecast_curves(name: str, plan: Plan, pool: onebox.Pool, max_norm: float) -> dict[int, MemoryTimeline]:
    """Return the curves of a case without running it, and look at what lies there at each peak."""
    case = CASES[name]
    model = case.model()
    trained = frozenset(f"model.{key}" for key, _ in model.named_parameters())
    recipe = CaptureSpec(model=model, loss=case.loss, metrics={}, precision="fp32", device_type="cpu", trained=trained)
    job = TrainingJob(
        captures=Captures(recipe),
        optimizer=OPTIMIZERS["adamw"](model),
        batch=as_batch(*case.batches([BATCH])[0]),
        devices=pool.devices,
        max_norm=max_norm,
    )
    contents = job.contents(plan)
    peaks = {device: memory_peak(device, found) for device, found in contents.items()}
    assert {device: peak.size_bytes for device, peak in peaks.items()} == job.peaks(plan)
    for peak in peaks.values():
        assert sum(one.size_bytes for one in peak.residents) == peak.size_bytes
        assert {"parameters", "activations"} <= set(peak.sorts)
        assert ("optimizer state" in peak.sorts) == (plan.update == "device")
        assert all(one.size_bytes > 0 and one.name for one in peak.residents)
    return {device: memory_timeline(device, found) for device, found in contents.items()}
