"""The connection to a worker that says more than it should: each turn of the client's loop has a bound."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from onebox.errors import WorkerDied
from onebox.pool.client import loop as loop_module
from onebox.pool.client.connection import HEARTBEATS, WorkerConnection
from onebox.pool.client.loop import ClientLoop
from onebox.pool.client.socket_poller import SocketPoller
from onebox.pool.errors import WorkerLocation
from onebox.wire import configure, encode, new_keys, receive, send
from onebox.wire.channel import cut
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import Heartbeat, Left, Lookup, Reply, Scalars
from onebox.wire.reliable import Reliable
from onebox.worker import Ports
from tests.kit.leaks import descriptors, nothing_left
from tests.kit.waiting import until

KEYS, CLIENT = new_keys(), new_keys()
BEAT = encode(Heartbeat(1, 0.0, "x", 0, 0))


class Worker:
    """A worker's sockets, without a worker; also the handle of its process."""

    address = "127.0.0.1"
    pid = 1

    def __init__(self, number: int = 0, folder: str = "", queue: int = 1000) -> None:
        self.place = WorkerLocation(worker=number, host="h", device="cpu")
        self.descriptor = os.eventfd(0)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.commands, self.heartbeats = self.context.socket(zmq.DEALER), self.context.socket(zmq.DEALER)
        endpoints = []
        for socket in (self.commands, self.heartbeats):
            configure(socket, KEYS, server_key=None, queue=queue)
            if folder:
                endpoints.append(f"ipc://{folder}/{number}-{len(endpoints)}")
                socket.bind(endpoints[-1])
            else:
                endpoints.append(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        self._ports = Ports(*endpoints)

    def ports(self) -> Ports:
        return self._ports

    def death(self) -> WorkerDied:
        return WorkerDied("it died")

    def reply(self, number: int) -> None:
        """Receive a message, and send the reply to one of this number."""
        assert self.commands.poll(60_000)
        self.commands.recv_multipart()
        self.commands.send(encode(Reply(number, (Scalars(()),))))

    def close(self, *, grace_s: float = 0.0) -> None:
        self.context.destroy(linger=0)
        os.close(self.descriptor)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="onebox-") as made:
        yield made


@contextlib.contextmanager
def serving(*workers: Worker) -> Iterator[ClientLoop]:
    """Give a client's loop that is connected to workers; all are closed afterwards."""
    loop = ClientLoop(CLIENT, workers=len(workers))
    try:
        loop.start()
        for worker in workers:
            loop.connect(worker, KEYS.public)
        yield loop
    finally:
        loop.stop()
        for worker in workers:
            worker.close()


def filled(socket: zmq.Socket[bytes], message: bytes, count: int) -> None:
    for _ in range(count):
        socket.send(message)
    time.sleep(0.3)


