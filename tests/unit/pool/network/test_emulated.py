"""Emulated links of a pool: which way they go, what cannot be emulated, and that transfers take their time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from onebox.errors import UsageError
from onebox.pool import Link
from onebox.pool.network.emulated import directed, outgoing
from onebox.wire import TensorSpec
from onebox.wire.protocol.groups import EmulatedLink
from onebox.wire.protocol.instructions import Ask, Receive, Send
from onebox.wire.protocol.requests import Define, Put, Routine, Run
from tests.unit.house import OpenPool, threads_for_processes

FAST, SLOW = Link(bandwidth_bps=1e9), Link(latency_s=0.05, bandwidth_bps=1e6)


@dataclass(frozen=True)
class Device:
    """A device of a pool."""

    kind: str = "sim"
    host: str = "here"


SIMS = [Device(), Device(), Device()]


def test_a_link_goes_both_ways_unless_both_are_given() -> None:
    assert directed({(0, 1): FAST}, SIMS) == {(0, 1): FAST, (1, 0): FAST}
    assert directed({(0, 1): FAST, (1, 0): SLOW, (2, 1): SLOW}, SIMS) == {
        (0, 1): FAST,
        (1, 0): SLOW,
        (2, 1): SLOW,
        (1, 2): SLOW,
    }


@pytest.mark.parametrize("pair", [(0, 3), (-1, 0), (1, 1)])
def test_a_link_between_devices_that_are_not_there(pair: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=f"from device {pair[0]} to {pair[1]}; this pool has devices 0 to 2"):
        directed({pair: SLOW}, SIMS)


@pytest.mark.parametrize("other", [Device("cuda"), Device("cpu"), Device("sim", "elsewhere")])
def test_a_link_that_cannot_be_emulated(other: Device) -> None:
    with pytest.raises(UsageError, match=rf"{other.kind} on {other.host}\) cannot be emulated"):
        directed({(0, 1): SLOW}, [Device(), other])


@pytest.mark.parametrize(
    "options",
    [{"latency_s": -1.0}, {"latency_s": float("inf")}, {"latency_s": float("nan")}, {"bandwidth_bps": 0.0}],
)
def test_a_link_that_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="bandwidth is positive"):
        Link(**options)


def test_ranks_of_a_group_know_their_links_by_rank() -> None:
    links = {(7, 3): SLOW, (3, 7): FAST, (7, 9): FAST}
    assert outgoing(links, (3, 5, 7), 2) == (EmulatedLink(0, 3, 0.05, 1e6),)
    assert outgoing(links, (3, 5, 7), 0) == (EmulatedLink(2, 7, 0.0, 1e9),)
    assert outgoing(links, (3, 5, 7), 1) == ()


# ---- in a pool


@pytest.fixture
def open_pool() -> Iterator[OpenPool]:
    with threads_for_processes() as opening:
        yield opening


def test_transfers_of_two_groups_share_a_link(open_pool: OpenPool) -> None:
    pool = open_pool(2, kind="sim", links={(0, 1): SLOW})
    assert pool.links == {(0, 1): SLOW, (1, 0): SLOW}
    spec = TensorSpec("uint8", (10_000,))
    groups = [pool.form_group((0, 1), "workers"), pool.form_group((1, 0), "workers")]
    pool.post(0, [Put((1,), (spec,))], [bytes(10_000)])
    sends = Routine((Send(1, groups[0], 1), Send(1, groups[1], 0)), 0)
    receives = Routine((Receive(1, spec, groups[0], 0), Receive(2, spec, groups[1], 1), Ask("digest", (1, 2))), 0)
    futures = [
        pool.post(worker, [Define(50, routine), Run(50, trace=True)], answer=True)
        for worker, routine in enumerate((sends, receives))
    ]
    sent, received = (future.result(20).times_ns for future in futures)
    assert sent[1] - sent[0] == 60_000_000
    assert sent[3] - sent[1] == 10_000_000, "the second leaves behind the first"
    assert (received[1], received[3]) == (sent[1], sent[3])


def test_a_link_changes_both_ways_with_what_is_posted_next(open_pool: OpenPool) -> None:
    pool = open_pool(2, kind="sim", links={(0, 1): Link(latency_s=0.02), (1, 0): Link(bandwidth_bps=1e9)})
    group = pool.form_group((0, 1), "workers")
    spec = TensorSpec("uint8", (1_000,))
    for worker in (0, 1):
        pool.post(worker, [Put((1,), (spec,)), Define(50, Routine((Send(1, group, 1 - worker),), 0))], [bytes(1_000)])
    asked = [pool.post(worker, [Run(50, trace=True)], answer=True) for worker in (0, 1)]
    pool.relink(0, 1, bandwidth_bps=2e4)
    asked += [pool.post(worker, [Run(50, trace=True)], answer=True) for worker in (0, 1)]
    there, _, slow_there, slow_back = (
        (end - begin) / 1e9 for begin, end in (future.result(20).times_ns for future in asked)
    )
    assert there >= 0.02
    assert slow_there >= 0.05 + 0.02
    assert slow_back >= 0.05
    assert pool.links == {
        (0, 1): Link(latency_s=0.02, bandwidth_bps=2e4),
        (1, 0): Link(bandwidth_bps=2e4),
    }
    again = pool.form_group((0, 1), "workers")
    pool.post(0, [Define(51, Routine((Send(1, again, 1),), 0))])
    begin, end = pool.post(0, [Run(51, trace=True)], answer=True).result(20).times_ns
    assert end - begin >= 0.07e9, "groups that are formed later have it, too"


def test_only_what_is_emulated_changes(open_pool: OpenPool) -> None:
    pool = open_pool(2, kind="sim", links={(0, 1): SLOW})
    with pytest.raises(UsageError, match="no link from device 1 to 2 is emulated"):
        pool.relink(1, 2, latency_s=0.0)
    with pytest.raises(UsageError, match="bandwidth is positive"):
        pool.relink(0, 1, bandwidth_bps=0.0)
    assert pool.links == {(0, 1): SLOW, (1, 0): SLOW}
    with pytest.raises(UsageError, match=r"device 0 is cpu and cannot be of speed 2\.0"):
        open_pool(1).retime(0, speed=2.0)
    with pytest.raises(UsageError, match="device 2 is not there"):
        pool.retime(2, speed=2.0)


def test_a_pool_with_a_link_that_leads_nowhere_is_not_opened(open_pool: OpenPool) -> None:
    options: dict[str, Any] = {"links": {(0, 5): SLOW}}
    with pytest.raises(UsageError, match="from device 0 to 5"):
        open_pool(2, kind="sim", **options)
