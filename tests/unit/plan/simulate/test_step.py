"""The simulator against cases worked out by hand, against bounds, and against a slow second one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from onebox.errors import UsageError
from onebox.plan import NAMED, Action, Links, Routes, Schedule, Simulation, draw_timeline, named_schedule, simulate
from tests.unit.plan.cases import Case, cases, edges_of, equal_links, even, table, work_for

TWO = even(2, 2)
ORDER = table("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1")


def test_two_stages_by_hand() -> None:
    found = simulate(ORDER, TWO, work_for(TWO))
    assert {str(span.action): (span.start_s, span.end_s) for span in found.spans} == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1, 2),
        "1B0": (2, 4),
        "0B0": (4, 6),
        "1F1": (4, 5),
        "1B1": (5, 7),
        "0B1": (7, 9),
    }
    assert found.step_s == 9
    assert found.busy_s == {0: 6, 1: 6}
    assert found.bubble == pytest.approx(1 - 12 / 18)


def test_messages_queue_on_their_link_and_arrive_later() -> None:
    links = equal_links({0, 1}, latency_s=0.5, bandwidth_bps=10.0)
    found = simulate(ORDER, TWO, work_for(TWO, size_bytes=20, links=links))
    sent = {(move.micro_batch, move.forward): (move.start_s, move.end_s) for move in found.transfers}
    # the first value goes out at 1 and keeps the link until 3; the second is ready at 2 and waits for it
    assert sent[0, True] == (1, 3.5)
    assert sent[1, True] == (3, 5.5)
    assert sent[0, False] == (6.5, 9.0)  # F from 3.5, B until 6.5
    assert {(move.source, move.target, move.source_stage, move.target_stage) for move in found.transfers} == {
        (0, 1, 0, 1),
        (1, 0, 1, 0),
    }


def test_both_directions_of_a_link_are_apart() -> None:
    latency = {0: {0: 0.0, 1: 0.0}, 1: {0: 0.0, 1: 0.0}}
    links = Links(latency_s=latency, bandwidth_bps={0: {0: 1.0, 1: 10.0}, 1: {0: 20.0, 1: 1.0}})
    found = simulate(ORDER, TWO, work_for(TWO, size_bytes=20, links=links))
    lengths = {(move.micro_batch, move.forward): move.end_s - move.start_s for move in found.transfers}
    assert lengths == {(0, True): 2, (1, True): 2, (0, False): 1, (1, False): 1}


def test_a_split_backward_sends_its_gradient_early() -> None:
    early = table("0: 0F0 0F1 0B0 0B1\n1: 1F0 1I0 1F1 1I1 1W0 1W1")
    found = simulate(early, TWO, work_for(TWO))
    starts = {str(span.action): span.start_s for span in found.spans}
    assert starts["0B0"] == 3  # 1I0 ends then; a whole backward would end at 4
    assert found.step_s == 7


def test_nothing_travels_within_a_device() -> None:
    routes = ((((0,),) * 2), (((0,),) * 2))
    links = equal_links({0}, latency_s=9.0, bandwidth_bps=1.0)
    rows = table("0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    found = simulate(rows, routes, work_for(routes, size_bytes=100, links=links))
    assert found.step_s == 12
    assert found.transfers == ()


def test_sizes_scale_times_messages_and_memory_but_not_the_cost_of_a_call() -> None:
    links = equal_links({0, 1}, bandwidth_bps=10.0)
    work = work_for(TWO, size_bytes=20, links=links, call_s=0.125, saved_bytes=100)
    found = simulate(ORDER, TWO, work, (1.0, 0.5))
    spans = {str(span.action): span.end_s - span.start_s for span in found.spans}
    assert spans["0F0"] == 1.125
    assert spans["0F1"] == 0.625
    assert spans["0B1"] == 1.125
    assert {move.micro_batch: move.end_s - move.start_s for move in found.transfers} == {0: 2, 1: 1}
    assert found.peak_bytes == {0: 150, 1: 100}


def test_replicas_sum_their_gradients_beside_other_actions() -> None:
    routes: Routes = (((0,), (1,)), ((0,), (0,)))
    rows = table("0: 0F0 1F0 1B0 0B0 1F1 1B1\n1: 0F1 0B1")
    links = equal_links({0, 1}, latency_s=0.25, bandwidth_bps=10.0)
    work = work_for(routes, links=links, gradient_bytes=20, update_s=2.0)
    found = simulate(rows, routes, work)
    ends = {(span.device, str(span.action)): span.end_s for span in found.spans}
    assert ends[0, "0B0"] == 6
    assert ends[1, "0B1"] == 9 + 0.25 + 2  # 1B1 on device 0 ends at 9, its gradient takes a latency
    reductions = [update for update in found.updates if update.stage is not None]
    # 2 (n - 1) / n * 20 bytes at 10 a second and 2 (n - 1) latencies, once both are ready
    assert [(update.device, update.stage, update.start_s, update.end_s) for update in reductions] == [
        (0, 0, 11.25, 13.75),
        (1, 0, 11.25, 13.75),
    ]
    steps = {update.device: (update.start_s, update.end_s) for update in found.updates if update.stage is None}
    assert steps == {0: (13.75, 17.75), 1: (13.75, 15.75)}  # device 0 updates both of its stages
    assert found.step_s == 17.75
    assert found.busy_s == {0: 9 + 4, 1: 3 + 2}


def test_a_device_sums_the_gradients_of_one_stage_at_a_time() -> None:
    routes: Routes = (((0,), (1,)), ((0,), (1,)))
    rows = table("0: 0F0 1F0 1B0 0B0\n1: 0F1 1F1 1B1 0B1")
    work = work_for(routes, links=equal_links({0, 1}, bandwidth_bps=10.0), gradient_bytes=80)
    found = simulate(rows, routes, work)
    sums = {(update.device, update.stage): (update.start_s, update.end_s) for update in found.updates}
    # stage 1 is ready at 4 and takes 8 seconds; stage 0 is ready at 6 and waits for it
    assert sums == {
        (0, 1): (4, 12),
        (1, 1): (4, 12),
        (0, 0): (12, 20),
        (1, 0): (12, 20),
        (0, None): (20, 20),
        (1, None): (20, 20),
    }
    assert found.step_s == 20


def test_messages_and_sums_of_several_devices_take_turns_on_the_uplink_that_they_share() -> None:
    routes: Routes = (((0,), (1,)), ((2,), (3,)))
    rows = table("0: 0F0 0B0\n1: 0F1 0B1\n2: 1F0 1B0\n3: 1F1 1B1")
    links = equal_links({0, 1, 2, 3}, bandwidth_bps=10.0)
    apart = simulate(rows, routes, work_for(routes, links=links, size_bytes=20))
    shared = replace(links, uplinks={0: "a", 1: "a", 2: "b", 3: "b"})
    found = simulate(rows, routes, work_for(routes, links=shared, size_bytes=20))

    def sent(each: Simulation) -> dict[tuple[int, int], tuple[float, float]]:
        return {(move.source, move.target): (move.start_s, move.end_s) for move in each.transfers}

    assert sent(apart) == {(0, 2): (1, 3), (1, 3): (1, 3), (2, 0): (6, 8), (3, 1): (6, 8)}
    # the values arrive at 3 and 5, so that the gradients leave at 6 and 8: these do not wait
    assert sent(found) == {(0, 2): (1, 3), (1, 3): (3, 5), (2, 0): (6, 8), (3, 1): (8, 10)}
    assert (apart.step_s, found.step_s) == (10, 12)
    halves = replace(links, uplinks={0: "a", 1: "b", 2: "c", 3: "d"})
    assert sent(simulate(rows, routes, work_for(routes, links=halves, size_bytes=20))) == sent(apart)

    crossing = replace(links, uplinks={0: "a", 2: "a", 1: "b", 3: "b"})  # each stage has a replica on either side
    times = [
        {
            (made.stage, made.start_s, made.end_s)
            for made in simulate(rows, routes, work).updates
            if made.stage is not None
        }
        for work in (work_for(routes, links=way, gradient_bytes=40) for way in (links, crossing))
    ]
    assert times == [{(1, 4, 8), (0, 6, 10)}, {(1, 4, 8), (0, 8, 12)}]


def test_a_message_takes_a_gap_between_those_of_devices_that_were_simulated_before() -> None:
    # device 0 sends at 1 and 2, and device 1, whose row comes after that, between these
    routes: Routes = (((0,), (0,), (1,)), ((2,), (2,), (3,)))
    rows = table("0: 0F0 0F1 0B0 0B1\n1: 0F2 0B2\n2: 1F0 1B0 1F1 1B1\n3: 1F2 1B2")
    links = replace(equal_links({0, 1, 2, 3}, bandwidth_bps=50.0), uplinks={0: "a", 1: "a", 2: "b", 3: "b"})
    found = simulate(rows, routes, work_for(routes, links=links, size_bytes=20))
    sent = {move.micro_batch: move.start_s for move in found.transfers if move.forward}
    assert sent == {0: 1, 1: 2, 2: 1.4}


def test_a_replica_of_two_devices_acts_at_once() -> None:
    routes: Routes = (((0,),), ((0, 1),))
    rows = table("0: 0F0 1F0 1B0 0B0\n1: 1F0 1B0")
    work = work_for(routes)
    slow = replace(work.stages[1], forward_s={0: 1.0, 1: 3.0}, input_s={0: 1.0, 1: 3.0})
    found = simulate(rows, routes, replace(work, stages=(work.stages[0], slow)))
    assert [(span.device, str(span.action), span.start_s, span.end_s) for span in found.spans] == [
        (0, "0F0", 0, 1),
        (0, "1F0", 1, 4),
        (0, "1B0", 4, 8),
        (0, "0B0", 8, 10),
        (1, "1F0", 1, 4),
        (1, "1B0", 4, 8),
    ]


def test_memory_by_hand() -> None:
    routes = even(1, 2)
    sizes = {"saved_bytes": 10, "late_bytes": 4, "forward_work_bytes": 3, "backward_work_bytes": 5, "state_bytes": 100}
    work = work_for(routes, **sizes)
    assert simulate(table("0: 0F0 0F1 0B0 0B1"), routes, work).peak_bytes[0] == 100 + 20 + 5
    assert simulate(table("0: 0F0 0B0 0F1 0B1"), routes, work).peak_bytes[0] == 100 + 10 + 5
    assert simulate(table("0: 0F0 0F1 0I0 0I1 0W0 0W1"), routes, work).peak_bytes[0] == 100 + 20 + 4 + 5
    # with 0W0 put off, 0I1 has 0's late bytes, its own saved and late ones
    assert simulate(table("0: 0F0 0I0 0F1 0I1 0W0 0W1"), routes, work).peak_bytes[0] == 100 + 10 + 4 + 4 + 5
    tight = work_for(routes, capacity={0: 120}, **sizes)
    assert simulate(table("0: 0F0 0F1 0B0 0B1"), routes, tight).over_bytes == {0: 5}
    assert simulate(table("0: 0F0 0B0 0F1 0B1"), routes, tight).over_bytes == {}


def test_a_schedule_that_waits_for_ever_is_refused() -> None:
    with pytest.raises(UsageError, match="never ends: 0B0 on device 0"):
        simulate(table("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1"), TWO, work_for(TWO))


@pytest.mark.parametrize(
    ("routes", "sizes", "what"),
    [
        ((), None, "routes for 0 stages"),
        ((((0,), (0,)), ((0,),)), None, "routes for 2, 1 micro-batches"),
        ((((0,), (0,)), ((1,), (1,))), (1.0,), "1 sizes for 2 micro-batches"),
        ((((0,), (0,)), ((7,), (7,))), None, "no forward_s for device 7"),
        ((((0,), (0,)), ((1,), (1,))), (1.0, 1.0), "0.0 bytes/s from device 0 to 1"),
    ],
)
def test_what_does_not_fit_together(routes: Routes, sizes: tuple[float, ...] | None, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        simulate(ORDER, routes, work_for(TWO, links=equal_links({0, 1}, bandwidth_bps=0.0)), sizes)


def test_a_stranger_in_the_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="device 5, which has no part"):
        simulate(Schedule(rows={**ORDER.rows, 5: ()}), TWO, work_for(TWO))


def test_without_details_only_the_details_are_missing() -> None:
    whole = simulate(ORDER, TWO, work_for(TWO, size_bytes=5))
    brief = simulate(ORDER, TWO, work_for(TWO, size_bytes=5), detail=False)
    assert (brief.spans, brief.transfers) == ((), ())
    for name in ("step_s", "updates", "busy_s", "bubble", "peak_bytes", "over_bytes"):
        assert getattr(brief, name) == getattr(whole, name)


def naive(schedule: Schedule, case: Case) -> dict[tuple[int, Action], tuple[float, float]]:
    """Time a schedule in the simplest way: the next action in time of all devices, over and over, from definitions."""
    routes, work, sizes = case
    spans: dict[tuple[int, Action], tuple[float, float]] = {}
    place = dict.fromkeys(schedule.rows, 0)
    free = dict.fromkeys(schedule.rows, 0.0)
    link: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[str, int, int, int], float] = {}
    while any(place[device] < len(row) for device, row in schedule.rows.items()):
        options = []
        for device, row in schedule.rows.items():
            if place[device] == len(row):
                continue
            kind, stage, m = action = row[place[device]]
            members = routes[stage][m]
            ready = all(place[o] < len(schedule.rows[o]) and schedule.rows[o][place[o]] == action for o in members)
            wanted = [e.source for e in work.edges if e.target == stage] if kind == "F" else []
            wanted = [e.target for e in work.edges if e.source == stage] if kind in "IB" else wanted
            side = "F" if kind == "F" else "B"
            if ready and all((side, other, stage, m) in arrived for other in wanted):
                times = [arrived[side, other, stage, m] for other in wanted]
                options.append((max([*times, *(free[o] for o in members)]), device, action))
        start, device, action = min(options)
        kind, stage, m = action
        members = routes[stage][m]
        cost = work.stages[stage]
        parts = {"F": (cost.forward_s,), "I": (cost.input_s,), "W": (cost.weight_s,)}
        parts["B"] = parts["I"] + parts["W"]
        end = start + work.call_s + sum(max(part[o] for o in members) for part in parts[kind]) * sizes[m]
        for member in members:
            spans[member, action] = (start, end)
            place[member] += 1
            free[member] = end
        for edge in work.edges:
            there = kind == "F" and edge.source == stage
            if not there and not (kind in "IB" and edge.target == stage):
                continue
            other = edge.target if there else edge.source
            a, b = members[0], routes[other][m][0]
            arrival = end
            if a != b:
                size = (edge.forward_bytes if there else edge.backward_bytes) * sizes[m]
                link[a, b] = max(link.get((a, b), 0.0), end) + size / work.links.bandwidth_bps[a][b]
                arrival = link[a, b] + work.links.latency_s[a][b]
            arrived["F" if there else "B", stage, other, m] = arrival
    return spans


def naive_peak(device: int, spans: dict[Action, tuple[float, float]], case: Case) -> float:
    """Return a device's most bytes at the start of any of its actions, from what is held from when to when."""
    routes, work, sizes = case
    held: list[tuple[float, float, float]] = []
    for (kind, stage, m), (start, end) in spans.items():
        cost, size = work.stages[stage], sizes[m]
        held.append((start, end, cost.forward_work_bytes if kind == "F" else cost.backward_work_bytes))
        if kind == "F":
            back = spans.get(Action("I", stage, m)) or spans[Action("B", stage, m)]
            held.append((start, back[1], cost.saved_bytes * size))
        if kind == "I":
            held.append((start, spans[Action("W", stage, m)][1], cost.late_bytes * size))
    mine = [stage for stage, row in enumerate(routes) if any(device in members for members in row)]
    state = sum(work.stages[stage].state_bytes for stage in mine)
    return state + max(sum(size for a, b, size in held if a <= when < b) for when, _ in spans.values())


