"""The connections of a group are those that came with it; they can be shut down from another thread."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from onebox.worker.system import tcp_connections as module
from onebox.worker.system.tcp_connections import GroupSockets, listeners, own_connections, shut_down
from tests.kit import leaks

WITHIN_S = 30.0


@contextlib.contextmanager
def connected(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect to a listener; both ends."""
    with socket.create_connection(listener.getsockname(), WITHIN_S) as one:
        other, _ = listener.accept()
        with other:
            other.settimeout(WITHIN_S)
            yield one, other


def works(one: socket.socket, other: socket.socket) -> bool:
    """Tell whether something that is sent arrives."""
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError:
        return False


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(WITHIN_S)
        yield made


def test_connections_of_one_group_end_and_all_others_stay(listener: socket.socket) -> None:
    sockets = GroupSockets()
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(connected(listener))
        client = stack.enter_context(socket.create_connection(listener.getsockname(), WITHIN_S))
        with sockets.making(1):
            own = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            first = stack.enter_context(connected(own))
            let_in = stack.enter_context(listener.accept()[0])  # somebody connects anew to a port that was there before
        with sockets.making(2):
            other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            second = stack.enter_context(connected(other))
        heard: list[bytes] = []
        waiting = threading.Thread(target=lambda: heard.append(first[1].recv(1)))
        waiting.start()
        assert sockets.shut(1) == 2
        waiting.join(WITHIN_S)
        assert heard == [b""]
        assert [works(*pair) for pair in (before, first, second)] == [True, False, True]
        assert works(client, let_in)
        with connected(own):
            pass  # who listens still does
        sockets.forget(2)
        assert sockets.shut(2) == 0 and works(*second)


def test_a_group_that_is_being_formed_can_be_shut(listener: socket.socket) -> None:
    sockets = GroupSockets()
    with sockets.making(1), socket.create_server(("127.0.0.1", 0)) as own, connected(own) as pair:
        assert sockets.shut(2) == 0
        assert sockets.shut(1) == 2
        assert not works(*pair)
    assert sockets.shut(1) == 0, "what was closed is not taken for what came in its place"


def test_a_descriptor_that_has_become_a_file_leaves_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may close a socket, and open a file, after the list of sockets was read."""
    with leaks.nothing_left():
        file = os.memfd_create("onebox-test")
        monkeypatch.setattr(module, "_open", lambda: {"socket:[1]": file})
        assert own_connections() == {} and listeners("127.0.0.1") == {} and not shut_down("socket:[1]")
        with GroupSockets().making(1):
            pass
        os.close(file)