def test_heartbeats_and_messages_of_one_turn_are_bounded(folder: str) -> None:
    worker = Worker(folder=folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connection = WorkerConnection(context, worker, worker.ports(), CLIENT, KEYS.public, 1 << 30)
    poller = SocketPoller()
    connection.register(poller)
    try:
        filled(worker.heartbeats, BEAT, 500)
        filled(worker.commands, BEAT, 500)
        ready = poller.poll(1000)[connection]
        assert len(list(connection.heartbeats(ready))) == HEARTBEATS
        taken = 0
        for _ in connection.messages(ready, 0.02):
            taken += 1
            time.sleep(0.002)  # its processing
        assert 1 <= taken <= 12
        ready = poller.poll(0)[connection]
        assert connection.commands in ready and connection.heartbeat_socket in ready, "the rest comes next time"
        assert len(list(connection.messages(ready, 30.0))) == 500 - taken
    finally:
        connection.close(poller)
        context.destroy(linger=0)
        worker.close()


def test_a_worker_that_floods_the_client_delays_no_other(folder: str) -> None:
    bad, good = Worker(0, folder), Worker(1, folder)
    loop = ClientLoop(CLIENT, workers=2)
    stop = threading.Event()

    def flood() -> None:
        message = encode(Left(99))
        while not stop.is_set():
            try:
                for _ in range(100):
                    bad.commands.send(message, zmq.NOBLOCK)
                    bad.heartbeats.send(BEAT, zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.0001)

    flooding = threading.Thread(target=flood)
    try:
        loop.start()
        for worker in (bad, good):
            loop.connect(worker, KEYS.public)
        flooding.start()
        time.sleep(0.3)
        slowest_s = 0.0
        for number in range(1, 11):
            began_s = time.monotonic()
            future = loop.post(1, [Ask("scalars", ())], answer=True)
            good.reply(number)
            future.result(60)
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert slowest_s < 1.0
    finally:
        stop.set()
        flooding.join()
        loop.stop()
        bad.close()
        good.close()


def test_a_reply_that_came_with_the_end_of_another_worker_counts(folder: str) -> None:
    """The loop finds both in one turn, since it was busy when they came."""
    ends, answers = Worker(0, folder), Worker(1, folder)
    loop = ClientLoop(CLIENT, workers=2)
    busy, free = threading.Event(), threading.Event()

    def work(_: object) -> None:
        busy.set()
        free.wait(60)

    try:
        loop.start()
        for worker in (ends, answers):
            loop.connect(worker, KEYS.public)
        loop.post(1, [Ask("scalars", ())], answer=True).add_done_callback(work)
        future = loop.post(1, [Ask("scalars", ())], answer=True)
        answers.reply(1)
        assert busy.wait(60)
        os.eventfd_write(ends.descriptor, 1)
        answers.reply(2)
        time.sleep(0.3)
        free.set()
        assert future.result(60).results == (Scalars(()),)
        until(lambda: 0 in loop.lost)
    finally:
        free.set()
        loop.stop()
        ends.close()
        answers.close()


def test_sockets_that_a_thread_still_uses_are_left_to_it(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_JOIN_S", 0.05)
    hangs, goes_on = threading.Event(), threading.Event()
    worker = Worker(folder=folder)

    def hang(_: object) -> None:
        hangs.set()
        goes_on.wait(20)

    try:
        before = descriptors()
        with nothing_left():
            loop = ClientLoop(CLIENT)
            loop.start()
            loop.connect(worker, KEYS.public)
            loop.post(0, [Ask("scalars", ())], answer=True).add_done_callback(hang)
            worker.reply(1)
            assert hangs.wait(20)
            opened = {each for each in descriptors() - before if not each[1].startswith("/proc/")}  # of other threads
            loop.stop()
            assert opened and opened <= descriptors()
            goes_on.set()
    finally:
        goes_on.set()
        worker.close()


def test_a_worker_leaves_no_group_of_others_and_says_so_once_in_the_log(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Worker(0, folder), Worker(1, folder)
    with serving(bad, good) as loop:
        loop.form(5, (1,))
        with caplog.at_level("WARNING", "onebox"):
            for number in (5, 5, 5, 6):  # 6: a group that there is not, as after others have left it
                bad.commands.send(encode(Left(number)))
            future = loop.post(0, [Ask("scalars", ())], answer=True)
            bad.commands.send(encode(Reply(1, (Scalars(()),))))
            future.result(60)
            assert loop.serves(5)
            good.commands.send(encode(Left(5)))
            until(lambda: not loop.serves(5))  # a member may leave
        assert [record.getMessage() for record in caplog.records] == [
            "worker 0 (cpu on h) says that it leaves group 5, of which it is no member; ignored (such messages since "
            "the last line: 1); that worker is faulty, or somebody has taken it over"
        ]


@pytest.mark.parametrize("channel", ["commands", "heartbeats"])
def test_a_worker_that_never_completes_a_message_is_given_up(channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "MESSAGE_SHARE", 1 << 40)  # of any machine's memory: nothing
    monkeypatch.setattr(loop_module, "LEAST_MESSAGE_BYTES", 16 << 20)
    worker = Worker()
    loop = ClientLoop(CLIENT)
    try:
        loop.start()
        hello = loop.connect(worker, KEYS.public)
        link = Reliable(7)
        link.post([encode(Left(99))])
        (parcel,) = link.outgoing(time.monotonic())
        worker.commands.send_multipart(parcel)
        socket: zmq.Socket[bytes] = getattr(worker, channel)
        socket.sndtimeo = 5000
        socket.send_multipart([bytes(60_000)] * 8000, copy=False)  # takes many turns of the loop
        error = hello.exception(20)
        assert isinstance(error, WorkerDied) and "without completing a message" in str(error)
        assert 0 in loop.lost
    finally:
        loop.stop()
        worker.close()


@pytest.mark.parametrize("here", [False, True], ids=["tcp", "ipc"])
def test_a_worker_that_asks_and_takes_no_answers_is_given_up(
    folder: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "MESSAGE_SHARE", 1 << 40)
    monkeypatch.setattr(loop_module, "LEAST_MESSAGE_BYTES", 16 << 20)
    worker = Worker(folder=folder if here else "", queue=2)
    link = Reliable(7)

    def say(message: Lookup) -> None:
        if here:
            worker.commands.send_multipart(cut([encode(message)]))
            return
        link.post([encode(message)])
        for parcel in link.outgoing(time.monotonic()):
            send(worker.commands, parcel)

    with serving(worker) as loop:
        loop.form(1, (0,))
        say(Lookup(1, 1, "set", ("k",), bytes(1 << 20)))
        for ticket in range(2, 30):  # some more than may wait, for those that the sockets' queues take
            say(Lookup(ticket, 1, "get", ("k",)))
        error = until(lambda: loop.lost.get(0))
        assert isinstance(error, WorkerDied) and "asks for more than it takes" in str(error)


@pytest.mark.parametrize("here", [False, True], ids=["tcp", "ipc"])
def test_answers_that_a_worker_takes_are_not_counted(folder: str, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "MESSAGE_SHARE", 1 << 40)
    monkeypatch.setattr(loop_module, "LEAST_MESSAGE_BYTES", 4 << 20)
    worker = Worker(folder=folder if here else "", queue=2)
    link = Reliable(7)

    def flush() -> None:
        for parcel in link.outgoing(time.monotonic()):
            send(worker.commands, parcel)

    with serving(worker) as loop:
        loop.form(1, (0,))
        if here:
            worker.commands.send_multipart(cut([encode(Lookup(1, 1, "set", ("k",), bytes(1 << 20)))]))
        else:
            link.post([encode(Lookup(1, 1, "set", ("k",), bytes(1 << 20)))])
        for ticket in range(2, 20):
            if here:
                worker.commands.send(encode(Lookup(ticket, 1, "get", ("k",))))
                assert worker.commands.poll(60_000)
                assert len(receive(worker.commands)[0]) > 1 << 20
                continue
            link.post([encode(Lookup(ticket, 1, "get", ("k",)))])
            flush()
            messages: list[Any] = []
            while not messages:
                assert worker.commands.poll(60_000)
                messages = link.take(receive(worker.commands), time.monotonic())
                flush()
        assert loop.lost == {}


def test_a_dropped_worker_is_sent_nothing_again_and_its_host_is_not_listened_to(folder: str) -> None:
    class Hosted(Worker):
        looks = 0

        @property
        def heard_s(self) -> float:
            self.looks += 1
            return 0.0

    remote, here, other, new = Hosted(0), Worker(1, folder), Hosted(2), Worker(0)
    with contextlib.closing(new), serving(remote, here, other) as loop:
        loop.post(0, [Ask("scalars", ())])
        until(lambda: remote.looks > 1)
        loop.give_up(0, WorkerDied("it died"))
        loop.drop(0)
        looks = remote.looks
        loop.connect(new, KEYS.public)
        assert loop.mend()
        for worker in (new, other):
            loop.post(worker.place.worker, [Ask("scalars", ())])
        for worker in (new, other, new, other):  # again, as neither acknowledges it
            assert worker.commands.poll(20_000)
            worker.commands.recv_multipart()
        seen = other.looks
        until(lambda: other.looks > seen)
        assert remote.looks == looks
        assert loop.groups_of(2) == {}, "the client's thread still serves"
