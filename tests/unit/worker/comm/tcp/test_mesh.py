"""Encrypted connections of a group, the ranks being threads: strangers, other keys, and what is on the wire."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from onebox.errors import WireError
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.certificate import Certificate, new_certificate, public_key, sign
from onebox.worker.comm.tcp import mesh
from onebox.worker.comm.tcp.connection import TcpConnection
from tests.kit.waiting import until
from tests.unit.ranks import Keys
from tests.unit.worker.comm.tcp.meshes import (
    HERE,
    WITHIN_S,
    Ends,
    announced,
    call,
    closing,
    connect_mesh,
    reach,
    read,
    where,
    works,
)


@pytest.fixture
def store() -> Keys:
    return Keys()


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


class SlowStore(Keys):
    """The store of a rank that has announced itself, and goes on when it is let."""

    def __init__(self, store: Keys) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key when it is time."""
        assert self.go_on.wait(WITHIN_S)
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys when it is time."""
        assert self.go_on.wait(WITHIN_S)
        return self._store.multi_get(keys)


def test_signatures_are_those_of_the_standard() -> None:
    """RFC 8032, 7.1, test 2."""
    seed = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    assert public_key(seed).hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    expected = (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert sign(seed, b"\x72").hex() == expected


def test_a_certificate_does_not_show_its_secret() -> None:
    assert "PRIVATE" not in repr(new_certificate())


def test_all_ranks_reach_each_other_and_nothing_listens_afterwards(store: Keys, ranks: ThreadPoolExecutor) -> None:
    meshes = [each.result(WITHIN_S) for each in [ranks.submit(connect_mesh, rank, 4, HERE, store) for rank in range(4)]]
    for one in range(4):
        for other in range(one):
            assert works(meshes[one][other], meshes[other][one])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where(store, one), WITHIN_S)
    for made in meshes:
        for link in made.values():
            link.close()


def test_a_connection_that_is_made_as_the_mesh_is_closed_is_not_lost(
    store: Keys, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[tuple[TcpConnection, ...]] = []

    def joined(rank: int) -> mesh.Mesh:
        return mesh.Mesh(rank, 2, HERE, store, encrypted=True, came=lambda _, connections: came.append(connections))

    one, other = ranks.map(joined, range(2))
    settle, caller = TcpConnection.settle, threading.current_thread()

    def settled(self: TcpConnection) -> None:
        settle(self)
        if threading.current_thread() is caller:
            one.close()

    monkeypatch.setattr(TcpConnection, "settle", settled)
    (made,) = one.connect(1)
    until(lambda: came)
    other.close()
    with closing({1: Ends((made,), came[0])}):
        made.send(b"there")
        assert read(came[0][0], 5) == b"there"


def test_a_host_that_refuses_further_connections_has_one(
    store: Keys, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a firewall does that limits the connections of one address."""
    connect, made = socket.create_connection, dict[int, socket.socket]()

    def limited(where: tuple[str, int], *args: Any) -> socket.socket:
        if where[1] in made and made[where[1]].fileno() >= 0:
            raise ConnectionRefusedError("too many connections")
        made[where[1]] = connect(where, *args)
        return made[where[1]]

    monkeypatch.setattr(mesh, "round_trip_s", lambda raw: 0.3)
    monkeypatch.setattr(mesh.socket, "create_connection", limited)
    one, other = (each.result(WITHIN_S) for each in [ranks.submit(connect_mesh, n, 2, HERE, store) for n in range(2)])
    with closing(one, other):
        assert works(one[1], other[0])
        for link in (one[1], other[0]):
            assert len(link.outgoing) == len(link.incoming) == 1
            for found in (*link.outgoing, *link.incoming):
                assert found.raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "routers forget what is idle"


