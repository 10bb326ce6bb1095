"""Estimates of links between hosts, probes of those that nobody uses, and the decisions that follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from onebox.plan import CarriedBytes, DeviceSpec, Plan, Problem, ReplanController, SegmentValue, Stage, StepMeasurement
from onebox.plan.replan.network_rates import TICK_S, LinkProbe, NetworkRates, ProbeResult
from tests.unit.plan.problems import links, segment
from tests.unit.plan.replan.simulated_cluster import State, measured, step_s, truth

PLANNED_BPS = 1e9 / 8
BATCH, MICRO_BATCH = 24, 4
SLOW = 100.0
PROBE_S = 0.2


def lab(hosts: str, *, segments: int = 6, value_bytes: int = 4_000, seconds: float = 2e-3) -> Problem:
    """Return a problem with a device on each of some hosts, by their letters, and links of 1 Gbit/s.

    Args:
        hosts: The letters.
        segments: Number of segments.
        value_bytes: Bytes of each value between two of them, for a sample.
        seconds: Seconds of a segment's forward for a sample.
    """
    count = len(hosts)
    return Problem(
        segments=tuple(segment(f"s{n}", seconds, state=4_000_000, saved=1000) for n in range(segments)),
        devices=tuple(DeviceSpec(number=n, type="quick", host=host) for n, host in enumerate(hosts)),
        links=links(count, latency_s=1e-4, bandwidth_bps=PLANNED_BPS),
        batch=BATCH,
        micro_batches=(MICRO_BATCH,),
        values=tuple(
            SegmentValue(source=n, consumers=(n + 1,), forward_bytes=value_bytes, backward_bytes=value_bytes)
            for n in range(segments - 1)
        ),
        call_s=1e-5,
        schedules=("1f1b",),
    )


def staged(problem: Problem, *devices: tuple[int, ...], cut: int | None = None) -> Plan:
    """Return a plan of stages of about as many segments each, or of two of which the first has some number."""
    names = [each.name for each in problem.segments]
    bounds = [round(n * len(names) / len(devices)) for n in range(len(devices) + 1)]
    bounds = bounds if cut is None else [0, cut, len(names)]
    stages = tuple(
        Stage(
            segments=tuple(names[bounds[n] : bounds[n + 1]]),
            replicas=tuple((device,) for device in own),
            shares=(1 / len(own),) * len(own),
        )
        for n, own in enumerate(devices)
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule="1f1b")


def followed(
    problem: Problem,
    plan: Plan,
    steps: int,
    state: Callable[[int], State],
    *,
    probes: bool = True,
    change: Callable[[StepMeasurement], StepMeasurement] = lambda seen: seen,
) -> tuple[ReplanController, list[tuple[int, str, Plan]]]:
    """Run steps under a controller in a simulated lab; return it, and the step, line and plan of each decision.

    Args:
        problem: What the plan was made for.
        plan: The first plan.
        steps: How many.
        state: What devices and links truly do in each step.
        probes: Whether probes are made.
        change: Changes what is measured of a step.
    """
    controller, made = ReplanController(problem, plan, problem.batch), []
    for step in range(steps):
        decision = controller.see(change(replace(measured(problem, state(step), controller.plan), step=step)))
        if decision is not None:
            made.append((step, decision.line, decision.plan))
            controller.applied(decision, 0.1)
        probe = controller.probe
        if probes and probe is not None:
            rate_bps = truth(problem, state(step)).links.bandwidth_bps[probe.source][probe.target]
            controller.probed(ProbeResult(probe, round(PROBE_S * rate_bps), PROBE_S))
    return controller, made


def seen(step: int, pair: tuple[int, int] = (0, 0), size_bytes: int = 0, seconds: float = 0.0) -> StepMeasurement:
    """Return a step of a second in which two devices' connection carried some bytes."""
    carried = {pair: CarriedBytes(size_bytes, seconds)} if size_bytes else {}
    return StepMeasurement(step=step, step_s=1.0, actions={}, carried=carried)


def dropping(pair: tuple[int, int], begin: int, end: int) -> Callable[[int], State]:
    """Return that a link is slow from one step to another."""
    usual, slow = State(), State(links={pair: SLOW})
    return lambda step: slow if begin <= step < end else usual


@pytest.mark.parametrize("micro_batch", [MICRO_BATCH, None])
def test_a_replica_behind_a_link_that_drops_is_left_out_and_taken_back(micro_batch: int | None) -> None:
    problem = lab("ab")
    plan = Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=micro_batch)
    controller, made = followed(problem, plan, 80, dropping((0, 1), 20, 40))
    (left, why, single), (back, again, _) = made
    assert 20 < left <= 24
    assert "link a–b carries 10 Mbit/s since step 20, 100.0 × less than planned" in why
    assert len(single.devices) == 1
    assert 40 <= back <= 70
    assert "link a–b carries 1 Gbit/s since step" in again
    assert controller.plan.devices == (0, 1)
    assert controller.plan.micro_batches(BATCH) == plan.micro_batches(BATCH) == single.micro_batches(BATCH)


