"""Messages that survive a cut: whatever a network does to them, they arrive once and in order, and nothing piles up."""

from __future__ import annotations

import contextlib
import math
import random
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.errors import WireError
from onebox.wire import reliable
from onebox.wire.reliable import ACK_S, ASK_MOST_S, ASK_S, EARLY_FRAMES, Receiver, Reliable, Restarted

MESSAGES = 4
BYTES = 40
HEAD = struct.Struct("<BQQQQ")  # kind, epoch, acknowledged, and two numbers
HEAD_BYTES = 33


def size_of(parcel: list[Any]) -> int:
    """Return the bytes of a parcel's message."""
    return sum(map(len, parcel)) - HEAD_BYTES


def carries(parcel: list[Any]) -> bool:
    """Tell whether a parcel is a message, and not about messages."""
    return size_of(parcel) > 0


@dataclass
class World:
    """Two ends and the network between them.

    Args:
        ends: Each with a small window.
        wires: What is under way to each end.
        posted: What each end was given to send.
        taken: What came out at each end.
        now_s: The time.
    """

    ends: tuple[Reliable, Reliable] = field(
        default_factory=lambda: (Reliable(11, MESSAGES, BYTES), Reliable(22, MESSAGES, BYTES))
    )
    wires: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    posted: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    taken: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    now_s: float = 0.0

    def post(self, end: int, size_bytes: int) -> None:
        """Give an end a message to send, unlike all others."""
        text = b"%d" % len(self.posted[end])
        message = text.rjust(max(size_bytes, len(text)), b".")
        self.posted[end].append(message)
        self.ends[end].post([message])

    def flush(self) -> None:
        """Send what is due, and look that no more is kept than may be."""
        for end, other in ((0, 1), (1, 0)):
            self.wires[other].extend(self.ends[end].outgoing(self.now_s))
            assert self.ends[end].due_s > self.now_s, "an end that is always due keeps its thread busy"
            messages, size_bytes = self.ends[end].sender.under_way
            assert messages <= MESSAGES
            assert size_bytes <= BYTES or messages == 1
            messages, size_bytes = self.ends[end].receiver.kept
            assert messages < MESSAGES
            assert size_bytes <= BYTES

    def deliver(self, end: int, place: int = 0) -> None:
        """Let something arrive that is under way."""
        if place < len(self.wires[end]):
            messages = self.ends[end].take(self.wires[end].pop(place), self.now_s)
            self.taken[end].extend(message for (message,) in messages)

    def settle(self) -> None:
        """Let everything arrive, in order, until nothing is due within the longest wait."""
        for _ in range(200):
            self.flush()
            while self.wires[0] or self.wires[1]:
                self.deliver(0)
                self.deliver(1)
                self.flush()
            due_s = min(end.due_s for end in self.ends)
            if due_s == math.inf:
                return
            assert due_s - self.now_s <= ASK_MOST_S
            self.now_s = max(self.now_s, due_s)
        raise AssertionError("they do not come to rest")


places = st.integers(0, 7)
ends = st.integers(0, 1)
actions = st.one_of(
    st.tuples(st.just("post"), ends, st.sampled_from([1, 10, 19, 39, 41, 90])),
    st.tuples(st.just("deliver"), ends, places),
    st.tuples(st.just("lose"), ends, places),
    st.tuples(st.just("double"), ends, places),
    st.tuples(st.just("cut"), ends, places),
    st.tuples(st.just("wait"), ends, places),
)


def perform(world: World, action: str, end: int, amount: int) -> None:
    """Let something happen to a world."""
    wire = world.wires[end]
    if action == "post":
        world.post(end, amount)
    elif action == "deliver":
        world.deliver(end, amount % max(1, len(wire)))  # in any order
    elif action == "lose" and wire:
        wire.pop(amount % len(wire))
    elif action == "double" and wire:
        wire.append(wire[amount % len(wire)])
    elif action == "cut":
        world.wires[0].clear()
        world.wires[1].clear()
        world.ends[0].connected()
    elif action == "wait":
        world.now_s += (0.02, ACK_S, 0.3, ASK_S, 3.0, ASK_MOST_S, 30.0, 0.0)[amount]


@settings(max_examples=400, deadline=None)
@given(st.lists(actions, max_size=60))
def test_everything_arrives_once_and_in_order_whatever_the_network_does(script: list[tuple[str, int, int]]) -> None:
    world = World()
    for action, end, amount in script:
        perform(world, action, end, amount)
        world.flush()
        for here, there in ((0, 1), (1, 0)):
            assert world.taken[there] == world.posted[here][: len(world.taken[there])]
    world.settle()
    assert world.taken == (world.posted[1], world.posted[0])
    assert [end.sender.under_way for end in world.ends] == [(0, 0), (0, 0)]
    assert [end.receiver.kept for end in world.ends] == [(0, 0), (0, 0)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ends, st.integers(0, 60)), max_size=40))
