"""Encrypted connections of a group some of whose ranks cannot connect to others, the ranks being threads: the client's
own relay connects them, and neither it nor strangers can be one of them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from onebox.pool.client.relay import Relay, RelayEnd
from onebox.pool.errors import WorkerLocation
from onebox.wire.group_listener import (
    PROOF_BYTES,
    SECRET_BYTES,
    Greeting,
    decode_listener,
    greeting_reply,
    listener_key,
)
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.tcp import mesh
from onebox.worker.comm.tcp.mesh import GroupNetwork
from tests.unit.ranks import Keys
from tests.unit.worker.comm.tcp.meshes import (
    HERE,
    WITHIN_S,
    Ends,
    announced,
    closing,
    connect_mesh,
    reach,
    read,
    works,
)

NOBODY = "127.0.0.99"
"""An address at which nobody listens."""


class Client:
    """The client of a group: relays what its ranks ask for.

    Args:
        store: What the ranks say of themselves.
        other: Another rank to which those are connected that ask for the last one.
    """

    def __init__(self, store: Keys, other: int | None = None) -> None:
        self.relay = Relay()
        self.requests: list[tuple[int, int]] = []
        self.store = store
        self._other = other
        self._lock = threading.Lock()

    def of(self, rank: int) -> Callable[[int], None]:
        """Return how a rank asks for a relay."""
        return lambda peer: self._take(rank, peer)

    def _take(self, rank: int, peer: int) -> None:
        with self._lock:
            self.requests.append((rank, peer))
            target = self._end(peer)
            if self._other is not None:
                target = target._replace(listener=self._end(self._other).listener)
            self.relay.open(1, self._end(rank), target)

    def _end(self, rank: int) -> RelayEnd:
        place = WorkerLocation(worker=rank, host=f"host{rank}", device="cpu")
        said = self.store.get(listener_key(rank))
        return RelayEnd(place, rank, HERE, decode_listener(rank, said, encrypted=True))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "DIRECT_S", 0.2)


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(Keys())
    yield made
    made.relay.close()


def port(store: Keys, rank: int) -> int:
    """Return the port at which a rank says that it listens."""
    return decode_listener(rank, store.get(listener_key(rank)), encrypted=True).port


def formed(
    ranks: ThreadPoolExecutor,
    client: Client,
    addresses: Sequence[str],
    networks: Sequence[GroupNetwork] | None = None,
) -> list[dict[int, Ends]]:
    """Form a group of ranks that others are to find at some addresses."""

    def one(rank: int) -> dict[int, Ends]:
        return connect_mesh(
            rank,
            len(addresses),
            HERE,
            client.store,
            advertised=addresses[rank],
            network=None if networks is None else networks[rank],
            relay=client.of(rank),
        )

    return [each.result(WITHIN_S) for each in [ranks.submit(one, rank) for rank in range(len(addresses))]]


def test_the_client_relays_where_there_is_no_way_and_nowhere_else(
    ranks: ThreadPoolExecutor, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayed, receive = bytearray(), socket.socket.recv_into

    def look(connection: socket.socket, target: memoryview) -> int:
        count = receive(connection, target)
        if threading.current_thread().name == "onebox-relay":
            relayed.extend(target[:count])
        return count

    monkeypatch.setattr(socket.socket, "recv_into", look)
    meshes = formed(ranks, client, (HERE, HERE, NOBODY))
    with closing(*meshes):
        for one in range(3):
            for other in range(one):
                assert works(meshes[one][other], meshes[other][one])
        assert sorted(client.requests) == [(0, 2), (1, 2)]
        pattern = b"a tensor's bytes" * 64
        meshes[0][2].outgoing[0].send(pattern)
        found = read(meshes[2][0].incoming[0], len(pattern))
        assert found == pattern and len(relayed) > len(pattern) and pattern[:16] not in relayed
    for rank in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port(client.store, rank)), WITHIN_S)


def test_workers_of_one_host_behind_a_router_need_no_relay_to_each_other(
    ranks: ThreadPoolExecutor, client: Client
) -> None:
    with closing(*formed(ranks, client, (NOBODY, NOBODY, HERE))):
        assert sorted(client.requests) == [(2, 0), (2, 1)]


def test_a_host_without_a_way_is_known_to_later_groups_until_there_is_one(
    ranks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "KNOWN_S", 0.01)
    networks = [GroupNetwork(), GroupNetwork()]
    for direct_s, address, requests in ((0.2, NOBODY, 1), (1000.0, NOBODY, 1), (0.2, HERE, 0)):
        monkeypatch.setattr(mesh, "DIRECT_S", direct_s)
        client = Client(Keys())
        with contextlib.closing(client.relay), closing(*formed(ranks, client, (HERE, address), networks)):
            assert len(client.requests) == requests
        assert networks[0].unreachable == ({NOBODY} if requests else set()) or address == HERE
    assert not networks[1].unreachable


def test_the_client_cannot_connect_a_worker_with_another_one_than_its_peer(ranks: ThreadPoolExecutor) -> None:
    """The client, or whoever has its place, is not trusted with the peer's identity."""

    store, addresses = Keys(), (HERE, HERE, NOBODY)
    client = Client(store, other=1)

    def one(rank: int) -> dict[int, Ends]:
        return connect_mesh(rank, 3, HERE, store, advertised=addresses[rank], relay=client.of(rank), connect_s=2.0)

    with contextlib.closing(client.relay):
        first, *others = [ranks.submit(one, rank) for rank in range(3)]
        with pytest.raises(RankLost, match=r"nor by way of the client: .* has the key of another rank than 2"):
            first.result(WITHIN_S)
        store.dissolved = True
        for other in others:
            with pytest.raises(RankLost):
                other.result(WITHIN_S)


