"""Encrypted connections of a group some of whose ranks cannot connect to others, the ranks being threads: the client's
own relay connects them, and neither it nor strangers can be one of them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from onebox.pool.client.relay import Relay
from onebox.pool.client.relay_routes import RelayFlow, RelayRoute, RelayRoutes
from onebox.pool.errors import WorkerLocation
from onebox.wire.protocol.responses import Listening, RelayRequest
from onebox.wire.relay_greeting import REPLY_BYTES, TOKEN_BYTES, Greeting, greeting_reply
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.tcp import mesh
from onebox.worker.comm.tcp.mesh import GroupNetwork
from tests.unit.worker.comm.tcp.meshes import (
    HERE,
    WITHIN_S,
    Ends,
    Store,
    announced,
    closing,
    connect_mesh,
    reach,
    read,
    works,
)

NOBODY = "127.0.0.99"
"""An address at which nobody listens."""

Change = Callable[[RelayRoute], RelayRoute]


class Client:
    """The client of a group: serves what its ranks ask for.

    Args:
        size: Number of ranks.
        change: Changes a connection before it is made.
    """

    def __init__(self, size: int, change: Change | None = None) -> None:
        self.relay = Relay()
        self.routes = RelayRoutes()
        self.requests: list[tuple[int, int]] = []
        self.listeners: dict[int, Listening] = {}
        self._members = tuple(range(size))
        self._change = change or (lambda route: route)
        self._lock = threading.Lock()

    def take(self, rank: int, message: Listening | RelayRequest) -> None:
        """Process the message of a rank."""
        with self._lock:
            if isinstance(message, RelayRequest):
                self.requests.append((rank, message.peer))
            else:
                self.listeners[rank] = message
            place = WorkerLocation(worker=rank, host=f"host{rank}", device="cpu")
            for route in self.routes.take(place, HERE, self._members, message):
                self.relay.open(self._change(route))


class Of:
    """The client as one rank sees it."""

    def __init__(self, client: Client, rank: int) -> None:
        self._client = client
        self._rank = rank

    def listening(self, port: int, token: bytes) -> None:
        """Tell of the rank's listener."""
        self._client.take(self._rank, Listening(1, port, token))

    def request(self, peer: int) -> None:
        """Ask for a relay."""
        self._client.take(self._rank, RelayRequest(1, peer))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "DIRECT_S", 0.2)


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client(3)
    yield made
    made.relay.close()


def formed(
    ranks: ThreadPoolExecutor, client: Client, addresses: Sequence[str], networks: Sequence[GroupNetwork] | None = None
) -> list[dict[int, Ends]]:
    """Form a group of ranks that others are to find at some addresses."""
    store = Store()

    def one(rank: int) -> dict[int, Ends]:
        return connect_mesh(
            rank,
            len(addresses),
            HERE,
            store,
            advertised=addresses[rank],
            network=None if networks is None else networks[rank],
            relay=Of(client, rank),
        )

    return [each.result(WITHIN_S) for each in [ranks.submit(one, rank) for rank in range(len(addresses))]]


def test_the_client_relays_where_there_is_no_way_and_nowhere_else(
    ranks: ThreadPoolExecutor, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayed, take = bytearray(), RelayFlow.read

    def look(flow: RelayFlow, data: bytes) -> None:
        relayed.extend(data)
        take(flow, data)

    monkeypatch.setattr(RelayFlow, "read", look)
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
    for listening in client.listeners.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, listening.port), WITHIN_S)


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
        client = Client(2)
        with contextlib.closing(client.relay), closing(*formed(ranks, client, (HERE, address), networks)):
            assert len(client.requests) == requests
        assert networks[0].unreachable == ({NOBODY} if requests else set()) or address == HERE
    assert not networks[1].unreachable


def test_the_client_cannot_connect_a_worker_with_another_one_than_its_peer(ranks: ThreadPoolExecutor) -> None:
    """The client, or whoever has its place, is not trusted with the peer's identity."""

    def astray(route: RelayRoute) -> RelayRoute:
        third = client.listeners[1]
        return route._replace(target=route.target._replace(port=third.port, token=third.token))

    client = Client(3, astray)
    store, addresses = Store(), (HERE, HERE, NOBODY)

    def one(rank: int) -> dict[int, Ends]:
        address, of = addresses[rank], Of(client, rank)
        return connect_mesh(rank, 3, HERE, store, advertised=address, relay=of, connect_s=2.0)

    with contextlib.closing(client.relay):
        first, *others = [ranks.submit(one, rank) for rank in range(3)]
        with pytest.raises(RankLost, match=r"nor by way of the client: .* has the key of another rank than 2"):
            first.result(WITHIN_S)
        store.dissolved = True
        for other in others:
            with pytest.raises(RankLost):
                other.result(WITHIN_S)


def greeted(store: Store, rank: int, greeting: bytes) -> bytes:
    """Return what a rank replies to a greeting."""
    with reach(store, rank) as stranger:
        stranger.settimeout(WITHIN_S)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            stranger.sendall(greeting)
            while data := stranger.recv(REPLY_BYTES):
                found += data
        return found


def test_a_listener_lets_nobody_in_who_does_not_know_its_token_nor_for_a_rank_that_it_did_not_ask_for(
    ranks: ThreadPoolExecutor, client: Client
) -> None:
    store = Store()
    store.set("tcp/1", announced(HERE, 9))  # announced, and not there yet
    first = ranks.submit(connect_mesh, 0, 2, HERE, store, relay=Of(client, 0))
    while 0 not in client.listeners:
        time.sleep(0.01)
    token = client.listeners[0].token
    known = Greeting(True, 5).encode(token)
    assert greeted(store, 0, Greeting(True, 1).encode(bytes(TOKEN_BYTES))) == b""
    assert greeted(store, 0, known[:-1] + bytes([known[-1] ^ 1])) == b""
    assert greeted(store, 0, known) == greeting_reply(token, known), "and it is closed: there is no rank 5"
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
            assert client.listeners[0].port == ports[1] and client.listeners[1].port not in ports
            again = Client(2)  # while the connections of the first group have that port
            with contextlib.closing(again.relay), closing(*formed(ranks, again, (HERE, HERE), networks)):
                assert again.listeners[0].port == ports[1]