@settings(max_examples=60, deadline=None)
@given(cases())
def test_it_agrees_with_a_second_one_made_differently(case: Case) -> None:
    for name in ("gpipe", "zb-h1"):
        schedule = named_schedule(name, case.routes, edges=edges_of(case.work))
        found = simulate(schedule, *case)
        expected = naive(schedule, case)
        assert {(span.device, span.action) for span in found.spans} == set(expected)
        for span in found.spans:
            assert (span.start_s, span.end_s) == pytest.approx(expected[span.device, span.action])
        for device, most in found.peak_bytes.items():
            mine = {action: times for (other, action), times in expected.items() if other == device}
            assert abs(most - naive_peak(device, mine, case)) <= 0.5  # whole bytes
        for move in found.transfers:
            assert move.source != move.target
            assert move.end_s >= move.start_s


def _travel_s(links: Links, source: int, target: int, sent: float) -> float:
    return 0.0 if source == target else links.latency_s[source][target] + sent / links.bandwidth_bps[source][target]


def critical_path_s(case: Case) -> float:
    """Return the longest way of one micro-batch there and back, from definitions."""
    routes, work, sizes = case
    longest = 0.0
    for m, size in enumerate(sizes):
        end: dict[tuple[str, int], float] = {}
        for side, order in (("F", range(len(routes))), ("I", range(len(routes) - 1, -1, -1))):
            for stage in order:
                cost, members = work.stages[stage], routes[stage][m]
                times = cost.forward_s if side == "F" else cost.input_s
                start = [0.0] if side == "F" else [end["F", stage]]
                for edge in work.edges:
                    if (edge.target if side == "F" else edge.source) != stage:
                        continue
                    other = edge.source if side == "F" else edge.target
                    sent = (edge.forward_bytes if side == "F" else edge.backward_bytes) * size
                    start.append(end[side, other] + _travel_s(work.links, routes[other][m][0], members[0], sent))
                end[side, stage] = max(start) + work.call_s + max(times[o] for o in members) * size
        longest = max([longest, *end.values()])
    return longest


