"""The account of wall time, from spans of the client and intervals of the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.engine.compile.routine import InstructionLabel
from onebox.engine.steps.account import (
    COMPUTING,
    FEED,
    HOST_COPIES,
    PLANNING,
    SAVING,
    STEPS,
    UNKNOWN,
    UNSAMPLED,
    Account,
    ClientInterval,
    DeviceInterval,
    DeviceTime,
    Launch,
    device_intervals,
    exchanges_of,
    joined,
    make_account,
)
from onebox.engine.steps.results import StepTrace
from onebox.wire.protocol.responses import LinkTraffic

MS = 1_000_000
HOSTS = ("lab1", "lab2", "lab1", "lab3")


def steps(*parts: tuple[int, int, str, int], sent: int = -1, host: str = "") -> DeviceTime:
    """A device with one step, of intervals in milliseconds: beginning, end, cause, device that is waited for."""
    begin, end = parts[0][0] * MS, parts[-1][1] * MS
    launch = Launch(begin if sent < 0 else sent * MS, begin, end)
    intervals = [DeviceInterval(start * MS, stop * MS, cause, device) for start, stop, cause, device in parts]
    return DeviceTime(host=host, launches=[launch], intervals=intervals)


def shares(
    until: int, devices: Mapping[int, DeviceTime], *spans: tuple[str, int, int], since: int = 0
) -> dict[str, float]:
    made = [ClientInterval(doing, begin * MS, end * MS) for doing, begin, end in spans]
    found = make_account(since * MS, until * MS, made, devices)
    return {cause: round(share, 6) for cause, share in found.shares.items()}


def test_without_devices_the_client_alone_counts() -> None:
    assert shares(100, {}, (PLANNING, 10, 80)) == {PLANNING: 0.7, "client": 0.3}


def test_no_time_has_no_shares() -> None:
    assert make_account(5, 5, (), {}) == Account(seconds=0.0)
    assert Account(seconds=0.0).text == "no time has passed"


def test_what_devices_do_counts_and_not_what_the_client_does_beside() -> None:
    busy = steps((0, 80, COMPUTING, -1))
    assert shares(100, {0: busy}, (SAVING, 20, 90)) == {COMPUTING: 0.8, SAVING: 0.1, "client": 0.1}


def test_a_device_that_is_slow_is_what_the_others_wait_for() -> None:
    fast, slow = steps((0, 50, COMPUTING, -1), (50, 100, "", 1)), steps((0, 100, COMPUTING, -1))
    assert shares(100, {0: fast, 1: slow}) == {COMPUTING: 0.75, "waiting for device 1": 0.25}


def test_who_waits_for_one_that_waits_has_its_cause() -> None:
    first = steps((0, 20, COMPUTING, -1), (20, 100, "", 1))
    second = steps((0, 60, "link lab1–lab2", -1), (60, 90, COMPUTING, -1), (90, 100, "", 2))
    third = steps((0, 100, COMPUTING, -1))
    assert shares(100, {0: first}) == {COMPUTING: 0.2, "waiting for device 1": 0.8}  # one of whom nothing is known
    found = shares(100, {0: first, 1: second, 2: third})
    assert found == {
        COMPUTING: round((20 + 30 + 100) / 300, 6),
        "link lab1–lab2": round((40 + 60) / 300, 6),
        "waiting for device 1": 0.1,
        "waiting for device 2": round((10 + 10) / 300, 6),
    }


def test_a_circle_of_waits_ends() -> None:
    one, other = steps((0, 10, "", 1)), steps((0, 10, "", 0))
    assert shares(10, {0: one, 1: other}) == {"waiting for device 0": 0.5, "waiting for device 1": 0.5}


def test_a_step_that_is_not_sent_is_late_by_what_the_client_does() -> None:
    late = steps((60, 100, COMPUTING, -1), sent=50, host="lab1")
    found = shares(100, {0: late}, (FEED, 0, 30), (SAVING, 30, 45))
    assert found == {COMPUTING: 0.4, FEED: 0.3, SAVING: 0.15, "client": 0.05, "link lab1–this client": 0.1}


def test_messages_within_the_clients_host_are_its_own_time() -> None:
    assert shares(10, {0: steps((4, 10, COMPUTING, -1), sent=0)}) == {COMPUTING: 0.6, "client": 0.4}


def test_a_client_that_waits_for_replies_waits_for_the_slowest_device() -> None:
    fast, slow = steps((0, 20, COMPUTING, -1), host="lab1"), steps((10, 80, COMPUTING, -1), sent=0, host="lab2")
    assert shares(100, {0: fast, 1: slow}, (STEPS, 0, 100)) == {
        COMPUTING: 0.45,
        "waiting for device 1": 0.3,
        "link lab2–this client": 0.15,
        "link lab1–this client": 0.1,
    }


def test_of_devices_with_several_steps_in_a_wait_the_next_steps_count() -> None:
    intervals = [DeviceInterval(begin * MS, end * MS, COMPUTING) for begin, end in ((12, 20), (30, 90))]
    quick = DeviceTime(launches=[Launch(start, start, end) for start, end, *_ in intervals], intervals=intervals)
    devices = {0: steps((0, 10, COMPUTING, -1)), 1: quick, 2: steps((12, 50, COMPUTING, -1))}
    assert shares(100, devices, (STEPS, 10, 100)) == {
        COMPUTING: 0.386667,  # 10 + 68 + 38 of 300
        "waiting for device 1": 0.266667,  # of the others, from 50 to 90
        "client": 0.186667,
        "waiting for device 2": 0.16,  # of the first from 12 to 50, of the second from 20 to 30
    }


def test_steps_that_were_not_looked_at_are_as_those_that_were() -> None:
    launches = [Launch(0, 0, 40 * MS), Launch(40 * MS, 40 * MS, 80 * MS)]
    intervals = [
        DeviceInterval(0, 30 * MS, COMPUTING),
        DeviceInterval(30 * MS, 40 * MS, "link lab1–lab2"),
        DeviceInterval(40 * MS, 80 * MS, UNSAMPLED),
    ]
    device = DeviceTime(launches=launches, intervals=intervals)
    assert shares(80, {0: device}) == {COMPUTING: 0.75, "link lab1–lab2": 0.25}
    assert shares(80, {0: device}, since=40) == {UNKNOWN: 1.0}


def test_accounts_of_intervals_add_up() -> None:
    both = joined(
        [
            Account(seconds=3.0, shares={COMPUTING: 1.0}, computing={0: 1.0}),
            Account(seconds=1.0, shares={SAVING: 0.5, COMPUTING: 0.5}, computing={0: 0.5}),
            Account(seconds=0.0),
        ]
    )
    assert (both.seconds, both.shares, both.computing) == (4.0, {COMPUTING: 0.875, SAVING: 0.125}, {0: 0.875})
    assert both.text == "computing 88 %, saving 12 %"
    assert both.bound == "computing (88 % of the time)"
    assert Account(seconds=10.0, shares={PLANNING: 0.75, COMPUTING: 0.25}).training_s == 2.5


times = st.lists(st.integers(0, 60), min_size=2, max_size=24).map(sorted)


@st.composite
def device(draw: st.DrawFn, number: int, devices: int) -> DeviceTime:
    """A device with steps, of which some have gaps."""
    bounds = draw(times)
    launches, intervals = [], []
    for begin, end in zip(bounds[::2], bounds[1::2], strict=False):
        launches.append(Launch(draw(st.integers(0, begin)), begin, end))
        if begin < end:
            middle = draw(st.integers(begin, end))
            waits = draw(st.sampled_from([-1, *(other for other in range(devices + 1) if other != number)]))
            cause = draw(st.sampled_from([COMPUTING, "link lab1–lab2", UNSAMPLED, HOST_COPIES]))
            intervals += [
                DeviceInterval(begin, middle, COMPUTING),
                DeviceInterval(middle, draw(st.integers(middle, end)), cause, waits),
            ]
    return DeviceTime(host=draw(st.sampled_from(["", "lab1"])), launches=launches, intervals=intervals)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[int, int, list[ClientInterval], dict[int, DeviceTime]]:
    bounds = draw(times)
    doing = st.sampled_from([FEED, SAVING, STEPS, PLANNING])
    spans = [ClientInterval(draw(doing), begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=False)]
    count = draw(st.integers(0, 3))
    begin = draw(st.integers(0, 40))
    return begin, begin + draw(st.integers(1, 40)), spans, {n: draw(device(n, count)) for n in range(count)}


@given(intervals())
def test_shares_are_all_of_the_time(given_: tuple[int, int, list[ClientInterval], dict[int, DeviceTime]]) -> None:
    found = make_account(*given_)
    assert math.fsum(found.shares.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in found.shares.values())
    assert list(found.shares.values()) == sorted(found.shares.values(), reverse=True)
    assert not {STEPS, UNSAMPLED, ""} & found.shares.keys()


@given(intervals(), st.integers(0, 80))
def test_an_interval_is_the_sum_of_its_parts(
    given_: tuple[int, int, list[ClientInterval], dict[int, DeviceTime]], cut: int
) -> None:
    begin, end, spans, devices = given_
    devices = {
        number: DeviceTime(
            host=own.host,
            launches=own.launches,
            intervals=[each._replace(cause=COMPUTING) if each.cause == UNSAMPLED else each for each in own.intervals],
        )
        for number, own in devices.items()
    }
    middle = min(max(begin, cut), end)
    whole = make_account(begin, end, spans, devices)
    parts = joined([make_account(begin, middle, spans, devices), make_account(middle, end, spans, devices)])
    # which device is waited for may change with the place of a cut, as one of several that end later
    assert sum(parts.shares.values()) == pytest.approx(sum(whole.shares.values()))
    for cause in (COMPUTING, FEED, SAVING, PLANNING):
        if len(devices) < 2:
            assert parts.shares.get(cause, 0.0) == pytest.approx(whole.shares.get(cause, 0.0))


# ---- from the traces of steps


def traced(
    workers: Mapping[int, list[tuple[InstructionLabel, int, int]]], traffic: Mapping[tuple[int, int], int] | None = None
) -> StepTrace:
    return StepTrace(
        step=0,
        workers={
            worker: (
                tuple(label for label, _, _ in events),
                tuple(time * MS for _, start, end in events for time in (start, end)),
                (),
            )
            for worker, events in workers.items()
        },
        traffic={way: LinkTraffic(way[1], 1, busy_ns) for way, busy_ns in (traffic or {}).items()},
    )


def intervals_in(trace: StepTrace, worker: int) -> list[tuple[int, int, str, int]]:
    labels, times_ns, _ = trace.workers[worker]
    found = device_intervals(worker, labels, times_ns, exchanges_of(trace), HOSTS, trace.traffic)
    return [(each.start_ns // MS, each.end_ns // MS, each.cause, each.device) for each in found]


WORK = InstructionLabel("forward 0", "compute")
SEND = InstructionLabel("send", "transfer", target=1, exchange=(7, 0, 1, 0))
RECEIVE = InstructionLabel("receive", "transfer", exchange=(7, 0, 1, 0), peers=(0,))


def summed(worker: int, members: tuple[int, ...]) -> InstructionLabel:
    return InstructionLabel(
        "reduce", "transfer", exchange=(8, 0), peers=tuple(each for each in members if each != worker)
    )


def test_a_receiver_waits_for_the_sender_and_then_for_the_link() -> None:
    trace = traced({0: [(WORK, 0, 30), (SEND, 30, 50)], 1: [(RECEIVE, 0, 50), (WORK, 50, 80)]})
    assert intervals_in(trace, 0) == [(0, 30, COMPUTING, -1)]
    assert intervals_in(trace, 1) == [(0, 30, "", 0), (30, 50, "link lab1–lab2", -1), (50, 80, COMPUTING, -1)]


def test_a_sum_waits_for_the_last_of_its_members() -> None:
    events = {w: [(WORK, 0, 10 + 20 * w), (summed(w, (0, 1)), 10 + 20 * w, 40), (WORK, 40, 45)] for w in (0, 1)}
    trace = traced(events)
    assert intervals_in(trace, 0)[1:3] == [(10, 30, "", 1), (30, 40, "link lab1–lab2", -1)]
    assert intervals_in(trace, 1)[1] == (30, 40, "link lab1–lab2", -1)


def test_between_devices_of_one_host_there_is_no_link() -> None:
    trace = traced({w: [(WORK, 0, 10), (summed(w, (0, 2)), 10, 40), (WORK, 40, 45)] for w in (0, 2)})
    assert intervals_in(trace, 0)[1] == (10, 40, "transfers within lab1", -1)


def test_of_several_links_the_busiest_counts() -> None:
    events = {w: [(WORK, 0, 10), (summed(w, (0, 1, 3)), 10, 40), (WORK, 40, 45)] for w in (0, 1, 3)}
    trace = traced(events, {(0, 1): 5, (1, 3): 50, (0, 2): 900})
    assert intervals_in(trace, 0)[1] == (10, 40, "link lab2–lab3", -1)


def test_the_beginning_of_a_transfer_takes_a_workers_time() -> None:
    trace = traced({0: [(WORK, 0, 10), (SEND, 10, 60), (WORK, 20, 30)]})
    assert intervals_in(trace, 0) == [(0, 10, COMPUTING, -1), (10, 20, "link lab1–lab2", -1), (20, 30, COMPUTING, -1)]


def test_copies_from_host_memory_have_a_cause_of_their_own() -> None:
    trace = traced({0: [(WORK, 0, 10), (InstructionLabel("bring", "transfer"), 5, 30), (WORK, 30, 40)]})
    assert intervals_in(trace, 0)[1] == (10, 30, HOST_COPIES, -1)


def test_a_gap_without_a_cause_is_not_attributed() -> None:
    assert intervals_in(traced({0: [(WORK, 0, 10), (WORK, 20, 30)]}), 0)[1] == (10, 20, UNKNOWN, -1)
