"""The server of a worker, in a thread: one answer to each message, whatever the message is."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
import zmq

from onebox.wire import (
    TensorSpec,
    configure,
    decode_worker_message,
    encode,
    from_frame,
    held_bytes,
    new_keys,
    to_frame,
)
from onebox.wire.protocol import codec
from onebox.wire.protocol.groups import FormGroup, LeaveGroup, Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.instructions import Ask, Call, Get, Reduce
from onebox.wire.protocol.requests import (
    PROTOCOL,
    Define,
    Envelope,
    Instruction,
    Put,
    Routine,
    Run,
    Shutdown,
)
from onebox.wire.protocol.responses import Contribution, Hello, Joined, Left, Lookup, Reply, Scalars, Tensors
from onebox.worker import WorkerConfig
from onebox.worker.accelerator import DeviceFailed
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.manager import GroupManager
from onebox.worker.execution.executor import Executor
from onebox.worker.process import main
from onebox.worker.process.config import Ports
from onebox.worker.process.main import WorkerServer
from onebox.worker.progress import WorkerProgress
from tests.kit.waiting import until
from tests.unit.machines import define, elementwise
from tests.unit.worker.late_device import LateDevice

SPEC = TensorSpec("float32", (2,))
VALUES = torch.tensor([1.0, -2.0])
HOUR_S = 3600


class Client:
    """A client of one worker, message by message."""

    server_class = WorkerServer

    def __init__(self, device: str = "cpu", *, quota_bytes: int = 0) -> None:
        self.keys, self.server_keys = new_keys(), new_keys()
        self.lifeline, self.owner = os.pipe()
        self.folder = tempfile.TemporaryDirectory(prefix="onebox-")
        keys = self.server_keys
        config = WorkerConfig(device, 1, keys.public, keys.secret, self.keys.public, self.folder.name, quota_bytes)
        self.server = self.server_class(config, (self.lifeline,))
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        configure(self.socket, self.keys, server_key=self.server_keys.public, queue=0)
        self.socket.connect(self.server.ports.commands)
        self.number = 0

    def tell(self, *instructions: Instruction, frames: Sequence[Any] = (), answer: bool = True) -> int:
        self.number += 1
        self.socket.send_multipart([encode(Envelope(self.number, answer, instructions)), *frames])
        return self.number

    def receive(self, wait_s: float = 10.0) -> tuple[Any, Sequence[Any]]:
        assert self.socket.poll(int(wait_s * 1000)), "the worker says nothing"
        message, frames = decode_worker_message(self.socket.recv_multipart())
        return message, frames

    def ask(self, *instructions: Instruction, frames: Sequence[Any] = ()) -> Reply:
        number = self.tell(*instructions, frames=frames)
        reply, _ = self.receive()
        assert isinstance(reply, Reply)
        assert reply.number == number
        return reply

    def silent(self) -> bool:
        """Tell whether the worker has nothing to say: the answer to the next question is the next thing it says."""
        number = self.tell(Ask("scalars", ()))
        reply, _ = self.receive()
        return isinstance(reply, Reply) and reply.number == number

    def close(self) -> None:
        self.tell(Shutdown(), answer=False)
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.server.close()  # an error may have ended the thread
        self.context.destroy(linger=0)
        os.close(self.lifeline)
        os.close(self.owner)
        self.folder.cleanup()


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    hello, _ = made.receive()
    assert isinstance(hello, Hello)
    made.hello = hello  # type: ignore[attr-defined]
    yield made
    made.close()


def put(number: int = 1) -> Put:
    return Put((number,), (SPEC,))


FRAME = bytes(to_frame(VALUES))


def test_first_words(client: Any) -> None:
    assert client.hello.protocol == PROTOCOL
    assert client.hello.torch == str(torch.__version__)
    assert (client.hello.device, client.hello.threads) == ("cpu", 1)
    assert client.hello.memory_bytes > 2**20
    assert client.hello.name


def test_an_answer_has_results_and_frames_in_order(client: Client) -> None:
    client.tell(put(1), put(2), Get((2, 1)), Ask("scalars", ()), Get((1,)), frames=[FRAME, bytes(8)])
    reply, frames = client.receive()
    assert [type(result) for result in reply.results] == [Tensors, Scalars, Tensors]
    assert [from_frame(SPEC, frame).tolist() for frame in frames] == [[0.0, 0.0], [1.0, -2.0], [1.0, -2.0]]


def test_no_answer_where_none_is_asked_for(client: Client) -> None:
    client.tell(put(), frames=[FRAME], answer=False)
    assert client.silent()


def test_a_failure_is_answered_also_where_no_answer_is_asked_for(client: Client) -> None:
    number = client.tell(Call(9, (1,), (2,)), Call(9, (1,), (3,)), answer=False)
    reply, _ = client.receive()
    assert (reply.number, reply.results) == (number, ())
    assert "definition 9" in reply.failure.message
    assert client.silent(), "one failure a message"


def test_a_question_about_something_void_stops_the_message(client: Client) -> None:
    client.ask(Call(9, (1,), (2,)))
    reply = client.ask(Get((2,)), put(5), frames=[FRAME])
    assert reply.failure is not None
    assert "definition 9" in reply.failure.message
    assert client.ask(Ask("scalars", ())).failure is None


@pytest.mark.parametrize(("frames", "message"), [(0, "fewer frames"), (2, "more frames")])
def test_a_wrong_number_of_frames(client: Client, frames: int, message: str) -> None:
    reply = client.ask(put(), frames=[FRAME] * frames)
    assert reply.failure is not None
    assert reply.failure.kind == "protocol"
    assert message in reply.failure.message


def test_junk_is_answered_and_the_next_message_is_served(client: Client) -> None:
    chance = random.Random(3)
    for _ in range(50):
        client.socket.send_multipart([chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(1, 4))])
        reply, _ = client.receive()
        assert reply.number == 0, "it has none that can be known"
        assert reply.failure.kind == "protocol"
    client.ask(put(), frames=[FRAME])
    assert client.silent()


def test_junk_behind_a_failure_is_answered_too(client: Client) -> None:
    """Both are read while the worker waits for a ticket; neither may hide the other."""
    client.tell(put(), FormGroup(5, 0, 2, "client", "127.0.0.1", 5.0), Reduce((1,), 5), Get((1,)), frames=[FRAME])
    contribution, _ = client.receive()
    assert isinstance(contribution, Contribution)
    client.socket.send_multipart([b"junk"])
    reply, _ = client.receive()
    assert reply.number == 0
    assert reply.failure is not None
    client.socket.send_multipart([encode(Envelope(0, False, (TicketCancelled(contribution.ticket),)))])
    reply, _ = client.receive()
    assert reply.number == client.number
    assert reply.failure.kind == "peer"


def test_what_comes_while_it_waits_is_done_afterwards_in_order(client: Client) -> None:
    client.tell(put(), FormGroup(5, 0, 2, "client", "127.0.0.1", 5.0), Reduce((1,), 5), Get((1,)), frames=[FRAME])
    contribution, _ = client.receive()
    second = client.tell(put(2), Get((2,)), frames=[bytes(8)])
    third = client.tell(Get((1,)))
    total = bytes(to_frame(VALUES * 3))
    client.socket.send_multipart([encode(Envelope(0, False, (Reduced(contribution.ticket),))), total])
    replies = [client.receive() for _ in range(3)]
    assert [reply.number for reply, _ in replies] == [second - 1, second, third]
    assert [from_frame(SPEC, frames[0]).tolist() for _, frames in replies] == [[3.0, -6.0], [0.0, 0.0], [3.0, -6.0]]


def test_the_wait_for_an_answer_ends_although_other_messages_keep_coming(client: Client) -> None:
    client.tell(put(), FormGroup(5, 0, 2, "client", "127.0.0.1", 0.2), Reduce((1,), 5), Get((1,)), frames=[FRAME])
    contribution, _ = client.receive()
    assert isinstance(contribution, Contribution)
    for _ in range(500):
        client.socket.send_multipart([encode(Envelope(0, False, ()))])
        if client.socket.poll(20):
            break
    reply, _ = client.receive(0.0)
    assert reply.failure.kind == "peer"
    assert "did not come" in reply.failure.message


def test_a_client_that_takes_nothing_ends_the_worker(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[bool] = []

    def full(socket: Any, frames: Any, flags: int = 0, *, copy: bool = True) -> None:
        waiting.append(client.server.machine.progress.waiting)
        assert 0 < socket.sndtimeo <= 600_000, "a wait with a bound"
        raise zmq.Again

    with monkeypatch.context() as patch:
        patch.setattr(main, "send", full)
        patch.setattr(client.server.machine, "progress", WorkerProgress())  # its own thread waits for messages
        with pytest.raises(SystemExit, match="has taken nothing"):
            client.server.send_to_client(Left(1))
    assert waiting == [False, True], "the second is no stall"


def test_a_sum_of_another_size_is_refused(client: Client) -> None:
    client.tell(put(), FormGroup(5, 0, 2, "client", "127.0.0.1", 5.0), Reduce((1,), 5), Get((1,)), frames=[FRAME])
    contribution, _ = client.receive()
    client.socket.send_multipart([encode(Envelope(0, False, (Reduced(contribution.ticket),))), bytes(4)])
    reply, _ = client.receive()
    assert reply.failure.kind == "protocol"


def test_a_group_that_cannot_be_formed(client: Client) -> None:
    client.tell(FormGroup(5, 0, 2, "tcp", "127.0.0.1", 5.0))
    lookup, _ = client.receive()
    while not (isinstance(lookup, Lookup) and lookup.action != "set"):
        lookup, _ = client.receive()
    client.socket.send_multipart([encode(Envelope(0, False, (TicketCancelled(lookup.ticket),)))])
    heard = [client.receive()[0] for _ in range(2)]
    assert {type(message) for message in heard} == {Left, Reply}
    (reply,) = [message for message in heard if isinstance(message, Reply)]
    assert reply.failure is not None
    assert reply.failure.kind == "peer"


def test_an_answer_that_nobody_waits_for_changes_nothing(client: Client) -> None:
    for instruction in (Rendezvous(99, (b"x",)), Reduced(98), TicketCancelled(97)):
        client.socket.send_multipart([encode(Envelope(0, False, (instruction,)))])
    assert client.silent()


def test_a_failing_operator_names_its_shapes(client: Client) -> None:
    mm = elementwise("aten.mm.default", SPEC, 2)
    reply = client.ask(define(9, mm), put(), Call(9, (1, 1), (2,)), frames=[FRAME])
    assert reply.failure is not None
    assert (reply.failure.kind, reply.failure.operator) == ("operator", "aten.mm.default")
    assert reply.failure.shapes == "float32[2], float32[2]"


def test_a_reply_that_cannot_be_sent_is_a_failure(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [Ask("memory")] * 100
    with monkeypatch.context() as patch:
        patch.setattr(codec, "HEADER_BYTES", len(encode(Envelope(1, True, tuple(asks)))))
        reply = client.ask(*asks)
    assert reply.failure is not None and "over the limit" in reply.failure.message
    assert client.silent()


def test_configuration_and_ports_travel_as_strict_json() -> None:
    keys = new_keys()
    config = WorkerConfig("cpu", 2, keys.public, keys.secret, keys.public)
    text = msgspec.json.encode(config)
    assert msgspec.json.decode(text, type=WorkerConfig) == config
    assert b"\n" not in text
    for broken in (
        b'{"commands": "a"}',
        b'{"commands": "a", "heartbeats": "b", "more": 3}',
        b'{"commands": 1, "heartbeats": ""}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(broken, type=Ports)


def test_a_configuration_does_not_show_its_secret() -> None:
    keys = new_keys()
    config = WorkerConfig("cpu", 2, keys.public, keys.secret, keys.public)
    assert keys.secret not in repr(config)
    assert keys.secret not in f"{config}"


def test_the_next_step_is_queued_before_the_device_has_done_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous device's replies wait for its values, and nothing else does; they keep their order."""
    device = LateDevice()
    monkeypatch.setattr("onebox.worker.device.accelerator_for", lambda name: device)
    client = Client()
    try:
        assert isinstance(client.receive()[0], Hello)
        client.ask(put(), Define(50, Routine((Ask("memory"),), 0)), frames=[FRAME])
        executed = client.server.machine.progress.executed
        begin_ns = device.now_ns()
        device.current().work(HOUR_S)
        first, second = client.tell(Get((1,))), client.tell(Ask("memory"))
        third = client.tell(Run(50, trace=True))
        until(lambda: client.server.machine.progress.executed >= executed + 3)
        assert client.socket.poll(0) == 0
        device.skip(HOUR_S)
        replies = [client.receive() for _ in range(3)]
        assert [reply.number for reply, _ in replies] == [first, second, third]
        assert torch.equal(from_frame(SPEC, bytes(replies[0][1][0])), VALUES)
        start_ns, end_ns = replies[2][0].times_ns
        assert begin_ns + HOUR_S * 1e9 <= start_ns <= end_ns
        device.current().work(0.2)
        last = client.tell(Get((1,)))
        client.tell(Shutdown(), answer=False)
        assert client.receive()[0].number == last
    finally:
        client.close()