def test_idle_and_talking_strangers_are_closed_and_hold_up_nobody(
    store: Keys, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "HANDSHAKE_S", 1.0)
    slow = SlowStore(store)
    first, second = (ranks.submit(connect_mesh, rank, 2, HERE, each) for rank, each in enumerate((store, slow)))
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(reach(store, 0)) for _ in range(100)]
        for stranger in strangers[::2]:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(os.urandom(1000))
        slow.go_on.set()
        one, other = first.result(WITHIN_S)[1], second.result(WITHIN_S)[0]
        with contextlib.closing(one), contextlib.closing(other):
            assert works(one, other)
            for stranger in strangers:
                stranger.settimeout(WITHIN_S)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1 << 16):
                        pass


def test_strangers_are_closed_while_the_group_waits(
    store: Keys, ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(mesh, "_PENDING", 4)
    store.set("tcp/1", announced(HERE, 9))  # announced, and not there yet
    first = ranks.submit(connect_mesh, 0, 2, HERE, store)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(reach(store, 0)) for _ in range(8)]
        for stranger in strangers:
            stranger.settimeout(WITHIN_S)
            assert stranger.recv(1) == b""
        store.dissolved = True
        with pytest.raises(RankLost, match="has left the group"):
            first.result(WITHIN_S)


def test_a_stranger_who_resets_the_connection_at_once_harms_nobody(store: Keys, ranks: ThreadPoolExecutor) -> None:
    slow = SlowStore(store)
    first, second = (ranks.submit(connect_mesh, rank, 2, HERE, each) for rank, each in enumerate((store, slow)))
    for _ in range(50):
        stranger = reach(store, 0)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.close()
    slow.go_on.set()
    for found in (first, second):
        for link in found.result(WITHIN_S).values():
            link.close()


