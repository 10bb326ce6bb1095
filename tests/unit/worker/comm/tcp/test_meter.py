"""Meters of connections between hosts: bytes that have arrived, and the time that they took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from onebox.wire.protocol.responses import GroupTraffic
from onebox.worker.comm.tcp.meter import HELD_BACK, JUDGED_TRIPS, LinkMeters, UsedConnections, _Counters
from tests.kit.waiting import until
from tests.unit.ranks import Keys
from tests.unit.worker.comm.tcp import meshes
from tests.unit.worker.comm.tcp.meshes import HERE, WITHIN_S, Ends, connect_mesh

MESSAGE = bytes(1 << 20)
PAUSE_S, PAUSES = 0.02, 10


@pytest.fixture
def ends() -> Iterator[tuple[Ends, Ends]]:
    """Connections of ranks 0 and 1 with each other."""
    store = Keys()
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda rank: connect_mesh(rank, 2, HERE, store), range(2))
    with meshes.closing(one, other):
        yield one[1], other[0]


def read(end: Ends, count: int, pause_s: float = 0.0) -> None:
    """Read so many bytes, in ten parts with a pause before each."""
    part = -(-count // PAUSES)
    for first in range(0, count, part):
        time.sleep(pause_s)
        meshes.read(end.incoming[0], min(part, count - first))


def carried(meters: LinkMeters, size_bytes: int) -> list[GroupTraffic]:
    """Return what is reported until so many bytes have been acknowledged, which the kernel may do later."""
    found: list[GroupTraffic] = []
    until(lambda: sum(each.size_bytes for each in found) >= size_bytes, turn=lambda: found.extend(meters.take()))
    return found


def test_bytes_are_counted_once_by_the_rank_that_they_go_to(ends: tuple[Ends, Ends]) -> None:
    here, there = ends
    meters = LinkMeters()
    meter = meters.add(here.outgoing, 5, 7)
    before = sum(each.size_bytes for each in meters.take())  # the handshake
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read, there, len(MESSAGE))
        meter.send(MESSAGE)
        reading.result(WITHIN_S)
    found = carried(meters, len(MESSAGE))
    assert {(each.group, each.peer) for each in found} == {(5, 7)}
    assert len(MESSAGE) <= sum(each.size_bytes for each in found) < 1.01 * len(MESSAGE) + before
    assert sum(each.busy_ns for each in found) > 0
    assert meters.take() == ()
    here.outgoing[0].close()
    assert meters.take() == ()


def test_the_time_is_that_until_bytes_have_arrived_and_no_other(ends: tuple[Ends, Ends]) -> None:
    here, there = ends
    meters = LinkMeters()
    meter = meters.add(here.outgoing, 5, 3)
    meters.take()
    time.sleep(1.0)  # in which nothing is on the way
    size_bytes = 16 * len(MESSAGE)  # more than the kernel buffers
    with ThreadPoolExecutor(1) as threads:
        begin_s = time.monotonic()
        reading = threads.submit(read, there, size_bytes, PAUSE_S)
        for _ in range(16):
            meter.send(MESSAGE)
        reading.result(WITHIN_S)
        lasted_s = time.monotonic() - begin_s
    found = carried(meters, size_bytes)
    busy_s = sum(each.busy_ns for each in found) / 1e9
    assert PAUSE_S * PAUSES / 4 < busy_s < lasted_s + 0.5


TRIP_US = 40_000
JUDGED_US = JUDGED_TRIPS * TRIP_US
LIMITED_US = round(HELD_BACK * JUDGED_US)


def counters(busy_us: int, receiver_limited_us: int = 0, sender_limited_us: int = 0) -> _Counters:
    """Return what the kernel counts of a connection with a long way."""
    return _Counters(0, TRIP_US, 0, 0, TRIP_US, busy_us, receiver_limited_us, sender_limited_us)


@pytest.mark.parametrize("limited_us", [(LIMITED_US, 0), (0, LIMITED_US), (LIMITED_US // 2, -(-LIMITED_US // 2))])
def test_one_more_connection_is_used_each_time_that_windows_held_back_those_that_are(
    limited_us: tuple[int, int],
) -> None:
    used = UsedConnections(3)
    used.judge([counters(JUDGED_US - 1, *limited_us)])
    assert used.count == 1, "not for so long yet"
    used.judge([counters(JUDGED_US, *limited_us)])
    assert used.count == 2
    judged = [counters(2 * JUDGED_US, *limited_us), counters(JUDGED_US)]
    used.judge(judged)
    assert used.count == 2, "not since there are two"
    used.judge([each._replace(busy_us=each.busy_us + JUDGED_US) for each in judged])
    assert used.count == 2
    used.judge([counters(4 * JUDGED_US, *limited_us), counters(3 * JUDGED_US, *(2 * each for each in limited_us))])
    assert used.count == 3
    used.judge(3 * [counters(9 * JUDGED_US, 9 * JUDGED_US)])
    assert used.count == 3, "there are no more"


def test_one_connection_stays_alone_while_its_window_does_not_hold_it_back() -> None:
    used = UsedConnections(4)
    for number in range(1, 100):
        used.judge([counters(number * JUDGED_US, number * (LIMITED_US - 1))])
    assert used.count == 1
    used.judge([counters(150 * JUDGED_US, 150 * JUDGED_US)._replace(recent_trip_us=2 * TRIP_US)])
    assert used.count == 1, "the link is full"
    used.judge([counters(200 * JUDGED_US, 200 * JUDGED_US)._replace(trip_us=(1 << 32) - 1)])
    assert used.count == 1, "its way has not been measured"
