"""Where an agent listens, and on what terms."""

from __future__ import annotations

import socket as sockets
from typing import Any

import pytest

from onebox.agent import Agent, ClientLimits, Offered
from onebox.agent.server import check_address
from onebox.errors import UsageError
from onebox.reaping import LEFT_BEHIND
from onebox.wire import new_keys


def agent(**changes: Any) -> Agent:
    offers = [Offered(device="cpu", name="a CPU", memory_bytes=1, threads=1)]
    settings = {
        "keys": new_keys(),
        "name_of": lambda key: None,
        "bind": "127.0.0.1",
        "port": 0,
        "limits": ClientLimits(),
    }
    settings |= {"advertise": "127.0.0.1", "offers": offers, "tell": lambda event, **fields: None}
    return Agent(**(settings | changes))


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "192.0.2.7"])
def test_others_can_reach_an_agent_only_if_it_knows_somebody(bind: str) -> None:
    with pytest.raises(UsageError, match="nobody is paired with this agent"):
        check_address(bind, 7171, "192.0.2.7", False)
    check_address(bind, 7171, "192.0.2.7", True)
    with pytest.raises(UsageError, match="nobody is paired"):
        agent(bind=bind)


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.3.4.5", "::1"])
def test_on_this_machine_it_need_not(bind: str) -> None:
    check_address(bind, 0, "localhost", False)


@pytest.mark.parametrize(
    ("bind", "port", "advertise", "what"),
    [
        ("localhost", 1, "x", "'localhost' is no IP address"),
        ("", 1, "x", "is no IP address"),
        ("127.0.0.1", 65536, "x", "port 65536"),
        ("127.0.0.1", -1, "x", "port -1"),
        ("127.0.0.1", 1, "", "'' is no address"),
        ("127.0.0.1", 1, "0.0.0.0", "'0.0.0.0' is no address that clients could connect to"),
        ("127.0.0.1", 1, "a b", "'a b' is no address"),
        ("127.0.0.1", 1, "[::1]", "is no address"),
        ("127.0.0.1", 1, "x\n", "is no address"),
    ],
)
def test_addresses_that_are_none_are_refused(bind: str, port: int, advertise: str, what: str) -> None:
    with pytest.raises(UsageError, match=what.replace("[", "\\[")):
        check_address(bind, port, advertise, True)


def test_a_port_that_is_taken_is_said() -> None:
    with sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1, port {port}: Address already in use"):
            agent(port=port)


def test_an_agent_that_never_ran_can_be_closed_and_stopped() -> None:
    LEFT_BEHIND.news()  # of this process, such as by other tests
    events: list[str] = []
    made = agent(tell=lambda event, **fields: events.append(event))
    assert made.endpoint.startswith("tcp://127.0.0.1:")
    assert made.stock().offers[0].device == "cpu"
    made.close()
    made.close()
    made.stop()
    assert events == ["stopped"]


def test_an_address_of_another_machine_is_named_as_such() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.7 is no address of this machine.*--bind.*--advertise"):
        agent(bind="192.0.2.7", has_clients=True)
