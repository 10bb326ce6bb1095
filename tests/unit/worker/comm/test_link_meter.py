"""Meters of connections between hosts: bytes that have arrived, and the time that they took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from onebox.wire.protocol.responses import GroupTraffic
from onebox.worker.comm.link_meter import LinkMeters
from onebox.worker.comm.tls_mesh import DuplexLink, connect_mesh
from tests.unit.worker.comm.test_tls_mesh import HERE, WITHIN_S, Store

MESSAGE = bytes(1 << 20)
PAUSE_S, PAUSES = 0.02, 10


@pytest.fixture
def ends() -> Iterator[tuple[DuplexLink, DuplexLink]]:
    """Connections of ranks 0 and 1 with each other."""
    store = Store()
    with ThreadPoolExecutor(2) as threads:
        meshes = list(threads.map(lambda rank: connect_mesh(rank, 2, HERE, store), range(2)))
    yield meshes[0][1], meshes[1][0]
    for mesh, peer in zip(meshes, (1, 0), strict=True):
        mesh[peer].close()


def read(end: DuplexLink, count: int, pause_s: float = 0.0) -> None:
    """Read so many bytes, in ten parts with a pause before each."""
    end.incoming[0].settimeout(WITHIN_S)
    part = -(-count // PAUSES)
    for first in range(0, count, part):
        time.sleep(pause_s)
        left = min(part, count - first)
        while left:
            left -= len(end.incoming[0].recv(left))


def carried(meters: LinkMeters, size_bytes: int) -> list[GroupTraffic]:
    """Return what is reported until so many bytes have been acknowledged, which the kernel may do later."""
    found: list[GroupTraffic] = []
    end_s = time.monotonic() + WITHIN_S
    while sum(each.size_bytes for each in found) < size_bytes:
        assert time.monotonic() < end_s
        found += meters.take()
    return found


def test_bytes_are_counted_once_by_the_rank_that_they_go_to(ends: tuple[DuplexLink, DuplexLink]) -> None:
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


def test_the_time_is_that_until_bytes_have_arrived_and_no_other(ends: tuple[DuplexLink, DuplexLink]) -> None:
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