def test_connections_that_lose_nothing_cost_no_message_twice(posts: list[tuple[int, int]]) -> None:
    world = World()
    sent = 0
    for end, size_bytes in posts:
        world.post(end, size_bytes)
    for _ in range(2 * len(posts) + 2):
        world.flush()
        for end in (0, 1):
            sent += sum(map(carries, world.wires[end]))
            while world.wires[end]:
                world.deliver(end)
        world.now_s += ACK_S
    world.settle()
    assert sent == len(posts)
    assert world.taken == (world.posted[1], world.posted[0])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.data())
def test_after_a_cut_just_what_was_lost_is_sent_again(sizes: list[int], data: st.DataObject) -> None:
    world = World()
    for size_bytes in sizes:
        world.post(0, min(size_bytes, BYTES // len(sizes)))
    world.flush()
    arrived = data.draw(st.integers(0, len(sizes)))
    for _ in range(arrived):
        world.deliver(1)
    perform(world, "cut", 0, 0)
    again = 0
    for _ in range(6):
        world.flush()
        again += sum(map(carries, world.wires[1]))
        while world.wires[0] or world.wires[1]:
            world.deliver(0)
            world.deliver(1)
    assert again == len(sizes) - arrived
    assert world.taken[1] == world.posted[0]


def test_both_directions_are_mended_by_the_one_end_that_sees_the_connection() -> None:
    world = World()
    world.post(0, 5)
    world.post(1, 5)
    world.flush()
    perform(world, "cut", 0, 0)
    for _ in range(4):
        world.flush()
        while world.wires[0] or world.wires[1]:
            world.deliver(0)
            world.deliver(1)
    assert world.taken == (world.posted[1], world.posted[0]), "without any time going by"


def test_frames_are_kept_and_not_copied() -> None:
    one, other = Reliable(1), Reliable(2)
    large = bytearray(100)
    one.post([b"head", large])
    [parcel] = one.outgoing(0.0)
    assert parcel[1] is large
    one.connected()
    [question] = one.outgoing(0.0)
    other.take(question, 0.0)
    [answer] = other.outgoing(0.0)
    one.take(answer, 0.0)
    [again] = one.outgoing(0.0)
    assert again[1] is large
    assert other.take(again, 0.0) == [[b"head", large]]


def test_an_acknowledgement_rides_on_a_message_or_goes_alone_after_a_while() -> None:
    one, other = Reliable(1), Reliable(2)
    one.post([b"a"])
    other.take(one.outgoing(0.0)[0], 0.0)
    assert other.due_s == ACK_S
    assert other.outgoing(ACK_S / 2) == []
    other.post([b"b"])
    [parcel] = other.outgoing(ACK_S / 2)
    assert carries(parcel)
    assert other.due_s == ACK_S / 2 + ASK_S, "only its own message is waited for"
    assert one.sender.under_way == (1, 1)
    one.take(parcel, ACK_S / 2)
    assert one.sender.under_way == (0, 0)
    [alone] = one.outgoing(2 * ACK_S)
    assert not carries(alone)
    assert len(alone[0]) == HEAD_BYTES
    other.take(alone, 2 * ACK_S)
    assert one.due_s == other.due_s == math.inf


@pytest.mark.parametrize(("count", "size_bytes"), [(reliable.ACK_MESSAGES, 1), (4, reliable.ACK_BYTES // 4)])
def test_much_that_comes_is_acknowledged_at_once(count: int, size_bytes: int) -> None:
    one, other = Reliable(1), Reliable(2)
    message = bytes(size_bytes)
    for _ in range(count):
        one.post([message])
    *first, last = one.outgoing(0.0)
    for parcel in first:
        other.take(parcel, 0.0)
    assert other.outgoing(0.0) == []
    other.take(last, 0.0)
    [acknowledgement] = other.outgoing(0.0)
    one.take(acknowledgement, 0.0)
    assert one.sender.under_way == (0, 0)


def test_a_silent_peer_is_asked_and_sent_nothing_twice() -> None:
    one = Reliable(1)
    one.post([bytes(1000)])
    one.outgoing(0.0)
    asked_s = []
    while one.due_s < 100:
        asked_s.append(one.due_s)
        [question] = one.outgoing(one.due_s)
        assert not carries(question)
    gaps = [after - before for before, after in zip([0.0, *asked_s], asked_s, strict=False)]
    assert gaps[:4] == [ASK_S, 2 * ASK_S, 4 * ASK_S, ASK_MOST_S]
    assert set(gaps[3:]) == {ASK_MOST_S}


def test_a_message_larger_than_the_window_goes_alone() -> None:
    world = World()
    for size_bytes in (5, 100, 5):
        world.post(0, size_bytes)
    world.flush()
    assert [size_of(parcel) for parcel in world.wires[1]] == [5]
    assert world.ends[0].full
    world.settle()
    assert [len(message) for message in world.taken[1]] == [5, 100, 5]
    assert not world.ends[0].full


def test_a_gap_is_noticed_and_filled_without_time_going_by() -> None:
    world = World()
    for _ in range(3):
        world.post(0, 3)
    world.flush()
    world.wires[1].pop(1)
    for _ in range(5):
        while world.wires[0] or world.wires[1]:
            world.deliver(0)
            world.deliver(1)
        world.flush()
    assert world.taken[1] == world.posted[0]
    assert world.now_s == 0


def test_a_peer_that_has_started_anew_is_an_error() -> None:
    one = Reliable(1)
    for epoch in (7, 7):
        other = Reliable(epoch)
        other.post([b"x"])
        one.take(other.outgoing(0.0)[0], 0.0)
    anew = Reliable(8)
    anew.post([b"x"])
    with pytest.raises(Restarted, match="started anew"):
        one.take(anew.outgoing(0.0)[0], 0.0)


def head(kind: int, acknowledged: int = 0, number: int = 0, held: int = 0) -> bytes:
    """Return the frame before a message, with anything in it."""
    return HEAD.pack(kind, 5, acknowledged, number, held)


@pytest.mark.parametrize(
    ("parcel", "message"),
    [
        ([], "same version"),
        ([b""], "same version"),
        ([bytes(HEAD_BYTES - 1)], "same version"),
        ([head(6)], "kind 6"),
        ([head(1, acknowledged=2)], "message 2 was acknowledged; the last that was sent is 1"),
        ([head(0, number=reliable.WINDOW_MESSAGES + 1)], "may be under way"),
        ([head(4, number=1)], "answer to question 1; 0 have been asked"),
    ],
)
def test_what_breaks_the_protocol_is_refused(parcel: list[bytes], message: str) -> None:
    one = Reliable(1)
    one.post([b"x"])
    one.outgoing(0.0)
    with pytest.raises(WireError, match=message):
        one.take(parcel, 0.0)


def test_junk_raises_nothing_else() -> None:
    chance = random.Random(5)
    one = Reliable(1)
    for _ in range(3000):
        kind = chance.randrange(8)
        junk = head(kind, *(chance.choice([0, 1, 2, 2**63, 2**64 - 1]) for _ in range(3)))
        junk = junk if chance.random() < 0.8 else chance.randbytes(chance.randrange(2 * HEAD_BYTES))
        with contextlib.suppress(WireError):
            one.take([junk + b"x", b"x"], chance.uniform(0, 100))
        one.outgoing(chance.uniform(0, 100))
        assert one.receiver.kept[0] <= reliable.WINDOW_MESSAGES


@pytest.mark.parametrize(
    ("size_bytes", "rate_bps", "count"), [(1 << 20, 1.25e9, 1000), (64 << 20, 1.25e9, 100), (100, 6e5, 3000)]
)
def test_a_long_way_is_kept_full(size_bytes: int, rate_bps: float, count: int) -> None:
    """10 Gbit/s over 30 ms each way, or 6000 short messages a second: no message has to wait for an acknowledgement."""
    one, other = Reliable(1), Reliable(2)
    message = [memoryview(bytes(1)), memoryview(bytearray(size_bytes))]
    to_other: list[tuple[float, list[Any]]] = []
    to_one: list[tuple[float, list[Any]]] = []
    now_s = 0.0
    for _ in range(count):
        while to_other and to_other[0][0] <= now_s:
            arrived_s, parcel = to_other.pop(0)
            other.take(parcel, arrived_s)
            to_one += [(arrived_s + 0.03, answer) for answer in other.outgoing(arrived_s)]
        while to_one and to_one[0][0] <= now_s:
            one.take(to_one.pop(0)[1], now_s)
        one.post(message)
        to_other += [(now_s + 0.03, parcel) for parcel in one.outgoing(now_s)]
        assert not one.full
        now_s += size_bytes / rate_bps


def test_a_peer_that_asks_again_and_again_for_the_same_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable, "RESENDS", 10)
    here, there = Reliable(1), Reliable(2)
    for ask in range(12):
        here.post([b"x" * 100])
        for parcel in here.outgoing(float(ask)):
            there.take(parcel, float(ask))
        if ask < 3:
            for parcel in there.outgoing(ask + 1.0):
                here.take(parcel, ask + 1.0)
    sent = 0
    with pytest.raises(WireError, match="has lost message"):
        for question in range(1, 50):
            here.connected()
            parcels = here.outgoing(100.0 + question)
            sent += len(parcels)
            *_, asked, _ = HEAD.unpack(parcels[-1][0])
            here.sender.answered(asked, 0, 100.0 + question)
    assert sent <= 12 * 12


def test_early_messages_of_many_empty_frames_are_bounded_by_their_number() -> None:
    receiver = Receiver()
    frames = [b""] * (EARLY_FRAMES // 5)
    for number in range(2, 200):
        assert receiver.take(number, frames, 0.0) == []
    assert receiver.kept == (5, 0)
    assert len(receiver.take(1, frames, 0.0)) == 6
    for number in range(8, 200):
        assert receiver.take(number, frames, 0.0) == []
    assert receiver.kept == (5, 0)
