"""What the client does for groups: who is told what, without a worker."""

from __future__ import annotations

import pytest
import torch

from onebox.errors import WireError
from onebox.pool.client.group_services import GroupNotice, GroupServices
from onebox.pool.errors import WorkerLocation
from onebox.wire import from_frame, spec_of, to_frame
from onebox.wire.protocol.groups import Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.responses import Contribution, Left, Lookup

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
    assert made.take(place(1), Lookup(9, 1, "set", ("k",), b"v"), ()) == [GroupNotice(0, Rendezvous(7, b"v"))]


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


def test_a_contribution_without_its_elements_breaks_the_protocol() -> None:
    with pytest.raises(WireError, match=r"worker 0 .* contributed 2 frames"):
        contribute(services(), 0, 5, b"", b"")