def greeted(store: Keys, rank: int, greeting: bytes) -> bytes:
    """Return what a rank replies to a greeting."""
    with reach(store, rank) as stranger:
        stranger.settimeout(WITHIN_S)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            stranger.sendall(greeting)
            while data := stranger.recv(PROOF_BYTES):
                found += data
        return found


def test_a_listener_lets_nobody_in_who_does_not_know_its_secret_nor_for_a_rank_that_it_did_not_ask_for(
    ranks: ThreadPoolExecutor, client: Client
) -> None:
    store = client.store
    store.set("tcp/1", announced(HERE, 9))  # announced, and not there yet
    first = ranks.submit(connect_mesh, 0, 2, HERE, store, relay=client.of(0))
    secret = decode_listener(0, store.get(listener_key(0)), encrypted=True).secret
    known = Greeting(True, 5).encode(secret)
    assert greeted(store, 0, Greeting(True, 1).encode(bytes(SECRET_BYTES))) == b""
    assert greeted(store, 0, known[:-1] + bytes([known[-1] ^ 1])) == b""
    assert greeted(store, 0, known) == greeting_reply(secret, known), "and it is closed: there is no rank 5"
    assert greeted(store, 0, b"1bo\r\n".ljust(1000)) == b""
    store.dissolved = True
    with pytest.raises(RankLost):
        first.result(WITHIN_S)


def test_listeners_take_the_first_free_one_of_the_ports_and_any_if_none_is_free(
    ranks: ThreadPoolExecutor, client: Client
) -> None:
    with socket.create_server((HERE, 0)) as busy, socket.socket() as free:
        free.bind((HERE, 0))
        ports = (busy.getsockname()[1], free.getsockname()[1])
        free.close()
        networks = [GroupNetwork(ports=ports), GroupNetwork(ports=ports[:1])]
        with closing(*formed(ranks, client, (HERE, HERE), networks)):
            assert port(client.store, 0) == ports[1] and port(client.store, 1) not in ports
            again = Client(Keys())  # while the connections of the first group have that port
            with contextlib.closing(again.relay), closing(*formed(ranks, again, (HERE, HERE), networks)):
                assert port(again.store, 0) == ports[1]