def test_a_reply_that_waits_for_the_device_costs_nothing_until_its_work_is_done(
    late: tuple[LateDevice, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device itself wakes the worker, and a message does; the device is not asked meanwhile."""
    for place in ("onebox.worker.process.main.LOOK_S", "onebox.worker.execution.pending_reply.LOOK_S"):
        monkeypatch.setattr(place, float(HOUR_S))
    device, client = late
    device.current().work(HOUR_S)
    first = client.tell(Get((1,)))
    (event,) = until(lambda: [each for each in device.current().events if each.waited])
    executed, asked = client.server.machine.progress.executed, event.queries
    second = client.tell(Get((1,)))
    until(lambda: client.server.machine.progress.executed > executed)
    assert client.socket.poll(0) == 0
    device.skip(HOUR_S)
    assert [client.receive()[0].number for _ in range(2)] == [first, second]
    assert event.queries - asked <= 5
    (thread,) = [each for each in threading.enumerate() if each.name == "onebox-device"]
    client.tell(Shutdown(), answer=False)
    thread.join(60)
    assert not thread.is_alive()


class FailingGroup:
    """A group whose operations are interrupted."""

    failure = ""
    joined = Joined()

    def check(self) -> bool:
        if self.failure:
            raise RankLost(self.failure)
        return True

    def attend(self) -> bool:
        return False

    def interrupt(self) -> None:
        self.failure = "another worker of the group does not answer"

    def close(self) -> None:
        """Leave it."""


class FailingGroups(GroupManager):
    def _join(self, *given: object) -> Any:
        return FailingGroup()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LateDevice, Client]]:
    """A worker of an asynchronous device in group 3, with a buffer."""
    device = LateDevice()
    monkeypatch.setattr("onebox.worker.device.accelerator_for", lambda name: device)
    monkeypatch.setattr(Executor, "groups_type", FailingGroups)
    client = Client()
    try:
        assert isinstance(client.receive()[0], Hello)
        client.ask(put(), FormGroup(3, 0, 2, "tcp", "127.0.0.1", 5.0), frames=[FRAME])
        yield device, client
    finally:
        device.finish()
        client.close()


def begun(late: tuple[LateDevice, Client], *instructions: Instruction) -> int:
    """Send a message, and wait until its reply waits for the device."""
    device, client = late
    number = client.tell(*instructions)
    until(lambda: any(event.waited for event in device.current().events))
    return number


@pytest.mark.parametrize("left", [False, True], ids=["in the group", "after the group was left"])
def test_a_reply_that_waits_for_interrupted_operations_is_a_failure(
    late: tuple[LateDevice, Client], left: bool
) -> None:
    """The device's work is over then, with any values."""
    device, client = late
    device.current().work(60.0)
    number = begun(late, Get((1,)))
    client.server.machine.interrupt(3)
    if left:
        client.tell(LeaveGroup(3))
        assert isinstance(client.receive()[0], Left)
    device.finish()
    replies = [client.receive()[0] for _ in range(1 + left)]
    assert replies[0].number == number
    assert replies[0].failure is not None
    assert (replies[0].failure.kind, replies[0].failure.message) == (
        "peer",
        "another worker of the group does not answer",
    )
    assert not replies[0].results
    if left:  # nothing of the group is needed any more
        assert client.ask(Get((1,))).failure is None


def test_an_interrupted_device_that_goes_on_ends_the_worker(
    late: tuple[LateDevice, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebox.worker.execution.pending_reply.LOST_S", 0.1)
    device, client = late
    ended: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))
    device.current().work(60.0)
    begun(late, Get((1,)))
    client.server.machine.interrupt(3)
    client.thread.join(60)
    assert not client.thread.is_alive()
    assert [type(error) for error in ended] == [DeviceFailed]


def test_the_end_of_a_worker_does_not_wait_for_a_device_for_ever(
    late: tuple[LateDevice, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "SEND_TIMEOUT_S", 0.1)
    device, client = late
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    device.current().work(60.0)
    begun(late, Get((1,)))
    client.tell(Shutdown(), answer=False)
    client.thread.join(60)
    assert not client.thread.is_alive()


@pytest.mark.parametrize(
    ("device", "sharing", "given", "loading"),
    [
        ("cuda:1", 1, None, "EAGER"),
        ("cuda:1", 1, "LAZY", "LAZY"),
        ("cuda:1", 2, None, None),
        ("cpu", 1, None, None),
        ("sim", 1, None, None),
    ],
)
def test_workers_with_a_gpu_of_their_own_load_kernels_at_once(
    monkeypatch: pytest.MonkeyPatch, device: str, sharing: int, given: str | None, loading: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {"CUDA_MODULE_LOADING": given})
    main.load_kernels_at_once(WorkerConfig(device, 1, "", "", "", sharing=sharing))
    assert os.environ.get("CUDA_MODULE_LOADING") == loading


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Client, list[str]]]:
    """A worker in which about a mebibyte of messages may wait, and the error with which it ends."""
    monkeypatch.setattr(main, "WAITING_BYTES", 1 << 20)
    assert main.waiting_bytes(1 << 12) < main.waiting_bytes(0)
    ended: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(str(args.exc_value)))
    client = Client(quota_bytes=1 << 12)
    assert isinstance(client.receive()[0], Hello)
    yield client, ended
    client.close()


