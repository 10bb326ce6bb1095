"""The edge of the run-time scheduler: a plan takes over between steps, and none does after a loss or at the end."""

from __future__ import annotations

import re
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

from onebox.engine.adaptive.controller import AdaptiveController
from onebox.engine.adaptive.measurements import StepContext
from onebox.engine.adaptive.migration import Migration, MigrationReport
from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.observer import EndedStep
from onebox.engine.steps.results import StepTrace
from onebox.errors import DeviceMemoryError, OneboxError
from onebox.plan import Action, MicroBatch, Plan, Stage
from onebox.plan.model.problem import ComputeTime, DeviceSpec, Problem, Segment, SegmentValue
from onebox.plan.model.schedule import Kind
from onebox.plan.model.work import Links
from onebox.plan.replan.network_rates import LinkProbe, ProbeResult
from onebox.wire.protocol.responses import LinkTraffic
from tests.kit.waiting import until

WAIT_S = 20.0
USUAL_BPS, CARRIED_BYTES = 1e8, 1_000_000
PARTS = tuple(MicroBatch(index=index, start=2 * index, size=2) for index in range(4))
NAMES = tuple("abcdef")
KINDS: tuple[Kind, ...] = ("F", "B")


def cut(bound: int) -> Plan:
    own = (NAMES[:bound], NAMES[bound:])
    stages = tuple(Stage(segments=names, replicas=((d,),), shares=(1.0,)) for d, names in enumerate(own))
    return Plan(stages=stages, micro_batch=2, schedule="1f1b")


def problem(scale: float, value_bytes: int = 8, state_bytes: int = 1000) -> Problem:
    """Return six segments that take 10 ms forward, and each half of backward likewise, on either of two devices.

    Args:
        scale: All takes so many times as long.
        value_bytes: Bytes of what goes from one segment to the next, for a sample.
        state_bytes: Of each segment; a device has room for 40 MB.
    """
    each = {"cpu": ComputeTime(sample_s=0.005 * scale)}
    return Problem(
        segments=tuple(
            Segment(name=name, forward_s=each, input_s=each, weight_s=each, update_s={}, state_bytes=state_bytes)
            for name in NAMES
        ),
        devices=tuple(
            DeviceSpec(number=number, type="cpu", host=host, capacity_bytes=40_000_000)
            for number, host in enumerate(("lab1", "lab2"))
        ),
        links=Links(latency_s={0: {1: 0.0}, 1: {0: 0.0}}, bandwidth_bps={0: {1: USUAL_BPS}, 1: {0: USUAL_BPS}}),
        batch=8,
        micro_batches=(2,),
        values=tuple(
            SegmentValue(source=a, consumers=(a + 1,), forward_bytes=value_bytes, backward_bytes=value_bytes)
            for a in range(5)
        ),
    )


class Trained:
    """A run whose workers take what they are said to take; it keeps what it is asked to do."""

    def __init__(self, refuses: OneboxError | None = None, scale: float = 1.0) -> None:
        self.plan, self.steps_done = cut(3), 0
        self.adopted: list[Plan] = []
        self.prepared = 0
        self.probes: list[LinkProbe] = []
        self.link_bps = USUAL_BPS
        self.may_prepare = threading.Event()
        self.may_prepare.set()
        self._refuses = refuses
        self.scale = scale

    def prepare(self, plan: Plan) -> Migration | None:
        assert self.may_prepare.wait(WAIT_S)
        self.prepared += 1
        if self._refuses is not None:
            raise self._refuses
        return None

    def adopt(self, plan: Plan, prepared: Migration | None = None) -> MigrationReport:
        self.adopted.append(plan)
        self.plan = plan
        return MigrationReport(names=1, size_bytes=100)

    def probe(self, probe: LinkProbe) -> ProbeResult:
        self.probes.append(probe)
        return ProbeResult(probe, int(0.2 * self.link_bps), 0.2)

    def step(self, adaptive: AdaptiveController, slow: float) -> None:
        """Do a step, in which the second device takes so many times as long."""
        adaptive.between_steps()
        self.end(adaptive, slow)
        while adaptive._told.qsize():  # what has been told is looked at before the next step
            time.sleep(0.001)

    def end(self, adaptive: AdaptiveController, slow: float) -> None:
        """Let a step end."""
        workers, begin = {}, self.steps_done * int(1e10 * self.scale)
        for device, stage in enumerate(self.plan.stages):
            labels, times, now = [], [], begin
            for part in PARTS:
                for kind in KINDS:
                    took = int(1e7 * self.scale * len(stage.segments) * (1 + (kind == "B")) * (slow if device else 1.0))
                    labels.append(InstructionLabel("", "compute", Action(kind, device, part.index)))
                    times += [now, now + took]
                    now += took
            workers[device] = (labels, tuple(times), ())
        seconds = CARRIED_BYTES / self.link_bps
        carried = LinkTraffic(1, CARRIED_BYTES, int(1e9 * seconds))
        traffic = {(0, 1): carried} if len(self.plan.devices) > 1 else {}
        trace = StepTrace(step=self.steps_done, workers=workers, traffic=traffic)
        self.steps_done += 1
        adaptive.ended(EndedStep(number=trace.step, plan=self.plan, current=True, micro_batches=PARTS, trace=trace))


