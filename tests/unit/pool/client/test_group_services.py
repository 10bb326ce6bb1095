"""What the client does for groups: who is told what, without a worker."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from onebox.errors import WireError
from onebox.pool.client import group_services
from onebox.pool.client.group_services import ClientSums, GroupNotice, GroupServices
from onebox.pool.errors import WorkerLocation
from onebox.wire import from_frame, spec_of, to_frame
from onebox.wire.group_listener import SECRET_BYTES, GroupListener
from onebox.wire.protocol.groups import Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.responses import Contribution, GroupTraffic, Left, LinkTraffic, Lookup, RelayRequest

BUCKET = torch.tensor([1.0, 2.0])


def place(worker: int) -> WorkerLocation:
    return WorkerLocation(worker=worker, host="h", device="cpu")


def services() -> GroupServices:
    """Return the services of a pool with the groups 1 (workers 0 and 1) and 2 (workers 1 and 2)."""
    made = GroupServices()
    made.form(1, (0, 1))
    made.form(2, (1, 2))
    return made


def contribute(made: GroupServices, worker: int, ticket: int, *frames: object) -> list[GroupNotice]:
    return made.take(place(worker), Contribution(ticket, 1, 0, spec_of(BUCKET)), frames or (to_frame(BUCKET),))


def test_who_waits_for_a_key_is_told_when_it_is_there() -> None:
    made = services()
    assert made.take(place(0), Lookup(7, 1, "get", ("k",)), ()) == []
    assert made.take(place(2), Lookup(8, 2, "set", ("k",), b"theirs"), ()) == [], "each group has keys of its own"
    assert made.take(place(1), Lookup(9, 1, "set", ("k",), b"v"), ()) == [GroupNotice(0, Rendezvous(7, (b"v",)))]


def test_the_last_contribution_brings_the_sum_to_all() -> None:
    made = services()
    assert contribute(made, 0, 5) == []
    notices = contribute(made, 1, 6)
    assert [(notice.worker, notice.instruction) for notice in notices] == [(0, Reduced(5)), (1, Reduced(6))]
    for notice in notices:
        assert from_frame(spec_of(BUCKET), notice.frames[0]).tolist() == [2.0, 4.0]


def test_when_a_member_leaves_all_who_wait_are_told_and_nobody_waits_again() -> None:
    made = services()
    made.take(place(0), Lookup(7, 1, "get", ("k",)), ())
    contribute(made, 0, 8)
    assert (made.of(0), made.of(1), made.serves(1)) == ([1], [1, 2], True)
    assert made.take(place(1), Left(1), ()) == [GroupNotice(0, TicketCancelled(7)), GroupNotice(0, TicketCancelled(8))]
    assert (made.of(1), made.serves(1), made.serves(2)) == ([2], False, True)
    assert contribute(made, 0, 9) == [GroupNotice(0, TicketCancelled(9))]
    assert made.dissolve(1) == []


def test_only_members_leave_a_group() -> None:
    made = services()
    made.take(place(0), Lookup(7, 1, "get", ("k",)), ())
    assert (made.take(place(2), Left(1), ()), made.take(place(0), Left(99), ())) == ([], [])
    assert (made.serves(1), made.serves(2), made.may_leave(2, 1), made.may_leave(2, 2)) == (True, True, False, True)
    assert made.take(place(1), Lookup(9, 1, "set", ("k",), b"v"), ()) == [GroupNotice(0, Rendezvous(7, (b"v",)))]


def test_a_contribution_without_its_elements_breaks_the_protocol() -> None:
    with pytest.raises(WireError, match=r"worker 0 .* contributed 2 frames"):
        contribute(services(), 0, 5, b"", b"")


def test_a_groups_store_has_bounds_which_deleted_keys_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_services, "KEYS", 3)
    monkeypatch.setattr(group_services, "KEY_BYTES", 300)
    made = services()
    for _ in range(5):
        made.take(place(0), Lookup(1, 1, "set", ("a",), bytes(50)), ())
        made.take(place(0), Lookup(2, 1, "set", ("b",), bytes(40)), ())
        with pytest.raises(WireError, match="store of group 1 is full"):
            made.take(place(0), Lookup(3, 1, "set", ("c",), bytes(40)), ())
        made.dissolve(1)
        made.form(1, (0, 1))
    for number in range(9):
        made.take(place(0), Lookup(1, 1, "set", (f"{number}",), b"v"), ())
        made.take(place(0), Lookup(1, 1, "delete", (f"{number}",)), ())
    for number in range(9):  # a wait for a key counts until it comes
        made.take(place(0), Lookup(1, 1, "get", (f"{number}",)), ())
        made.take(place(1), Lookup(1, 1, "set", (f"{number}",), b"v"), ())
        made.take(place(0), Lookup(1, 1, "delete", (f"{number}",)), ())
    for number in range(3):
        made.take(place(0), Lookup(1, 1, "set", (f"{number}",), b"v"), ())
    with pytest.raises(WireError, match="store of group 1 is full"):
        made.take(place(0), Lookup(1, 1, "set", ("3",), b"v"), ())


def test_who_is_no_member_of_a_group_has_no_store_there() -> None:
    made = services()
    assert made.take(place(2), Lookup(5, 1, "set", ("k",), b"v"), ()) == [GroupNotice(2, TicketCancelled(5))]
    assert made.take(place(0), Lookup(6, 1, "check", ("k",)), ()) == [GroupNotice(0, Rendezvous(6, (b"0",)))]


def test_what_waits_to_be_summed_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = ClientSums(most_bytes=3 * BUCKET.nbytes)
    sums.form(1, (0, 1))
    for _ in range(3):  # in turn, it never becomes too much
        for order in range(3):
            sums.contribute(0, Contribution(1, 1, order, spec_of(BUCKET)), BUCKET)
        for order in range(3):
            assert sums.contribute(1, Contribution(1, 1, order, spec_of(BUCKET)), BUCKET) is not None
    for order in range(3):
        sums.contribute(0, Contribution(1, 1, order, spec_of(BUCKET)), BUCKET)
    sums.forget(1)
    sums.form(1, (0, 1))
    with pytest.raises(WireError, match="wait for others"):
        for order in range(4):
            sums.contribute(0, Contribution(1, 1, order, spec_of(BUCKET)), BUCKET)
    monkeypatch.setattr(group_services, "ORDERS", 2)
    sums.forget(1)
    sums.form(1, (0, 1))
    with pytest.raises(WireError, match="wait for others"):
        for order in range(3):
            sums.contribute(0, Contribution(1, 1, order, spec_of(BUCKET)), BUCKET)


def test_counters_are_numbers_of_a_bounded_length() -> None:
    made = services()
    assert made.take(place(0), Lookup(1, 1, "add", ("n",), b"5"), ()) == [GroupNotice(0, Rendezvous(1, (b"5",)))]
    for value in (b"five", b"9" * 4300, b"9" * 5000):  # Python turns numbers of up to 4,300 digits into text
        with pytest.raises(WireError, match="no number, or too large"):
            made.take(place(0), Lookup(2, 1, "add", ("n",), value), ())


def test_traffic_is_of_the_workers_that_it_goes_to_over_all_groups_of_its_sender() -> None:
    told = [GroupTraffic(1, 0, 10, 100), GroupTraffic(2, 1, 5, 50), GroupTraffic(2, 1, 1, 2)]
    foreign = [GroupTraffic(3, 0, 9, 9), GroupTraffic(1, 2, 9, 9)]
    assert services().traffic(1, [*told, *foreign]) == (LinkTraffic(0, 10, 100), LinkTraffic(2, 6, 52))
    assert services().traffic(0, [GroupTraffic(2, 0, 9, 9)]) == (), "a group that it is not in"


def listening(rank: int, port: int = 50_000, certificate: bytes = b"certificate") -> bytes:
    return GroupListener("10.0.0.7", port + rank, bytes(SECRET_BYTES), certificate).encode().encode()


def say(made: GroupServices, worker: int, rank: int, value: bytes = b"") -> None:
    made.take(place(worker), Lookup(7, 2, "set", (f"tcp/{rank}",), value or listening(rank)), ())


def test_a_relay_connects_the_listeners_that_the_two_members_have_named() -> None:
    made = services()
    say(made, 1, 0)
    say(made, 2, 1)
    found = made.relayed(place(2), RelayRequest(2, 0))
    assert [(worker, rank, listener.port) for worker, rank, listener in found] == [(2, 1, 50_001), (1, 0, 50_000)]
    assert made.relayed(place(0), RelayRequest(2, 0)) == [], "it is no member"
    made.dissolve(2)
    assert made.relayed(place(2), RelayRequest(2, 0)) == []


@pytest.mark.parametrize("peer", [0, -1, 2, 1 << 31])
def test_a_relay_to_nobody_is_refused(peer: int) -> None:
    made = services()
    say(made, 1, 0)
    say(made, 2, 1)
    with pytest.raises(WireError, match="asks for a relay"):
        made.relayed(place(1), RelayRequest(2, peer))


@pytest.mark.parametrize(
    "value",
    [b"", b"10.0.0.7", listening(1, certificate=b""), listening(1, port=20), listening(1).ljust(1 << 15, b"0")],
    ids=["none", "short", "plain", "privileged", "long"],
)
def test_a_relay_to_whoever_has_no_encrypted_listener_is_refused(value: bytes) -> None:
    made = services()
    say(made, 1, 0)
    if value:
        say(made, 2, 1, value)
    with pytest.raises(WireError, match=r"says that it listens at port 21|does not say where it listens"):
        made.relayed(place(1), RelayRequest(2, 1))


@pytest.mark.parametrize("action", ["set", "add", "delete"])
def test_nobody_says_where_another_member_listens(action: Literal["set", "add", "delete"]) -> None:
    made = services()
    with pytest.raises(WireError, match="says where another worker listens"):
        made.take(place(1), Lookup(7, 2, action, ("tcp/1",), b"1"), ())
    assert made.take(place(1), Lookup(8, 2, "check", ("tcp/1",)), ()) == [GroupNotice(1, Rendezvous(8, (b"0",)))]
