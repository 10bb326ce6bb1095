"""The times of a script's messages, told once each when the device has executed them."""

from __future__ import annotations

from typing import Any

from onebox.wire.protocol.responses import MessageTimes
from onebox.worker.execution.script_streams import MessageClock


class Mark:
    """An event that the device comes to when it is told to."""

    def __init__(self) -> None:
        self.at_ns: int | None = None

    def query(self) -> bool:
        return self.at_ns is not None

    def time_ns(self) -> int:
        assert self.at_ns is not None
        return self.at_ns


def test_each_message_is_told_once_without_its_waits() -> None:
    clock = MessageClock()
    clock.begin(1, 100, 7)
    clock.end(150, 17)
    clock.begin(2, 160, 17)
    clock.end(190, 17)
    told = clock.take()
    assert told == (MessageTimes(1, 100, 150, 10), MessageTimes(2, 160, 190, 0))
    assert [each.busy_ns for each in told] == [40, 30]
    assert clock.take() == ()


def test_an_asynchronous_device_is_told_of_when_it_is_there() -> None:
    """Its host posts ahead: a message begins when the one before has been executed."""
    clock = MessageClock()
    marks: list[Any] = [Mark(), Mark()]
    for number, mark in enumerate(marks, 1):
        clock.begin(number, 100 * number, 0)
        clock.end(mark, 0)
    assert clock.take() == ()
    marks[0].at_ns = 400
    assert clock.take() == (MessageTimes(1, 100, 400, 0),)
    marks[1].at_ns = 450
    assert clock.take() == (MessageTimes(2, 400, 450, 0),)