def test_answers_without_a_question_are_dropped(narrow: tuple[Client, list[str]]) -> None:
    client, _ = narrow
    asked = client.server.new_ticket()
    for ticket in [asked] * 50 + list(range(asked + 1, asked + 50)):  # the first is kept
        client.socket.send_multipart([encode(Envelope(0, False, (Rendezvous(ticket, (bytes(1 << 16),)),)))])
    assert client.silent()


@pytest.mark.parametrize("what", ["messages", "empty frames", "answers"])
def test_messages_that_wait_are_bounded(narrow: tuple[Client, list[str]], what: str) -> None:
    client, ended = narrow
    if what != "answers":  # which nobody waits for
        client.tell(put(), FormGroup(5, 0, 2, "client", "127.0.0.1", 60.0), Reduce((1,), 5), Get((1,)), frames=[FRAME])
        assert isinstance(client.receive()[0], Contribution)
    frames = {"messages": [bytes(1 << 14)], "empty frames": [b""] * 1000, "answers": [bytes(1 << 14)]}[what]
    assert held_bytes([b"", *frames]) > 1 << 13, "empty frames take memory, too"
    for _ in range(200):
        instruction = Reduced(client.server.new_ticket()) if what == "answers" else Ask("scalars", ())
        client.socket.send_multipart([encode(Envelope(0, True, (instruction,))), *frames])
    client.thread.join(30)
    assert not client.thread.is_alive()
    assert len(ended) == 1 and "bytes wait; allowed are" in ended[0]


def test_operators_warn_of_nothing_in_a_worker() -> None:
    for ignored in (False, True):
        with warnings.catch_warnings(record=True) as seen, torch.inference_mode():
            warnings.simplefilter("always")
            if ignored:
                main.ignore_warnings()
            for size in range(1, 21):
                torch.add(torch.ones(size + 2), 1.0, out=torch.empty(size))
        assert bool(seen) is not ignored