def test_both_devices_of_a_host_are_left_out_where_its_link_drops() -> None:
    problem = lab("aabb")
    plan = Plan.data_parallel([0, 1, 2, 3], [1.0] * 4, micro_batch=MICRO_BATCH)

    def state(step: int) -> State:
        return State(links={(a, b): SLOW for a in (0, 1) for b in (2, 3)} if step >= 20 else {})

    _, made = followed(problem, plan, 40, state)
    assert [sorted(after.devices) for _, _, after in made] in ([[0, 1]], [[2, 3]])


def test_the_device_all_of_whose_links_drop_is_left_out_and_no_other_is_tried_first() -> None:
    plan = Plan.data_parallel([0, 1, 2], [1.0] * 3, micro_batch=MICRO_BATCH)
    first, both = State(links={(0, 2): SLOW}), State(links={(0, 2): SLOW, (1, 2): SLOW})

    def state(step: int) -> State:  # a link that becomes slow in the midst of a step is found a step later
        return both if step >= 21 else first if step >= 20 else State()

    _, made = followed(lab("abc"), plan, 40, state)
    assert [after.devices for _, _, after in made] == [(0, 1)]
    assert made[0][0] <= 24


def test_another_link_that_drops_while_a_decision_is_evaluated_is_not_left_for_later() -> None:
    plan = Plan.data_parallel([0, 1, 2], [1.0] * 3, micro_batch=MICRO_BATCH)

    def state(step: int) -> State:
        return State(links={pair: SLOW for pair, begin in (((0, 2), 20), ((1, 2), 20), ((0, 1), 26)) if step >= begin})

    _, made = followed(lab("abc"), plan, 40, state)
    assert [len(after.devices) for _, _, after in made] == [2, 1]
    assert made[1][0] <= 29


@pytest.mark.parametrize("together", [{}, {"a": 1.5, "b": 1.6}], ids=["apart", "together"])
def test_a_device_alone_is_expected_to_take_what_it_takes_alone(together: dict[str, float]) -> None:
    """Two virtual machines of one machine compute more slowly together; over a slow link, one alone is quicker."""
    planned = lab("ab", value_bytes=100_000)
    planned = replace(planned, devices=tuple(replace(device, processor=True) for device in planned.devices))
    true, plan = replace(planned, together={"a": 1.5, "b": 1.6}), staged(planned, (0,), (1,))
    alone = staged(planned, (0,))
    usual, slow = State(), State(links={(0, 1): 8.0})
    assert step_s(true, plan) < step_s(true, alone) < step_s(truth(true, slow), plan)
    known = replace(planned, together=together)
    controller = ReplanController(known, plan, BATCH)
    for step in range(40):
        seen_s = measured(true, usual if step < 20 else slow, controller.plan)
        decision = controller.see(replace(seen_s, step=step))
        if decision is not None:
            controller.applied(decision, 0.1)
    assert (len(controller.plan.devices) == 1) == bool(together)


@pytest.mark.parametrize("regroupable", [False, True])
def test_one_stage_on_one_host_has_the_micro_batches_that_suit_it_if_the_result_allows(regroupable: bool) -> None:
    """Calls cost as much as samples, so that fewer micro-batches are quicker; with the link, the pipeline is back."""
    problem = replace(
        lab("ab", value_bytes=100_000), micro_batches=(2, MICRO_BATCH, 24), call_s=2e-3, regroupable=regroupable
    )
    plan = staged(problem, (0,), (1,))
    controller, made = followed(problem, plan, 120, dropping((0, 1), 20, 40))
    _, line, alone = made[0]
    assert len(alone.stages) == len(alone.devices) == 1
    assert alone.micro_batch == (24 if regroupable else MICRO_BATCH)
    assert ("micro-batches are of 24 samples" in line) == regroupable
    assert alone.predicted is not None and alone.predicted.batch == BATCH
    usual = [msgspec.structs.replace(Plan.data_parallel([0], [1.0]), micro_batch=size) for size in (2, 4, 24)]
    least_s = min(step_s(problem, each) for each in (usual if regroupable else usual[1:2]))
    assert alone.predicted.step_s == pytest.approx(least_s, rel=0.02)
    assert set(controller.plan.devices) == {0, 1} and controller.plan.micro_batch == MICRO_BATCH


def test_a_pipeline_over_a_link_that_drops_goes_on_without_it_and_comes_back() -> None:
    problem = lab("ab", value_bytes=100_000)
    plan = staged(problem, (0,), (1,))
    controller, made = followed(problem, plan, 90, dropping((0, 1), 20, 40))
    assert len(made[0][2].devices) == 1
    assert made[0][0] <= 24
    assert set(controller.plan.devices) == {0, 1}