def context(step: EndedStep, trace: StepTrace) -> StepContext:
    return StepContext(
        trace=trace, micro_batches=step.micro_batches, full=2, hosts={0: "", 1: ""}, timed=lambda one, other: False
    )


def followed(run: Trained) -> AdaptiveController:
    return AdaptiveController(run, lambda plan, steps: problem(run.scale), lambda: 8, context, lambda _: nullcontext())


def until_decided(run: Trained, adaptive: AdaptiveController, slow: float) -> None:
    """Do steps until something has been decided on."""
    until(lambda: adaptive.decisions, turn=lambda: run.step(adaptive, slow))


def test_a_plan_takes_over_when_a_device_becomes_slow_and_its_outcome_is_known_later() -> None:
    run = Trained()
    adaptive = followed(run)
    for _ in range(15):
        run.step(adaptive, 1.0)
    assert adaptive.decisions == ()
    until_decided(run, adaptive, 3.0)
    (made,) = adaptive.decisions
    assert run.adopted == [made.decision.plan] == [run.plan]
    assert len(run.plan.stages[1].segments) < 3
    assert (made.moved_bytes, made.refused, made.outcome) == (100, "", None)
    end_s = time.monotonic() + WAIT_S
    while adaptive.decisions[0].outcome is None and time.monotonic() < end_s:
        run.step(adaptive, 3.0)
    outcome = adaptive.decisions[0].outcome
    assert outcome is not None
    assert outcome.kept
    assert outcome.line in adaptive.decisions[0].line
    adaptive.close()


