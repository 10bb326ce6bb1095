"""Steps that follow one another: their period is that of a slow simulation of many; what they hold in memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.plan import (
    PlanWork,
    Routes,
    Schedule,
    block_schedule,
    draw_timeline,
    named_schedule,
    simulate,
    simulate_steady_state,
    steady_window,
)
from onebox.plan.simulate.steady_state import UpdateTiming
from tests.unit.plan.cases import Case, cases, edges_of, equal_links, even, work_for

STEPS = 24
Step = tuple[str, int, int, int]
"""A kind, U for an update; a stage, a step, a micro-batch of it."""


def long_row(
    row: Sequence[tuple[str, int, int]], count: int, stages: Sequence[int], place: int, updates: UpdateTiming
) -> list[Step]:
    """Return what a device does in all steps, spelled out."""
    found: list[Step] = []
    for turn in range(STEPS):
        if updates == "step":
            found += [(kind, stage, turn, number) for kind, stage, number in row]
            found += [("U", stage, turn, 0) for stage in stages]
            continue
        waiting = [("U", stage, turn - 1, 0) for stage in stages if turn]
        for number, (kind, stage, micro_batch) in enumerate(row):
            if updates == "window" and number == place:
                found += waiting
            for update in [one for one in waiting if updates == "overlap" and kind == "F" and one[1] == stage]:
                found.append(update)
                waiting.remove(update)
            step, own = (turn, micro_batch) if micro_batch >= 0 else (turn - 1, micro_batch + count)
            if step >= 0:
                found.append((kind, stage, step, own))
        if updates == "window" and place == len(row):
            found += waiting
    return found


class Slow:
    """One event after the other, in the order of time."""

    def __init__(self, case: Case, schedule: Schedule, updates: UpdateTiming) -> None:
        self.case, self.count, work = case, len(case.routes[0]), case.work
        self.holders = [sorted({d for replica in row for d in replica}) for row in case.routes]
        self.replicas = [list(dict.fromkeys(row)) for row in case.routes]
        self.rows = {}
        for device, row in schedule.rows.items():
            stages = [stage for stage, devices in enumerate(self.holders) if device in devices]
            shared = any(len(self.replicas[stage]) > 1 for stage in stages)
            negative = [place for place, action in enumerate(row) if action.micro_batch < 0]
            place = len(row) if shared else max(negative, default=-1) + 1
            self.rows[device] = long_row(row, self.count, stages, place, updates)
        self.work = work
        self.done: dict[Step, float] = {}
        self.there: dict[tuple[Step, int], float] = {}  # of a message: its arrival, by what it is for and its source
        self.gradients: dict[tuple[int, int], list[float]] = {}
        self.summed: dict[tuple[int, int], float] = {}
        self.free: dict[int, float] = dict.fromkeys(self.rows, 0.0)
        self.link: dict[tuple[int, int], float] = {}
        self.ring: dict[int, float] = {}
        self.place = dict.fromkeys(self.rows, 0)
        self.begun: dict[int, list[float]] = {device: [] for device in self.rows}

    def period(self) -> float:
        """Return how far the later steps are apart."""
        heap = [(0.0, device) for device in self.rows]
        while heap:
            now, device = heapq.heappop(heap)
            if self.place[device] == len(self.rows[device]) or now < self.free[device]:
                continue
            step = self.rows[device][self.place[device]]
            if not self.may_begin(step, now):
                continue
            took = self.took(step, device)
            kind, _, turn, _ = step
            if kind == "F" and turn == len(self.begun[device]):
                self.begun[device].append(now)
            self.place[device] += 1
            self.free[device] = end = now + took
            heapq.heappush(heap, (end, device))
            for when in self.ended(step, device, end):
                for other in self.rows:
                    heapq.heappush(heap, (max(when, self.free[other]), other))
        assert all(self.place[device] >= len(row) - 4 * self.count for device, row in self.rows.items())
        half = STEPS // 4
        return max((times[3 * half] - times[half]) / (2 * half) for times in self.begun.values())

    def may_begin(self, step: Step, now: float) -> bool:
        """Say whether its inputs are there."""
        kind, stage, turn, _ = step
        if kind == "U":
            return self.summed.get((stage, turn), float("inf")) <= now
        ends = [(e.source if kind == "F" else e.target) for e in self.work.edges
                if (e.target if kind == "F" else e.source) == stage]  # fmt: skip
        return all(self.there.get((step, other), float("inf")) <= now for other in ends)

    def took(self, step: Step, device: int) -> float:
        """Return how long it takes."""
        kind, stage, _, number = step
        cost = self.work.stages[stage]
        if kind == "U":
            return cost.update_s.get(device, 0.0)
        each = cost.forward_s[device] if kind == "F" else cost.input_s[device] + cost.weight_s[device]
        return self.work.call_s + each * self.case.sizes[number]

    def ended(self, step: Step, device: int, now: float) -> list[float]:
        """Note what follows from its end; return when."""
        kind, stage, turn, number = step
        whens = []
        if kind == "B":
            known = self.gradients.setdefault((stage, turn), [])
            known.append(now)
            if len(known) == self.count:
                holders = self.holders[stage]
                if len(holders) > 1:
                    start = max([*known, *(self.ring.get(one, 0.0) for one in holders)])
                    now_summed = start + self.work.links.ring_seconds(
                        self.replicas[stage], self.work.stages[stage].gradient_bytes
                    )
                    self.ring.update(dict.fromkeys(holders, now_summed))
                else:
                    now_summed = max(known)
                self.summed[stage, turn] = now_summed
                whens.append(now_summed)
        for edge in self.work.edges if kind != "U" else ():
            forward = kind == "F" and edge.source == stage
            if not forward and not (kind == "B" and edge.target == stage):
                continue
            other = edge.target if forward else edge.source
            (target,) = self.case.routes[other][number]
            size = (edge.forward_bytes if forward else edge.backward_bytes) * self.case.sizes[number]
            arrival = now
            if target != device:
                sent = (
                    max(now, self.link.get((device, target), 0.0))
                    + size / self.work.links.bandwidth_bps[device][target]
                )
                self.link[device, target] = sent
                arrival = sent + self.work.links.latency_s[device][target]
            self.there[(kind, other, turn, number), stage] = arrival
            whens.append(arrival)
        return whens


@pytest.mark.parametrize("updates", ["step", "overlap", "window"])
@settings(deadline=None, max_examples=25)
@given(case=cases(wide=False), data=st.data())
def test_the_period_is_that_of_a_slow_simulation(updates: UpdateTiming, case: Case, data: st.DataObject) -> None:
    edges = edges_of(case.work)
    if updates == "window":
        in_flight = data.draw(st.just(()) | st.tuples(*(st.integers(0, 3) for _ in case.routes)))
        schedule = steady_window(case.routes, edges, in_flight)
    else:
        schedule = block_schedule(data.draw(st.sampled_from(["gpipe", "1f1b"])), case.routes, edges=edges)
    found = simulate_steady_state(schedule, case.routes, case.work, case.sizes, updates=updates, detail=False)
    slow = Slow(case, schedule, updates)
    several = [stage for stage, replicas in enumerate(slow.replicas) if len(replicas) > 1]
    held = [device for stage in several for device in slow.holders[stage]]
    if len(set(held)) == len(held):  # otherwise whose sums come first on a device is not the same for both
        assert found.step_s == pytest.approx(slow.period(), rel=0.01)
    busy = max(found.busy_s.values())
    assert found.step_s >= busy * (1 - 1e-9)
    assert found.bubble == pytest.approx(1 - sum(found.busy_s.values()) / len(found.busy_s) / found.step_s, abs=1e-9)


def test_an_even_pipeline_is_never_idle() -> None:
    routes = even(4, 4)
    work = work_for(routes, update_s=0.5)
    found = simulate_steady_state(steady_window(routes), routes, work)
    assert found.step_s == pytest.approx(12.5)
    assert found.bubble == pytest.approx(0.0, abs=1e-9)
    assert draw_timeline(found, 40).count(".") <= 5  # the scale's own


def test_steps_without_a_barrier_take_less_than_one_by_itself() -> None:
    """Under ``zbv``, the device that begins a step is not the one that ends it."""
    routes = even(4, 8, 2, vee=True)
    work, schedule = work_for(routes, update_s=1.0), named_schedule("zbv", routes)
    alone = simulate(schedule, routes, work).step_s
    each = simulate_steady_state(schedule, routes, work, updates="step").step_s
    overlapped = simulate_steady_state(schedule, routes, work, updates="overlap").step_s
    assert overlapped <= each < alone


def replicated(bandwidth_bps: float) -> tuple[Routes, PlanWork]:
    routes = (((0,), (1,)) * 2, ((2,),) * 4)
    links = equal_links({0, 1, 2}, bandwidth_bps=bandwidth_bps)
    return routes, work_for(routes, links=links, gradient_bytes=12, state_bytes=100, saved_bytes=7)


def test_sums_over_replicas_hide_under_the_next_step() -> None:
    routes, slow = replicated(4.0)
    _, quick = replicated(1e9)
    window = steady_window(routes)
    assert simulate_steady_state(window, routes, slow).step_s == simulate_steady_state(window, routes, quick).step_s
    whole = named_schedule("1f1b", routes)
    assert simulate(whole, routes, slow).step_s >= simulate(whole, routes, quick).step_s + 3.0 - 1e-6


def test_memory_of_versions_and_of_what_is_in_flight() -> None:
    routes, work = replicated(4.0)
    window = steady_window(routes)
    assert window.lines()[0] == "0: 0F0 0B-2 0F2 0B0"
    for versions in (2, 3):
        peaks = simulate_steady_state(window, routes, work, versions=versions).peak_bytes
        # Two micro-batches in flight; other versions; and a second sum of gradients, as the update waits for the vote.
        assert peaks[0] == 100 + 2 * 7 + 12 * (versions - 1) + 12
        # The last stage holds one.
        assert peaks[2] == 100 + 7 + 12 * (versions - 1) + 12


def test_what_never_ends() -> None:
    routes = even(2, 2)
    with pytest.raises(UsageError, match="never ends"):
        simulate_steady_state(Schedule.parse(["0: 0B0 0F0 0F1 0B1", "1: 1F0 1B0 1F1 1B1"]), routes, work_for(routes))
    with pytest.raises(UsageError, match="no part in the plan"):
        simulate_steady_state(Schedule.parse(["7: 0F0"]), routes, work_for(routes))
