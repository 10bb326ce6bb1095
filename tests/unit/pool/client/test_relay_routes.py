"""Which connections of workers a client relays: those that members of a group ask for, between their listeners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import WireError
from onebox.pool.client.relay_routes import ATTEMPTS, RelayFlow, RelayRoutes
from onebox.pool.errors import WorkerLocation
from onebox.wire.protocol.responses import Listening, RelayRequest
from onebox.wire.relay_greeting import TOKEN_BYTES, Greeting, decode_greeting

MEMBERS = (4, 7, 2)
GROUP = 9


def place(worker: int) -> WorkerLocation:
    return WorkerLocation(worker=worker, host=f"host{worker}", device="cpu")


def listening(worker: int) -> Listening:
    return Listening(GROUP, 50000 + worker, bytes([worker]) * TOKEN_BYTES)


def take(routes: RelayRoutes, worker: int, message: Listening | RelayRequest) -> list[tuple[int, int]]:
    """Return the workers that are connected on a message."""
    found = routes.take(place(worker), f"10.0.0.{worker}", MEMBERS, message)
    return [(route.source.place.worker, route.target.place.worker) for route in found]


def test_a_request_is_served_once_both_ends_listen_and_not_again_and_again() -> None:
    routes = RelayRoutes()
    assert take(routes, 4, RelayRequest(GROUP, 2)) == []
    assert take(routes, 2, listening(2)) == []
    assert take(routes, 4, listening(4)) == [(4, 2)]
    for _ in range(ATTEMPTS - 1):
        assert take(routes, 4, RelayRequest(GROUP, 2)) == [(4, 2)]
    assert take(routes, 4, RelayRequest(GROUP, 2)) == []
    assert take(routes, 2, RelayRequest(GROUP, 0)) == [(2, 4)], "the other direction is another connection"


def test_addresses_are_those_that_the_client_knows_and_each_end_is_greeted_for_the_other() -> None:
    routes = RelayRoutes()
    routes.take(place(7), "10.0.0.7", MEMBERS, listening(7))
    routes.take(place(4), "10.0.0.4", MEMBERS, listening(4))
    (route,) = routes.take(place(7), "10.0.0.7", MEMBERS, RelayRequest(GROUP, 0))
    assert (route.source.address, route.source.port) == ("10.0.0.7", 50007)
    assert (route.target.address, route.target.port) == ("10.0.0.4", 50004)
    assert (route.source.greeting, route.target.greeting) == (Greeting(True, 0), Greeting(False, 1))


def test_workers_outside_of_a_group_get_nothing_there() -> None:
    routes = RelayRoutes()
    for worker in (4, 2):
        take(routes, worker, listening(worker))
    assert take(routes, 5, listening(5)) == []
    assert take(routes, 5, RelayRequest(GROUP, 0)) == []
    assert routes.take(place(4), "10.0.0.4", (), RelayRequest(GROUP, 2)) == [], "it was dissolved"
    assert routes.take(place(4), "10.0.0.4", MEMBERS, RelayRequest(GROUP + 1, 2)) == [], "nobody listens for that one"


@pytest.mark.parametrize("peer", [0, -1, 3, 1 << 31])
def test_a_peer_that_is_none_is_refused(peer: int) -> None:
    with pytest.raises(WireError, match="asks for a relay"):
        take(RelayRoutes(), 4, RelayRequest(GROUP, peer))


@pytest.mark.parametrize(("port", "token"), [(22, TOKEN_BYTES), (-1, TOKEN_BYTES), (65536, TOKEN_BYTES), (50000, 31)])
def test_a_listener_that_no_worker_can_have_is_refused(port: int, token: int) -> None:
    with pytest.raises(WireError, match="does not say once where it listens"):
        take(RelayRoutes(), 4, Listening(GROUP, port, b"t" * token))


def test_a_listener_does_not_become_another_one() -> None:
    routes = RelayRoutes()
    take(routes, 4, listening(4))
    with pytest.raises(WireError, match="does not say once"):
        take(routes, 4, listening(4))


def test_nothing_is_left_of_a_group_that_has_ended() -> None:
    routes = RelayRoutes()
    for worker in MEMBERS:
        take(routes, worker, listening(worker))
    take(routes, 4, RelayRequest(GROUP, 1))
    routes.forget(GROUP)
    assert routes == RelayRoutes()


def test_a_token_is_not_shown() -> None:
    assert "token" not in repr(listening(4))


@given(data=st.binary(max_size=100), token=st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
def test_no_bytes_but_those_of_the_token_are_a_greeting(data: bytes, token: bytes) -> None:
    greeting = Greeting(True, 5)
    genuine = greeting.encode(token)
    assert decode_greeting(token, genuine) == greeting
    assert data == genuine or decode_greeting(token, data) is None
    for place in range(len(genuine)):
        changed = genuine[:place] + bytes([genuine[place] ^ 1]) + genuine[place + 1 :]
        assert decode_greeting(token, changed) is None
    assert decode_greeting(bytes(TOKEN_BYTES), genuine) is None or token == bytes(TOKEN_BYTES)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(1, 7)), max_size=10))
def test_a_flow_hands_on_all_bytes_in_order_and_holds_one_chunk(chunks: list[tuple[bytes, int]]) -> None:
    flow, out = RelayFlow(), b""
    for data, part in chunks:
        assert flow.readable
        flow.read(data)
        while flow.waiting:
            assert not flow.readable and not flow.finished
            out += bytes(flow.waiting[:part])
            flow.written(min(part, len(flow.waiting)))
    flow.read(b"")
    assert flow.finished and not flow.readable
    assert out == b"".join(data for data, _ in chunks)