def test_a_slow_link_between_hosts_is_left_probed_and_used_again() -> None:
    run = Trained()
    adaptive = AdaptiveController(
        run, lambda plan, steps: problem(1.0, CARRIED_BYTES // 8), lambda: 8, context, lambda _: nullcontext()
    )
    for _ in range(12):
        run.step(adaptive, 1.0)
    assert adaptive.decisions == ()
    run.link_bps = USUAL_BPS / 100
    until_decided(run, adaptive, 1.0)
    assert "link lab1–lab2 carries 8 Mbit/s since step" in adaptive.decisions[0].line
    assert len(run.adopted[0].devices) == 1
    while not run.probes:
        run.step(adaptive, 1.0)
    assert run.probes[0].rate_bps == pytest.approx(run.link_bps)
    run.link_bps = USUAL_BPS
    while len(run.adopted) < 2:
        run.step(adaptive, 1.0)
    assert set(run.plan.devices) == {0, 1}
    adaptive.close()


def test_a_slow_link_that_no_plan_does_without_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    run = Trained()
    tight = replace(problem(1.0, CARRIED_BYTES // 8, state_bytes=10_000_000), schedules=("1f1b",))
    adaptive = AdaptiveController(run, lambda plan, steps: tight, lambda: 8, context, lambda _: nullcontext())
    for _ in range(12):
        run.step(adaptive, 1.0)
    run.link_bps = USUAL_BPS / 100
    for _ in range(6):
        run.step(adaptive, 1.0)
    adaptive.close()
    assert adaptive.decisions == ()
    said = (
        r"adaptive: step \d+: link lab1–lab2 carries 8 Mbit/s since step \d+, .* than planned; no other plan is quicker"
    )
    assert len(re.findall(said, caplog.text)) == 1


def test_a_plan_that_has_no_room_is_refused_and_said_once() -> None:
    run = Trained(refuses=DeviceMemoryError("no room"))
    adaptive = followed(run)
    for _ in range(12):
        run.step(adaptive, 1.0)
    until_decided(run, adaptive, 3.0)
    for _ in range(5):
        run.step(adaptive, 3.0)
    adaptive.close()
    assert run.adopted == []
    assert adaptive.decisions[0].refused == "no room"
    assert adaptive.decisions[0].line.endswith("not done: no room")


@pytest.mark.parametrize("end", ["close", "reset"])
def test_what_is_ready_does_not_take_over_after_the_end_or_a_loss(end: str) -> None:
    run = Trained()
    adaptive = followed(run)
    for _ in range(12):
        run.step(adaptive, 1.0)
    until(lambda: run.prepared, turn=lambda: run.step(adaptive, 3.0))
    thread = adaptive._thread
    getattr(adaptive, end)()
    assert thread is not None
    assert not thread.is_alive()
    if end == "reset":
        adaptive.between_steps()
        assert run.adopted == []
        run.step(adaptive, 1.0)
        adaptive.close()


def doubted(run: Trained, adaptive: AdaptiveController) -> None:
    """Do steps as usual, and one that is slow, and wait until it has been looked at."""
    for _ in range(12):
        run.step(adaptive, 1.0)
    run.end(adaptive, 3.0)
    end_s = time.monotonic() + WAIT_S
    while not adaptive._patience_s and time.monotonic() < end_s:
        time.sleep(0.001)
    assert adaptive._patience_s > 0


def test_where_something_has_plainly_changed_the_next_step_waits_for_the_plan_that_follows() -> None:
    run = Trained(scale=1000.0)  # whose steps take minutes, as far as anybody knows: so long may be waited
    adaptive = followed(run)
    doubted(run, adaptive)
    run.end(adaptive, 3.0)
    assert adaptive.between_steps(under_way=True)
    assert [made.decision.plan for made in adaptive.decisions] == run.adopted == [run.plan]
    adaptive.close()


@pytest.mark.parametrize("refuses", [None, DeviceMemoryError("no room")])
def test_a_step_that_waits_goes_on_where_no_plan_follows(refuses: OneboxError | None) -> None:
    run = Trained(refuses=refuses, scale=1000.0)
    adaptive = followed(run)
    doubted(run, adaptive)
    run.end(adaptive, 1.0 if refuses is None else 3.0)
    assert not adaptive.between_steps(under_way=True)
    assert (run.prepared, run.adopted) == (0 if refuses is None else 1, [])
    adaptive.close()


@pytest.mark.parametrize("under_way", [False, True])
def test_nobody_waits_while_no_step_is_under_way_or_for_longer_than_it_is_worth(under_way: bool) -> None:
    run = Trained(scale=0.5)  # steps of some tenths of a second
    adaptive = followed(run)
    doubted(run, adaptive)
    run.may_prepare.clear()
    run.end(adaptive, 3.0)
    assert not adaptive.between_steps(under_way=under_way)
    assert run.prepared == 0, "it would have been waited for until now"
    run.may_prepare.set()
    adaptive.close()


def test_what_the_user_did_meanwhile_is_no_cost_of_a_change() -> None:
    """A device became slow in the last steps before an evaluation that took a while."""
    run = Trained()
    adaptive = followed(run)
    for _ in range(15):
        run.step(adaptive, 1.0)

    def end_a_step() -> None:
        run.end(adaptive, 3.0)
        until(lambda: not adaptive._told.unfinished_tasks, turn=lambda: time.sleep(0.001))

    until(lambda: run.prepared, turn=end_a_step)
    assert adaptive.decisions == ()
    run.steps_done += 100  # so long nothing is done
    until(
        lambda: adaptive.decisions and adaptive.decisions[0].outcome is not None,
        turn=lambda: run.step(adaptive, 3.0),
    )
    (made,) = adaptive.decisions
    assert made.seconds < 10.0, "of the 1000 s in between"
    adaptive.close()
