"""Times of instructions are those of the device's work, on the clock that all processes of a host have.

Plans, shares and decisions while training rest on them. A GPU's host queues an operator in microseconds, however long
the operator takes: times of the host's calls would add up to a fraction of the step.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import onebox
from onebox.engine import TraceEvent
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage

pytestmark = pytest.mark.gpu

SLACK_NS = 2_000_000
"""Clocks of a GPU and of its host are compared by an event; they need not agree better than this."""

STEPS = 3


def _model(width: int) -> nn.Sequential:
    """Return a model whose products take nearly all of a step, while what is uploaded is small."""
    torch.manual_seed(0)
    hidden = [nn.Linear(width, width) for _ in range(4)]
    return nn.Sequential(nn.Linear(4, width), *hidden, nn.Linear(width, 2))


def _traced(spec: str, plan: Plan | None, *, width: int, batch: int) -> tuple[list[TraceEvent], list[tuple[int, int]]]:
    """Return events of steps, and for each step when it was begun and when its loss was read."""
    model = _model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(batch, 4), torch.zeros(batch, 2)
    with (
        onebox.open(spec, threads=1) as pool,
        onebox.Trainer(
            model, nn.functional.mse_loss, optimizer, pool=pool, **({} if plan is None else {"plan": plan})
        ) as trainer,
    ):
        for _ in range(2):
            trainer.step(inputs, targets).item()
        trainer.wait()
        walls = []
        for _ in range(STEPS):
            begin_ns = time.monotonic_ns()
            trainer.step(inputs, targets).item()
            trainer.wait()
            walls.append((begin_ns, time.monotonic_ns()))
        return [event for event in trainer.events() if event.step >= 2], walls


def _sizes(real: bool) -> dict[str, int]:
    return {"width": 4096, "batch": 8192} if real else {"width": 256, "batch": 512}


def test_the_work_of_a_step_takes_most_of_its_time(device: str, real: bool) -> None:
    events, walls = _traced(device, None, **_sizes(real))
    least = 0.5 if real else 0.02  # where cores are shared with other tests, workers wait for them
    for number, (begin_ns, end_ns) in enumerate(walls, start=2):
        work_ns = sum(
            event.end_ns - event.start_ns for event in events if event.step == number and event.track == "compute"
        )
        assert least * (end_ns - begin_ns) <= work_ns <= (end_ns - begin_ns) + SLACK_NS


def test_work_lies_between_the_call_of_a_step_and_its_loss(device: str, real: bool) -> None:
    events, walls = _traced(device, None, **_sizes(real))
    for number, (begin_ns, end_ns) in enumerate(walls, start=2):
        own = [event for event in events if event.step == number and event.track == "compute"]
        assert own
        for event in own:
            assert begin_ns - SLACK_NS <= event.start_ns <= event.end_ns <= end_ns + SLACK_NS, event.name


@pytest.mark.parametrize("first", [0, 1], ids=["forward from the device", "forward to the device"])
def test_a_stage_begins_when_the_one_before_has_ended(first: int, device: str, real: bool) -> None:
    """Times of a GPU's worker and of a CPU's are on one clock."""
    sizes = {"width": 512, "batch": 512} if real else {"width": 128, "batch": 64}
    example = torch.randn(sizes["batch"] // 4, 4), torch.zeros(sizes["batch"] // 4, 2)
    names = TracedModel(capture(_model(sizes["width"]), nn.functional.mse_loss, example), backward=True).segments
    cuts = names[: len(names) // 2], names[len(names) // 2 :]
    places = first, 1 - first
    stages = tuple(
        Stage(segments=own, replicas=((place,),), shares=(1.0,)) for own, place in zip(cuts, places, strict=True)
    )
    plan = Plan(stages=stages, micro_batch=sizes["batch"] // 4, schedule="1f1b")
    events, _ = _traced(f"{device},cpu", plan, **sizes)
    done = {
        (event.step, event.action.micro_batch, event.action.stage): event
        for event in events
        if event.action is not None and event.action.kind == "F" and event.track == "compute"
    }
    assert len(done) == 8 * STEPS
    for (step, micro_batch, stage), event in done.items():
        if stage:
            before = done[step, micro_batch, stage - 1]
            assert before.end_ns <= event.start_ns + SLACK_NS
