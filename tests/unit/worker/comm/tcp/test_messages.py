"""Messages between two workers: headers, filing by channel and order, and windows."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.wire import DTYPES, TensorSpec
from onebox.worker.comm.tcp import messages
from onebox.worker.comm.tcp.messages import HEAD_BYTES, Inbox, MessageHeader, PeerFault, Window, decode, rest_bytes

MOST = 1 << 20

specs = st.builds(TensorSpec, st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=4).map(tuple))


def filed(inbox: Inbox, channel: int, number: int, *, parts: int = 1, count: int = 4) -> int:
    """File a tensor that holds a number, in parts; return the bytes for which there is leave."""
    spec, data = TensorSpec("int64", (count,)), torch.full((count,), number).view(torch.uint8).numpy().data
    leave, step = 0, -(-len(data) // parts) if data else 1
    for start in range(0, max(1, len(data)), step):
        header = MessageHeader(channel, 7, start, len(data[start : start + step]), spec)
        inbox.place(header)[:] = data[start : start + step]
        leave += inbox.filed(header)
    return leave


def taken(inbox: Inbox, channel: int, order: int) -> list[int] | None:
    with inbox.changed:
        message = inbox.take(channel, order)
    return None if message is None else message.tensor.tolist()


@given(specs, st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1), st.data())
def test_headers_come_as_they_are_sent(spec: TensorSpec, channel: int, code: int, data: Any) -> None:
    start = data.draw(st.integers(0, spec.size_bytes))
    header = MessageHeader(channel, code, start, data.draw(st.integers(0, spec.size_bytes - start)), spec)
    encoded = header.encode()
    assert rest_bytes(encoded[:HEAD_BYTES]) == len(encoded) - HEAD_BYTES
    assert decode(encoded[:HEAD_BYTES], encoded[HEAD_BYTES:]) == header


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES), st.data())
def test_no_header_leads_out_of_its_tensor(head: bytes, data: Any) -> None:
    try:
        header = decode(head, data.draw(st.binary(min_size=(count := rest_bytes(head)), max_size=count)))
    except PeerFault:
        return
    assert header.size_bytes >= 0
    if header.spec is not None:
        assert 0 <= header.start <= header.start + header.size_bytes <= header.spec.size_bytes


@pytest.mark.parametrize(
    "header",
    [
        MessageHeader(0, 0, -1, 1, TensorSpec("float32", (1,))),
        MessageHeader(0, 0, 0, 5, TensorSpec("float32", (1,))),
        MessageHeader(0, 0, 0, -1, TensorSpec("float32", (1,))),
        MessageHeader(0, 0, 0, 0, TensorSpec("float32", (-1, -1))),
        MessageHeader(0, 0, 0, 0, TensorSpec("float32", (1 << 40, 1 << 40, 0))),
        MessageHeader(0, 0, 0, -1, None),
    ],
)
def test_what_is_no_part_of_a_tensor_is_refused(header: MessageHeader) -> None:
    encoded = header.encode()
    with pytest.raises(PeerFault):
        decode(encoded[:HEAD_BYTES], encoded[HEAD_BYTES:])


steps = st.lists(st.tuples(st.sampled_from(["come", "ask", "drop"]), st.integers(0, 2)), max_size=40)


@given(steps, st.integers(1, 4))
def test_the_nth_message_of_a_channel_is_the_nth_that_is_asked_for(wanted: list[tuple[str, int]], parts: int) -> None:
    inbox = Inbox(MOST)
    came, asked = [0] * 3, [0] * 3
    open_: list[deque[tuple[int, int]]] = [deque(), deque(), deque()]
    for what, channel in wanted:
        if what == "come":
            came[channel] += 1
            filed(inbox, channel, came[channel], parts=parts)
        elif what == "ask":
            asked[channel] += 1
            open_[channel].append((inbox.expect(channel)[0], asked[channel]))
        elif open_[channel]:
            inbox.drop(channel, open_[channel].pop()[0])
    inbox.expect(9)  # those that were dropped are forgotten by then
    for channel in range(3):
        for order, number in open_[channel]:
            assert taken(inbox, channel, order) == ([number] * 4 if number <= came[channel] else None)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=60), st.lists(st.booleans(), max_size=200))
def test_a_window_holds_nobody_up_who_is_read_and_bounds_what_is_not(sizes: list[int], chance: list[bool]) -> None:
    """Sizes are in units of a hundredth of a window."""
    unit = messages.WINDOW_BYTES // 100
    window, inbox, unread, most, turns = Window(), Counting(), 0, 0, iter(chance)
    for size in sizes:
        while not window.open(0, size * unit):
            assert unread, "all is read, and it may not be sent"
            unread -= 1
            window.leave(0, inbox.read())
        window.sent(0, size * unit)
        inbox.come(size * unit)
        unread += 1
        most = max(most, inbox.unread_bytes - size * unit)
        if next(turns, False):
            unread -= 1
            window.leave(0, inbox.read())
    assert most <= messages.WINDOW_BYTES


class Counting:
    """A reader that counts bytes as an inbox does, without any."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._read_bytes = 0

    @property
    def unread_bytes(self) -> int:
        return sum(self._sizes)

    def come(self, size_bytes: int) -> None:
        self._sizes.append(size_bytes)

    def read(self) -> int:
        self._read_bytes += self._sizes.popleft()
        if self._read_bytes < messages.WINDOW_BYTES // 4:
            return 0
        leave, self._read_bytes = self._read_bytes, 0
        return leave


