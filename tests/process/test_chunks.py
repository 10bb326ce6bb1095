"""Values that leave in chunks, the first of which travels while the rest is computed, change no result.

Which values do is decided by what that is predicted to gain; here all do that can, in as long a tail as there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import onebox
from onebox.engine.partition import phase_programs, value_chunks
from onebox.graph import NamedProgram, TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import ASYNC, Plan, Prediction, Stage
from onebox.pool import Link
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import assert_same
from tests.kit.stages import expected, reference, run, staged
from tests.kit.trainer_arguments import grouped
from tests.process import test_staleness as stale

SIZES = [8, 5]
"""Of micro-batches of 3: the last ones have 2, and so chunks of 1."""


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[value_chunks.ValueChunking]]:
    """Let all leave in chunks that can; give the ones that did."""
    found: list[value_chunks.ValueChunking] = []

    def note(named: NamedProgram, choice: value_chunks.ValueChunking) -> value_chunks.ChunkedProgram:
        found.append(choice)
        return value_chunks.chunked(named, choice)

    def always(tail_s: float, transfer_s: float, *, most: int, **costs: Any) -> tuple[int, float]:
        return min(3, most), tail_s

    monkeypatch.setattr(value_chunks, "best_parts", always)
    monkeypatch.setattr(value_chunks, "CALL_S", 0.0)
    monkeypatch.setattr(value_chunks, "ENOUGH", math.inf)
    monkeypatch.setattr(value_chunks, "LEAST", 0.0)
    monkeypatch.setattr(phase_programs, "chunked", note)
    yield found
    assert found, "nothing left in chunks"


def planned(name: str, devices: Any, **more: Any) -> Plan:
    plan = staged(name, devices, **more)
    return replace(plan, predicted=expected(plan, SIZES[0]))


@pytest.mark.parametrize(
    ("name", "devices", "more"),
    [
        ("cnn", (0, 1), {"schedule": "zb-h1"}),
        ("gpt2", (0, 1), {"schedule": "1f1b"}),
        ("unet", (0, 1, 2), {"schedule": "1f1b"}),
        ("mlp", ((0, 1), (1, 2)), {"schedule": "gpipe", "optimizer": "sharded"}),
    ],
)
def test_exact_steps_give_the_result_of_one_process(
    pools: Pools, chunked: list[value_chunks.ValueChunking], name: str, devices: Any, more: dict[str, Any]
) -> None:
    plan = planned(name, devices, **more)
    assert_same(run(pools(3), name, plan, SIZES, overlap=True), reference(name, plan, SIZES))
    assert {len(choice.samples) for choice in chunked} <= {2, 3}


def test_late_steps_give_the_result_of_gradients_that_are_late(
    pools: Pools, chunked: list[value_chunks.ValueChunking]
) -> None:
    plan = planned("mlp", (0, 1, 2), schedule=ASYNC)
    found, delays = stale.run(pools(3), "mlp", plan, "adamw", [8, 8, 5, 8])
    assert_same(found, stale.late("mlp", plan, "adamw", [8, 8, 5, 8]))
    assert delays == {0: 1, 1: 3}


def test_without_overlap_all_is_sent_whole(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_chunks, "best_parts", None)
    plan = planned("mlp", (0, 1))
    assert_same(run(pools(3), "mlp", plan, SIZES), reference("mlp", plan, SIZES))


def test_memory_is_what_was_predicted(chunked: list[value_chunks.ValueChunking]) -> None:
    """Chunks, and what is put together of them, to the byte."""
    plan, case = planned("cnn", (0, 1), micro_batch=2), CASES["cnn"]
    model = case.model()
    arguments: dict[str, Any] = {"plan": plan, "overlap": True, "check_every": 0, "loss_reduction": "mean"}
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), **grouped(pool=pool, **arguments)) as trainer,
    ):
        (batch,) = case.batches([8])
        for _ in range(3):
            trainer.step(*batch)
        predicted = trainer.predicted_memory(*batch)
        trainer.wait()
        assert {worker: memory.peak_bytes for worker, memory in enumerate(trainer.memory())} == predicted


def wide() -> nn.Module:
    """One wide layer behind a narrow one, and a narrow one on another device."""
    return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4096), nn.Linear(4096, 4))


@pytest.mark.parametrize("slow", [True, False])
def test_half_of_a_value_travels_while_the_rest_is_computed_if_the_link_is_slow(slow: bool) -> None:
    """On devices that sleep, as predicted; not over memory."""
    inputs, targets = torch.zeros(64, 16), torch.zeros(64, 4)
    loss, model = nn.functional.mse_loss, wide()
    names = TracedModel(capture(model, loss, (inputs, targets)), backward=True).segments
    stages = (names[:2], names[2:])
    plan = Plan(
        stages=tuple(Stage(segments=own, replicas=((n,),), shares=(1.0,)) for n, own in enumerate(stages)),
        micro_batch=64,
        schedule="1f1b",
        predicted=Prediction(
            batch=64, step_s=1.0, bubble=0.0, peak_bytes=(1, 1), stages_s=((0.05, 0.01, 0.01), (0.01, 0.01, 0.01))
        ),
    )
    links = {(0, 1): Link(latency_s=1e-3, bandwidth_bps=20e6 if slow else 1e12)}
    with (
        onebox.open("sim*2", threads=1, links=links) as pool,
        onebox.Trainer(
            model,
            loss,
            torch.optim.SGD(model.parameters(), lr=0.1),
            pool=pool,
            plan=plan,
            engine=onebox.Engine(overlap=True),
        ) as trainer,
    ):
        trainer.step(inputs, targets)
        trainer.wait()
        events = [event for event in trainer.events() if event.step == 0]
    forward = [event for event in events if event.name == "stage 0 forward 0"]
    sends = [event for event in events if event.name.startswith("send of stage 0")]
    if not slow:
        assert (len(forward), len(sends)) == (1, 1)
        return
    assert 2 <= len(sends) <= len(forward)
    for send, before, after in zip(sends, forward, forward[1:], strict=False):
        assert before.end_ns <= send.start_ns <= after.start_ns
    (first,) = (event for event in events if event.name == "stage 1 forward 0")
    assert first.start_ns >= sends[-1].end_ns, "it is read when it is whole"