def check_bounds(case: Case, found: Simulation) -> None:
    assert found.step_s >= critical_path_s(case) * (1 - 1e-12)
    assert found.step_s >= max(found.busy_s.values()) * (1 - 1e-12)
    assert 0 <= found.bubble <= 1


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_step_is_shorter_than_the_critical_path_or_the_busiest_device(case: Case) -> None:
    for name in NAMED:
        check_bounds(case, simulate(named_schedule(name, case.routes, edges=edges_of(case.work)), *case, detail=False))


def test_picture() -> None:
    text = draw_timeline(simulate(ORDER, TWO, work_for(TWO)), width=45)
    assert text.splitlines() == [
        "0 |0F0--0F1--..........0B0-------.....0B1-------|",
        "1 |.....1F0--1B0-------1F1--1B1-------..........|",
        "  |0" + "9 s, 33.3% idle".rjust(44) + "|",
    ]
    narrow = draw_timeline(simulate(ORDER, TWO, work_for(TWO, update_s=1.0)), width=10).splitlines()
    assert narrow[0] == "0 |FF..BB.BBu|"
    assert narrow[1] == "1 |.FBBFBBu..|"
    with pytest.raises(UsageError, match="at least 10"):
        draw_timeline(simulate(ORDER, TWO, work_for(TWO)), width=3)
    with pytest.raises(UsageError, match="detail=False"):
        draw_timeline(simulate(ORDER, TWO, work_for(TWO), detail=False))