def client(certificate: Certificate | None) -> ssl.SSLContext:
    """Return the settings of a stranger who trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate is not None:
        file = os.memfd_create("key")
        os.write(file, certificate.secret_pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
        os.close(file)
    return context


@pytest.mark.parametrize("key", [True, False], ids=["another key", "no key"])
def test_who_has_no_key_of_the_group_is_refused(store: Keys, ranks: ThreadPoolExecutor, key: bool) -> None:
    expected = new_certificate()
    store.set("tcp/1", announced(HERE, 9, expected))
    first = ranks.submit(connect_mesh, 0, 2, HERE, store)
    for certificate, accepted in ((new_certificate() if key else None, False), (expected, True)):
        with (
            reach(store, 0) as raw,
            client(certificate).wrap_socket(raw, server_hostname=HERE) as connection,
        ):
            if accepted:
                connection.sendall(call(store, 0, 1))
                assert len(connection.recv(32)) == 32
            else:
                with pytest.raises(OSError):
                    connection.recv(1)
                    connection.sendall(b"x")  # the end of a connection may look like that of what is read
                    raise ConnectionError
    store.dissolved = True
    with pytest.raises(RankLost):
        first.result(WITHIN_S)


def test_a_listener_with_another_key_than_announced_gets_nothing(store: Keys, ranks: ThreadPoolExecutor) -> None:
    """Somebody on the way who answers in the place of a rank."""
    impostor = new_certificate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    file = os.memfd_create("key")
    os.write(file, impostor.secret_pem)
    context.load_cert_chain(f"/proc/self/fd/{file}")
    os.close(file)
    received: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as raw, context.wrap_socket(raw, True) as connection:
            received.append(connection.recv(100))

    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(WITHIN_S)
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        store.set("tcp/1", announced(HERE, listener.getsockname()[1]))
        with pytest.raises(RankLost, match="does not have the key of rank 1"):
            connect_mesh(0, 2, HERE, store)
        thread.join(WITHIN_S)
    assert not any(received)


def test_the_members_of_a_group_cannot_stand_for_each_other(store: Keys, ranks: ThreadPoolExecutor) -> None:
    """The address of rank 1 leads to rank 2."""
    genuine = Keys()
    meshes = [ranks.submit(connect_mesh, rank, 3, HERE, genuine) for rank in (1, 2)]
    host, port = where(genuine, 2)
    store.set("tcp/1", " ".join([host, str(port), *genuine.get("tcp/1").decode().split(" ")[2:]]))
    store.set("tcp/2", genuine.get("tcp/2").decode())
    listening = threading.Event()

    def hand_over() -> None:
        genuine.set("tcp/0", store.get("tcp/0").decode())
        listening.set()

    ranks.submit(hand_over)
    with pytest.raises(RankLost, match="has the key of another rank than 1"):
        connect_mesh(0, 3, HERE, store)
    genuine.dissolved = True
    with pytest.raises(RankLost):
        meshes[0].result(WITHIN_S)
    with contextlib.suppress(RankLost):  # rank 2 may be connected by then: its peers are genuine
        for link in meshes[1].result(WITHIN_S).values():
            link.close()


def test_a_rank_that_cannot_be_reached_is_named_with_its_address_and_port(
    store: Keys, ranks: ThreadPoolExecutor
) -> None:
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    store.set("tcp/1", announced(HERE, port))
    with pytest.raises(RankLost, match=rf"rank 1 .* cannot be reached at 127.0.0.1, port {port}: .*firewall"):
        connect_mesh(0, 2, HERE, store, connect_s=0.2)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "127.0.0.1 80",
        *(f"{place} {'00' * 32} 00" for place in ("lab1 80", "0.0.0.0 80", "127.0.0.1 0", "127.0.0.1 70000")),
        f"::1 1 {'00' * 32} 0g",
        "::1 1 00 00",
        f"::1 1 {'00' * 32} ",
    ],
)
def test_what_a_rank_says_of_itself_is_checked(store: Keys, value: str) -> None:
    store.set("tcp/1", value)
    with pytest.raises(WireError, match="does not say where it listens"):
        connect_mesh(0, 2, HERE, store)


def test_one_key_is_not_that_of_two_ranks(store: Keys) -> None:
    taken = announced(HERE, 9)
    store.set("tcp/1", taken)
    store.set("tcp/2", taken)
    with pytest.raises(WireError, match="the same certificate"):
        connect_mesh(0, 3, HERE, store)


def test_what_is_on_the_wire_is_not_what_is_sent_and_a_change_is_noticed(
    store: Keys, ranks: ThreadPoolExecutor
) -> None:
    """A relay in the place of rank 0's listener sees, and may change, all that goes to it."""
    pattern, seen = b"a tensor's bytes" * 64, bytearray()
    changing = threading.Event()

    def look(data: bytearray) -> None:
        seen.extend(data)
        data[-1] ^= changing.is_set()

    genuine = Keys()
    first = ranks.submit(connect_mesh, 0, 2, HERE, genuine)
    rest = genuine.get("tcp/0").decode().split(" ")[2:]
    with socket.create_server((HERE, 0)) as listener:
        store.set("tcp/0", " ".join([HERE, str(listener.getsockname()[1]), *rest]))

        def relay() -> None:
            with listener.accept()[0] as near, reach(genuine, 0) as far:
                back = threading.Thread(target=carry, args=(far, near, look))
                back.start()
                carry(near, far, look)
                back.join()

        relaying = ranks.submit(relay)
        second = ranks.submit(connect_mesh, 1, 2, HERE, store)
        genuine.set("tcp/1", store.get("tcp/1").decode())
        one, other = first.result(WITHIN_S)[1], second.result(WITHIN_S)[0]
        other.outgoing[0].send(pattern)
        found = read(one.incoming[0], len(pattern))
        changing.set()
        other.outgoing[0].send(pattern)
        with pytest.raises(ssl.SSLError):
            read(one.incoming[0], len(pattern))
        one.close()
        other.close()
        relaying.result(WITHIN_S)
    assert found == pattern and len(seen) > len(pattern) and pattern[:16] not in seen


def carry(source: socket.socket, target: socket.socket, look: Callable[[bytearray], object]) -> None:
    """Carry bytes until their end."""
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(1 << 16)):
            look(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
