"""Traces of steps that have ended, and what links have carried in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.compile.routine import InstructionLabel, StepRoutine
from onebox.engine.steps.observer import EndedStep
from onebox.engine.steps.results import StepTrace
from onebox.engine.steps.traces import StepTraces, step_trace
from onebox.errors import WireError
from onebox.plan import Plan
from onebox.pool import WorkerReply
from onebox.wire import decode_worker_message, encode
from onebox.wire.protocol.responses import GroupTraffic, LinkTraffic, Reply


def ended(step: int, *carried: LinkTraffic) -> EndedStep:
    """Return a step in which device 0 has carried something."""
    trace = StepTrace(step=step, workers={}, traffic={(0, each.worker): each for each in carried})
    plan = Plan.data_parallel([0, 1], [1.0, 1.0])
    return EndedStep(number=step, plan=plan, current=True, micro_batches=(), trace=trace)


def test_what_links_carried_adds_up_over_steps() -> None:
    traces = StepTraces(True, lambda worker: 0)
    traces.ended(ended(0, LinkTraffic(1, 10, 100)))
    traces.ended(ended(1, LinkTraffic(1, 20, 300)))
    assert traces.traffic == {(0, 1): LinkTraffic(1, 30, 400)}


def test_the_newest_step_is_the_last_in_which_something_was_computed() -> None:
    traces = StepTraces(True, lambda worker: 0)
    assert traces.newest_events() == []
    for step, track in ((0, "compute"), (1, "transfer"), (1, "compute"), (2, "transfer")):
        labels = [InstructionLabel(f"{track} of {step}", track)]
        trace = StepTrace(step=step, workers={0: (labels, (1, 2), (0, 0))})
        traces.ended(replace(ended(step), trace=trace))
    assert [event.name for event in traces.newest_events()] == ["transfer of 1", "compute of 1"]


@pytest.mark.parametrize(
    "wrong", [GroupTraffic(1, -1, 1, 1), GroupTraffic(1, 0, -1, 1), GroupTraffic(1, 0, 1, -1)], ids=str
)
def test_traffic_that_cannot_be_is_no_message(wrong: GroupTraffic) -> None:
    with pytest.raises(WireError, match=r"Expected `int` >= 0 - at"):
        decode_worker_message([encode(Reply(1, traffic=(wrong,)))])


def test_times_of_hosts_with_clocks_of_their_own_are_of_the_clients() -> None:
    day_ns = 86400 * 10**9
    label = InstructionLabel("forward 0", "compute")
    routine = StepRoutine(number=1, definitions=(), constants={}, leaves=(), results=(), labels=(label,))
    compiled = CompiledStep(micro_batches=(), routines={0: routine, 1: routine})
    replies = [
        WorkerReply((), (), (10, 20), (0, 0)),
        WorkerReply((), (), (day_ns + 12, day_ns + 22), (0, 0), (), day_ns),
    ]
    trace = step_trace(3, compiled, "steady", replies, {0: 0, 1: 0})
    assert [(event.worker, event.start_ns, event.end_ns) for event in trace.events()] == [(0, 10, 20), (1, 12, 22)]