def test_a_replica_of_a_stage_is_left_out_in_a_hybrid_plan() -> None:
    problem = lab("abc", value_bytes=16_000)
    plan = staged(problem, (0,), (1, 2))
    slow = State(links={(0, 2): SLOW, (1, 2): SLOW})
    _, made = followed(problem, plan, 50, lambda step: slow if step >= 20 else State())
    assert made[0][0] <= 24
    assert 2 not in made[0][2].devices


def test_a_slowdown_that_cannot_be_mended_is_said_once() -> None:
    problem = lab("ab")
    tight = replace(
        problem, devices=tuple(replace(device, capacity_bytes=17_000_000) for device in problem.devices)
    )  # neither device has room for all segments
    controller, made = followed(tight, staged(tight, (0,), (1,)), 60, dropping((0, 1), 20, 60))
    assert not made
    (line,) = controller.unmended
    assert line.startswith("step ")
    assert "link a–b carries 10 Mbit/s since step 20, 100.0 × less than planned; no other plan is quicker: " in line


def test_what_is_measured_between_two_devices_holds_for_all_of_their_hosts_and_for_the_way_back() -> None:
    rates = NetworkRates(lab("aabb"))
    for step in range(3):
        rates.see(seen(step, (0, 2), 1_250_000, 1.0))
    assert [rates.factor(a, b) for a, b in ((0, 2), (1, 3), (2, 1))] == pytest.approx([SLOW] * 3)
    assert rates.factor(0, 1) == 1.0
    assert [change.text for change in rates.slow()] == [
        "link a–b carries 10 Mbit/s since step 0, 100.0 × less than planned"
    ]
    for step in range(3, 6):
        rates.see(seen(step, (3, 1), 2_500_000, 0.2))
    assert rates.factor(2, 0) == pytest.approx(10.0)  # the way back is known now
    assert rates.factor(0, 2) == pytest.approx(SLOW)


def test_an_estimate_that_the_first_samples_correct_is_another_change() -> None:
    rates, told = NetworkRates(lab("ab")), []
    for step, seconds in enumerate([0.2, 0.2, 1.0, 1.0, 1.0, 1.0]):  # at first a bucket of tokens lets bytes pass
        told += rates.see(seen(step, (0, 1), 1_250_000, seconds))
    assert [change.factor for change in told[:1]] == pytest.approx([20.0])
    assert rates.factor(0, 1) == pytest.approx(SLOW)
    assert told[-1].factor == pytest.approx(SLOW)


def test_few_bytes_over_a_slow_link_do_not_make_it_quick() -> None:
    rates = NetworkRates(lab("ab"))
    for step in range(3):
        rates.see(seen(step, (0, 1), 1_250_000, 1.0))
    for step in range(3, 20):
        rates.see(seen(step, (0, 1), 20_000, 0.016))
    assert rates.factor(0, 1) == pytest.approx(SLOW)


@pytest.mark.parametrize(
    ("size_bytes", "seconds"),
    [
        (1000, 3.0),  # a few bytes may have waited behind others
        (100_000, 0.9 * TICK_S),  # the kernel's clock is no finer
        (100_000, 0.09),  # hardly a part of the step
        (125_000_000, 0.3),  # quicker than the network may be known to be
        (125_000_000, 1.0),
    ],
)
def test_some_measurements_tell_nothing_new(size_bytes: int, seconds: float) -> None:
    rates = NetworkRates(lab("ab"))
    for step in range(40):
        assert not rates.see(seen(step, (0, 1), size_bytes, seconds))
    assert rates.factor(0, 1) == 1.0


def test_a_slow_link_that_nobody_uses_is_probed_by_idle_devices_and_the_longer_that_takes_the_less_often() -> None:
    rates = NetworkRates(lab("aabb"))
    for step in range(3):
        rates.see(seen(step, (0, 2), 1_250_000, 1.0))
    assert rates.probe((0, 2)) is None  # it is in use
    waited = 0
    while (probe := rates.probe((0, 1, 2))) is None:
        rates.see(seen(3 + waited))
        waited += 1
    assert waited == 3
    assert probe == LinkProbe(0, 3, pytest.approx(PLANNED_BPS / SLOW))
    assert not rates.probed(ProbeResult(probe, 0, 0.0), 6), "it failed"
    assert not rates.probed(ProbeResult(probe, 1_250_000, 1.0), 6), "the link is as it was"
    again = next(n for n in range(100) if rates.see(seen(n)) or rates.probe(()) is not None)
    assert again == math.ceil(1.0 / 0.05) - 1
    (change,) = rates.probed(ProbeResult(probe, 12_500_000, 0.1), 30)
    assert change.text == "link a–b carries 1 Gbit/s since step 30, as planned"
    assert rates.factor(1, 2) == 1.0
    assert rates.probe(()) is None