def test_leave_is_given_for_what_was_asked_for_whichever_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_LEAVE_BYTES", 64)
    inbox = Inbox(MOST)
    assert filed(inbox, 1, 5) == 0
    assert inbox.expect(1) == (1, 0)
    assert inbox.expect(1) == (2, 0)
    assert filed(inbox, 1, 6) == 64
    assert filed(inbox, 1, 7, count=100) == 0
    assert inbox.expect(1) == (3, 800)


def test_parts_of_what_was_asked_for_give_leave_before_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of many windows would not come otherwise."""
    monkeypatch.setattr(messages, "_LEAVE_BYTES", 8)
    inbox, spec = Inbox(MOST), TensorSpec("uint8", (30,))
    for start, leave in ((0, 0), (10, 10), (20, 10)):
        if start == 10:
            assert inbox.expect(1) == (1, 10)
        inbox.place(header := MessageHeader(1, 0, start, 10, spec))
        assert inbox.filed(header) == (leave if start else 0)


def test_leave_for_what_was_not_sent_is_refused() -> None:
    window = Window()
    window.sent(1, 100)
    window.leave(1, 60)
    with pytest.raises(PeerFault, match="leave for 41 bytes where 40 were sent"):
        window.leave(1, 41)


def test_parts_come_in_order_and_belong_to_one_tensor() -> None:
    inbox, spec = Inbox(MOST), TensorSpec("uint8", (10,))
    with pytest.raises(PeerFault, match="where none has begun"):
        inbox.place(MessageHeader(1, 0, 2, 2, spec))
    inbox.place(first := MessageHeader(1, 0, 0, 4, spec))
    inbox.filed(first)
    for other in (
        MessageHeader(1, 0, 5, 1, spec),
        MessageHeader(1, 1, 4, 1, spec),
        MessageHeader(1, 0, 4, 1, TensorSpec("int8", (10,))),
        MessageHeader(1, 0, 0, 4, spec),
    ):
        with pytest.raises(PeerFault, match="where byte 4 is due"):
            inbox.place(other)


def test_what_nobody_asks_for_is_bounded() -> None:
    inbox = Inbox(100)
    filed(inbox, 1, 5)
    filed(inbox, 2, 5)
    filed(inbox, 3, 5)
    with pytest.raises(PeerFault, match="more than 100 bytes that nobody has asked for"):
        filed(inbox, 4, 5)
    inbox.expect(5)
    filed(inbox, 5, 5)
    inbox.expect(1)
    filed(inbox, 4, 5)


def test_what_came_before_the_end_can_be_taken() -> None:
    inbox = Inbox(MOST)
    order, _ = inbox.expect(1)
    filed(inbox, 1, 5)
    inbox.end("it has left")
    inbox.end("its connection has ended")
    assert taken(inbox, 1, order) == [5] * 4
    assert inbox.failure == "it has left"
