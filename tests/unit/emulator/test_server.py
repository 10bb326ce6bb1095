"""The process of an emulated device, as a thread: replies come when the device would have sent them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from onebox.emulator import server as module
from onebox.emulator.server import EmulatorServer, wake_promptly
from onebox.wire.protocol.instructions import Ask, Call, Get
from onebox.wire.protocol.requests import Define, Instruction, Run, StoredProgram
from onebox.wire.protocol.responses import Hello, Reply
from onebox.worker.process.main import WorkerServer
from tests.kit.waiting import until
from tests.unit.machines import elementwise
from tests.unit.worker.process.test_main import FRAME, SPEC, Client, put

CALL = Call(50, (1,), (2,))


class SimClient(Client):
    """A client of an emulated device."""

    server_class = EmulatorServer


@contextmanager
def sim(cost_s: float) -> Iterator[SimClient]:
    """A device with a program that takes a time."""
    client = SimClient("sim")
    try:
        hello, _ = client.receive()
        assert isinstance(hello, Hello)
        assert (hello.device, hello.emulated, hello.name) == ("sim", True, "computes nothing")
        program = StoredProgram(elementwise("aten.relu.default", SPEC), cost_s)
        client.ask(put(), Define(50, program), frames=[FRAME])
        yield client
    finally:
        client.close()


def test_a_reply_comes_when_the_device_has_done_its_work() -> None:
    with sim(0.2) as client:
        begin_ns = time.monotonic_ns()
        numbers = [client.tell(CALL), client.tell(CALL), client.tell(Ask("memory"))]
        came = [(client.receive()[0].number, time.monotonic_ns() - begin_ns) for _ in numbers]
        assert [number for number, _ in came] == numbers
        assert came[0][1] >= 200_000_000
        assert min(came[1][1], came[2][1]) >= 400_000_000


@pytest.mark.parametrize(
    ("failing", "frames"),
    [(Get((1,)), []), (Ask("digest", (9,)), []), (Run(51), []), (Ask("memory"), [FRAME]), (None, [])],
    ids=["values", "question", "routine", "frames", "junk"],
)
def test_a_failure_is_answered_after_what_the_device_has_still_to_do(
    failing: Instruction | None, frames: list[bytes]
) -> None:
    with sim(0.2) as client:
        begin_ns = time.monotonic_ns()
        first = client.tell(CALL)
        if failing is None:
            client.socket.send_multipart([b"junk"])
            second = 0
        else:
            second = client.tell(failing, frames=frames)
        replies = [client.receive()[0] for _ in range(2)]
        assert [(reply.number, reply.failure is None) for reply in replies] == [(first, True), (second, False)]
        assert time.monotonic_ns() - begin_ns >= 200_000_000


def test_replies_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLIES_AHEAD", 3)
    with sim(0.5) as client:
        server, begun = client.server, 0
        begin_message = server.machine.begin
        answered: list[tuple[int, int]] = []

        def begin() -> None:
            nonlocal begun
            begun += 1
            begin_message()

        def send(message: Reply, frames: Sequence[Any] = ()) -> None:
            answered.append((message.number, begun))
            WorkerServer.send_to_client(server, message, frames)

        monkeypatch.setattr(server.machine, "begin", begin)
        monkeypatch.setattr(server, "send_to_client", send)
        numbers = [client.tell(CALL), *(client.tell(Ask("memory")) for _ in range(20))]
        assert [client.receive()[0].number for _ in numbers] == numbers
        assert [number for number, _ in answered] == numbers
        assert answered[0][1] <= 3


def test_the_work_of_a_device_may_take_longer_than_a_socket_can_wait() -> None:
    with sim(1e7) as client:
        numbers = [client.tell(CALL), client.tell(Ask("memory"))]
        until(lambda: len(client.server._replies) == 2)
        for reply in client.server._replies:
            reply.after.at_ns = 0
        client.tell(Ask("memory"), answer=False)
        assert [client.receive()[0].number for _ in numbers] == numbers


def test_short_slices_leave_priority_and_policy_as_they_are() -> None:
    def in_thread() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        wake_promptly()
        seen.append((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)))

    seen: list[tuple[int, int]] = []
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [(3, os.SCHED_OTHER)]
