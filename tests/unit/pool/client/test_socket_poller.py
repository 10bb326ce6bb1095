"""The poller of the client's sockets: nothing that has come is overlooked, whatever was done with a socket before."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from onebox.pool.client.socket_poller import SocketPoller
from tests.kit.waiting import until

WITHIN_MS = 10_000


class Ends:
    """Pairs of connected sockets: `own` ones in the poller, each with its number as its owner, and `far` ones."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self.own: list[zmq.Socket[Any]] = []
        self.far: list[zmq.Socket[Any]] = []

    def add(self, poller: SocketPoller, count: int) -> None:
        for _ in range(count):
            own, far = self._context.socket(zmq.DEALER), self._context.socket(zmq.DEALER)
            poller.register(own, len(self.own))
            self.own.append(own)
            self.far.append(far)
            far.connect(f"tcp://127.0.0.1:{own.bind_to_random_port('tcp://127.0.0.1')}")

    def close(self) -> None:
        for socket in (*self.own, *self.far):
            socket.close(0)
        self._context.term()


@pytest.fixture
def poller() -> Iterator[SocketPoller]:
    made = SocketPoller()
    yield made
    made.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(zmq.Context())
    yield made
    made.close()


def test_a_message_makes_its_socket_ready_and_no_other(ends: Ends, poller: SocketPoller) -> None:
    ends.add(poller, 3)
    assert not poller.poll(0)
    ends.far[1].send(b"a")
    assert until_some(poller) == {1: {ends.own[1]}}


def until_some(poller: SocketPoller) -> dict[Any, set[Any]]:
    """Poll until something is ready: a connection that is made wakes a poller, too."""
    end_s = time.monotonic() + WITHIN_MS / 1000
    while time.monotonic() < end_s:
        if found := poller.poll(100):
            return {owner: set(sources) for owner, sources in found.items()}
    raise AssertionError("nothing was ready")


def test_what_is_left_of_several_messages_is_ready_in_the_next_turn(ends: Ends, poller: SocketPoller) -> None:
    ends.add(poller, 1)
    for _ in range(5):
        ends.far[0].send(b"a")
    taken = 0
    while taken < 5:
        assert 0 in until_some(poller)
        ends.own[0].recv(zmq.NOBLOCK)
        taken += 1
    assert not poller.poll(0)


def test_what_came_before_a_socket_was_used_to_send_is_ready(ends: Ends, poller: SocketPoller) -> None:
    """To send takes the change of state from the descriptor; the poller is told that the socket was used."""
    ends.add(poller, 1)
    ends.far[0].send(b"before")
    until_some(poller)
    ends.own[0].recv()
    poller.poll(0)
    for _ in range(50):
        ends.far[0].send(b"a")
        # this takes it, as sending does
        until(lambda: int(ends.own[0].getsockopt(zmq.EVENTS)) & zmq.POLLIN, turn=lambda: None)
        ends.own[0].send(b"b")
        poller.touch(ends.own[0])
        assert 0 in poller.poll(WITHIN_MS)
        ends.own[0].recv(zmq.NOBLOCK)
        poller.poll(0)


def test_descriptors_are_polled_beside_sockets(ends: Ends, poller: SocketPoller) -> None:
    ends.add(poller, 1)
    reader, writer = os.pipe()
    try:
        poller.register(reader, "pipe")
        os.write(writer, b"a")
        assert until_some(poller) == {"pipe": {reader}}
        assert until_some(poller) == {"pipe": {reader}}, "as long as it is not read"
        poller.unregister(reader)
        assert not poller.poll(0)
        with pytest.raises(KeyError):
            poller.unregister(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_socket_that_is_unregistered_is_not_asked(ends: Ends, poller: SocketPoller) -> None:
    ends.add(poller, 2)
    ends.far[0].send(b"a")
    until_some(poller)
    poller.unregister(ends.own[0])
    ends.own[0].close(0)
    poller.touch(ends.own[0])
    ends.far[1].send(b"a")
    assert until_some(poller) == {1: {ends.own[1]}}


def test_no_message_of_many_sockets_is_overlooked_while_they_are_used_both_ways(
    ends: Ends, poller: SocketPoller
) -> None:
    """Peers answer in their own threads while this one sends, so that each order of both occurs."""
    ends.add(poller, 8)
    count = 200

    def echo(far: zmq.Socket[Any]) -> None:
        for _ in range(count):
            far.send(far.recv())

    threads = [threading.Thread(target=echo, args=(far,), daemon=True) for far in ends.far]
    for thread in threads:
        thread.start()
    drawn, sent, taken = random.Random(0), [0] * 8, [0] * 8
    while min(taken) < count:
        for number, own in enumerate(ends.own):
            if sent[number] < count and drawn.random() < 0.5:
                own.send(b"a")
                poller.touch(own)
                sent[number] += 1
        waits = sum(sent) > sum(taken) and min(sent) == count  # then only an answer can wake it
        for owner in poller.poll(WITHIN_MS if waits else 0):
            ends.own[owner].recv(zmq.NOBLOCK)
            taken[owner] += 1
    for thread in threads:
        thread.join(WITHIN_MS / 1000)
        assert not thread.is_alive()
    assert taken == [count] * 8
