"""Metrics: what Prometheus reads is what the agent has."""

from __future__ import annotations

import socket
import threading
import urllib.request
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from onebox.agent.journal import Journal
from onebox.agent.metrics import AgentMetrics, serve_metrics
from onebox.bounded_http import CONNECTIONS
from onebox.errors import UsageError
from onebox.wire.protocol.agents import Holder, Offer, Stock

STOCK = Stock(
    0,
    (
        Offer("cuda:0", "A GPU", 100, 8, 40, (Holder("ann", 1, 50, 1.0), Holder("bob", 2, 10, 2.0)), 0.5),
        Offer("cpu", 'CPU "big"\n', 64, 4, 64),
    ),
    ("cid", "dot"),
    1.25,
    60.0,
)


def told() -> Journal:
    book = Journal(None)
    for event in ("leased", "leased", "expired", "handshake-refused", "worker-ended", "lease-refused", "queued"):
        book.tell(event)
    return book


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.feature("Agents: Read metrics by Prometheus")
def test_values() -> None:
    book = told()
    with serve_metrics(lambda: STOCK, lambda: book.counts, port=0, lost=lambda: 3) as server:
        assert server.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            found = samples(answer.read().decode())
    gpu, cpu = ("cuda:0", "A GPU"), ("cpu", 'CPU "big"\n')
    assert found["onebox_agent_device_leases", *gpu] == 2
    assert found["onebox_agent_device_leases", *cpu] == 0
    assert found["onebox_agent_device_memory_bytes", *gpu] == 100
    assert found["onebox_agent_device_free_bytes", *gpu] == 40
    assert found["onebox_agent_device_load", *gpu] == 0.5
    assert ("onebox_agent_device_load", *cpu) not in found
    plain = {name[0].removeprefix("onebox_agent_"): value for name, value in found.items() if len(name) == 1}
    assert plain == {
        "queue_length": 2,
        "leases": 2,
        "load": 1.25,
        "uptime_seconds": 60,
        "leases_granted_total": 2,
        "leases_expired_total": 1,
        "leases_refused_total": 1,
        "handshakes_refused_total": 1,
        "worker_deaths_total": 1,
        "journal_lost_total": 3,
    }
    assert found["onebox_agent_events_total", "queued"] == 1
    assert found["onebox_agent_events_total", "leased"] == 2


def test_a_metric_has_one_name() -> None:
    names = [metric.name for metric in AgentMetrics(lambda: STOCK, lambda: {}).collect()]
    assert len(names) == len(set(names))


def test_to_register_asks_nothing() -> None:
    def stock() -> Stock:
        pytest.fail("asked")

    CollectorRegistry().register(AgentMetrics(stock, dict))


def test_only_metrics_are_there_and_the_port_is_free_afterwards() -> None:
    with serve_metrics(lambda: STOCK, dict, port=0) as server:
        port = int(urlsplit(server.url).port or 0)
        with pytest.raises(HTTPError, match="404") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=30)
        refused.value.close()
        with pytest.raises(UsageError, match="cannot be served"):
            serve_metrics(lambda: STOCK, dict, port=port)
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "onebox-metrics"]
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
        pass


def test_a_silent_reader_does_not_hold_up_the_end_or_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebox.agent.metrics._Handler.timeout", 0.2)
    with serve_metrics(lambda: STOCK, dict, port=0) as server:
        port = int(urlsplit(server.url).port or 0)
        silent = socket.create_connection(("127.0.0.1", port), 5)
        with silent, urllib.request.urlopen(server.url, timeout=20) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("address", "host", "status"),
    [
        ("127.0.0.1", "localhost:1", 200),
        ("127.0.0.1", "[::1]:9100", 200),
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "127.0.0.1.evil.example", 403),
        ("127.0.0.1", "192.0.2.1", 403),
        ("127.0.0.1", "", 403),
        ("0.0.0.0", "192.0.2.1:9100", 200),
        ("0.0.0.0", "[2001:db8::1]", 200),
        ("0.0.0.0", socket.gethostname(), 200),
        ("0.0.0.0", "evil.example:9100", 403),
    ],
)
def test_a_foreign_name_is_refused(address: str, host: str, status: int) -> None:
    with serve_metrics(lambda: STOCK, dict, port=0, address=address) as server:
        connection = HTTPConnection("127.0.0.1", int(urlsplit(server.url).port or 0), timeout=30)
        with closing(connection):
            connection.putrequest("GET", "/metrics", skip_host=True)
            connection.putheader("Host", host)
            connection.endheaders()
            assert connection.getresponse().status == status


def test_silent_clients_keep_nobody_out() -> None:
    with serve_metrics(lambda: STOCK, dict, port=0) as server, ExitStack() as opened:
        port = int(urlsplit(server.url).port or 0)
        for _ in range(CONNECTIONS + 6):
            slow = opened.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            with suppress(OSError):
                slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        with urllib.request.urlopen(server.url, timeout=20) as answer:
            assert answer.status == 200


def test_a_stock_that_fails_leaves_the_server_alive() -> None:
    states: list[Stock] = []
    with serve_metrics(lambda: states[0], dict, port=0) as server:
        port = int(urlsplit(server.url).port or 0)
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        with pytest.raises(ConnectionError):
            connection.getresponse()
        connection.close()
        states.append(STOCK)
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(("address", "port"), [("no.address", 0), ("192.0.2.1", 0), ("127.0.0.1", 70_000)])
def test_bad_addresses(address: str, port: int) -> None:
    with pytest.raises(UsageError, match="cannot be served"):
        serve_metrics(lambda: STOCK, dict, port=port, address=address)


def test_ipv6() -> None:
    try:
        server = serve_metrics(lambda: STOCK, dict, port=0, address="::1")
    except UsageError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server, urllib.request.urlopen(server.url, timeout=30) as answer:
        assert answer.status == 200 and "[::1]" in server.url
