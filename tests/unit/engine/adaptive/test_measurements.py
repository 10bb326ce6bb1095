"""What the scheduler is told of a step is what the workers' times say, and nothing that they do not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from onebox.engine.adaptive.measurements import JITTER_S, StepContext, measure_step, without_jitter
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.results import StepTrace
from onebox.plan import Action, Links, MicroBatch
from onebox.plan.model.schedule import Kind
from onebox.plan.replan.measurements import CarriedBytes, LinkTime, StepMeasurement, TaskTime, TimedTask
from onebox.wire.protocol.responses import LinkTraffic

PARTS = (MicroBatch(index=0, start=0, size=4), MicroBatch(index=1, start=4, size=2))
SECOND = 1_000_000_000


def trace(step: int, workers: dict[int, Sequence[tuple[InstructionLabel, int, int]]]) -> StepTrace:
    """Return a trace of instructions with their begins and ends in seconds."""
    return StepTrace(
        step=step,
        workers={
            worker: (
                [label for label, _, _ in told],
                tuple(second * SECOND for _, begin, end in told for second in (begin, end)),
                (),
            )
            for worker, told in workers.items()
        },
    )


def action(stage: int, kind: Kind, micro_batch: int) -> InstructionLabel:
    return InstructionLabel("a call", "compute", Action(kind=kind, stage=stage, micro_batch=micro_batch))


def send(target: int, size_bytes: int) -> InstructionLabel:
    return InstructionLabel("send", "transfer", target=target, size_bytes=size_bytes)


def whole(made: StepTrace, *, timed: bool = True, hosts: Sequence[str] = ("here", "here")) -> StepContext:
    return StepContext(
        trace=made, micro_batches=PARTS, full=4, hosts=dict(enumerate(hosts)), timed=lambda one, other: timed
    )


STEP = trace(
    7,
    {
        0: [
            (action(0, "F", 0), 10, 12),
            (send(1, 100), 12, 15),
            (action(0, "F", 1), 12, 13),
            (send(1, 50), 13, 16),  # it could go when the one before had arrived
            (action(0, "B", -1), 20, 23),
            (action(0, "B", -1), 23, 24),
            (InstructionLabel("accumulate"), 24, 30),
            (InstructionLabel("optimizer", "compute"), 30, 32),
        ],
        1: [(action(1, "F", 0), 15, 17), (InstructionLabel("optimizer", "compute"), 33, 34)],
    },
)


def test_actions_links_and_updates_are_as_the_times_say() -> None:
    seen = measure_step(whole(STEP))
    assert seen.step == 7
    assert seen.actions == {
        TimedTask(0, 0, "F"): TaskTime(2.0, 2, 2.0, 2.0),  # the smaller micro-batch counts as one of the plan's size
        TimedTask(0, 0, "B"): TaskTime(8.0, 1, 8.0, 8.0),
        TimedTask(1, 1, "F"): TaskTime(2.0, 1, 2.0, 2.0),
    }
    assert seen.links == {(0, 1): LinkTime(150, 4.0, 2, 1.0, 3.0)}
    assert seen.update_s == {0: 2.0, 1: 1.0}


@pytest.mark.parametrize(("end", "seconds"), [(15, 19.0), (3, 24.0)])
def test_a_step_lasts_from_the_end_of_the_one_before_unless_something_else_was_done_in_between(
    end: int, seconds: float
) -> None:
    before = trace(6, {1: [(action(1, "F", 0), end - 1, end)]})
    assert measure_step(whole(STEP), before).step_s == seconds
    assert measure_step(whole(STEP)).step_s == 24.0


def test_updates_of_no_weight_are_passed_over() -> None:
    long = trace(1, {0: [(action(0, "F", 0), 0, 300), (InstructionLabel("optimizer", "compute"), 300, 302)]})
    assert measure_step(whole(long)).update_s == {}


def test_nothing_is_said_of_links_whose_times_are_not_known_and_clocks_of_hosts_are_not_compared() -> None:
    seen = measure_step(whole(STEP, timed=False, hosts=("here", "there")))
    assert seen.links == {}
    assert seen.step_s == 22.0


def test_what_connections_between_hosts_carried_is_told_by_their_meters() -> None:
    traffic = {(0, 1): LinkTraffic(1, 1500, 3 * SECOND), (1, 0): LinkTraffic(0, 0, SECOND)}
    seen = measure_step(whole(replace(STEP, traffic=traffic), timed=False, hosts=("here", "there")))
    assert seen.carried == {(0, 1): CarriedBytes(1500, 3.0)}


def test_workers_that_were_not_asked_for_times_are_left_out() -> None:
    seen = measure_step(whole(StepTrace(step=1, workers={0: ([action(0, "F", 0)], (), ())})))
    assert (seen.actions, seen.links, seen.step_s) == ({}, {}, 0.0)


def test_messages_that_come_a_little_late_say_nothing_of_their_link_and_those_that_come_very_late_do() -> None:
    latency_s, bandwidth_bps = {0: {1: 0.002}, 1: {0: 0.002}}, {0: {1: 1e6}, 1: {0: 1e6}}
    links = Links(latency_s=latency_s, bandwidth_bps=bandwidth_bps)
    known_s = 2 * 0.002 + 0.001

    def told(seconds: float) -> float:
        seen = StepMeasurement(step=1, step_s=1.0, actions={}, links={(0, 1): LinkTime(1000, seconds, 2)})
        return without_jitter(seen, links).links[0, 1].seconds

    for near in (known_s, known_s + 1.9 * JITTER_S, known_s - 1.9 * JITTER_S):
        assert told(near) == pytest.approx(known_s)
    assert told(known_s + 10.0) == pytest.approx(known_s + 10.0 - 2 * JITTER_S)
