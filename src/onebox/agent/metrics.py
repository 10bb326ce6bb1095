"""The agent's metrics, in the text format of Prometheus, over HTTP on this machine's own address.

They are computed for each request, from the agent's state and its journal's counts. No label contains text from a
client, so the number of series is bounded by devices and events.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from socket import AF_INET, AF_INET6
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from onebox.bounded_http import LOOPBACK, REQUEST_S, BoundedServer, names_host
from onebox.errors import UsageError
from onebox.extras import import_extra
from onebox.wire.protocol.agents import Offer, Stock

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

METRICS_ADDRESS = "127.0.0.1"
"""Default address of the metrics: they are neither encrypted nor authenticated."""

_COUNTERS = {
    "leased": ("onebox_agent_leases_granted", "Leases granted."),
    "expired": (
        "onebox_agent_leases_expired",
        "Leases that ended because the client was gone for longer than its grace time.",
    ),
    "lease-refused": ("onebox_agent_leases_refused", "Requests for leases that were refused."),
    "handshake-refused": ("onebox_agent_handshakes_refused", "Connections of unknown keys."),
    "worker-ended": ("onebox_agent_worker_deaths", "Workers that ended by themselves."),
}
"""Counters of single events, beside that of all events."""

_CLOSE_S = 2.0
_TICK_S = 0.1


class AgentMetrics:
    """Prometheus collector of an agent's metrics.

    Args:
        stock: Returns the current offers and their holders; called from the thread that serves metrics.
        counts: Returns the number of occurrences of each event, from a journal.
        lost: Returns the number of journal lines that could not be written.
    """

    def __init__(
        self,
        stock: Callable[[], Stock],
        counts: Callable[[], Mapping[str, int]],
        lost: Callable[[], int] = lambda: 0,
    ) -> None:
        self._stock = stock
        self._counts = counts
        self._lost = lost

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics: registration must not query the agent."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        core = _prometheus("core")
        gauge, counter = core.GaugeMetricFamily, core.CounterMetricFamily
        stock = self._stock()
        yield from _of_devices(stock.offers)
        yield gauge("onebox_agent_queue_length", "Requests that wait for devices.", len(stock.queue))
        yield gauge("onebox_agent_leases", "Leases that are held.", _leases(stock.offers))
        yield gauge("onebox_agent_load", "Load average of a minute, divided by the number of cores.", stock.load)
        yield gauge("onebox_agent_uptime_seconds", "Seconds since the agent started.", stock.uptime_s)
        counts = self._counts()
        for event, (name, text) in _COUNTERS.items():
            yield counter(name, text, counts.get(event, 0))
        events = counter("onebox_agent_events", "Lines of the journal, with the label event.", labels=["event"])
        for event, count in sorted(counts.items()):
            events.add_metric([event], count)
        yield events
        yield counter("onebox_agent_journal_lost", "Lines of the journal that could not be written.", self._lost())


class MetricsServer:
    """Metrics over HTTP, in threads that :meth:`close` ends; made by :func:`serve_metrics`."""

    def __init__(self, server: BoundedServer) -> None:
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, args=(_TICK_S,), name="onebox-metrics", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else host
        return f"http://{shown!s}:{port}/metrics"

    def close(self) -> None:
        """End the threads and free the port. Idempotent."""
        self._server.shutdown()
        self._thread.join(_CLOSE_S)
        self._server.end_connections(_CLOSE_S)
        self._server.server_close()


def serve_metrics(
    stock: Callable[[], Stock],
    counts: Callable[[], Mapping[str, int]],
    *,
    port: int,
    address: str = METRICS_ADDRESS,
    lost: Callable[[], int] = lambda: 0,
) -> MetricsServer:
    """Serve an agent's metrics at ``http://ADDRESS:PORT/metrics`` until the result is closed.

    Args:
        stock: Returns the agent's offers; called from the server's threads, one at a time.
        counts: Returns the number of occurrences of each event.
        port: The port; 0 for any free one.
        address: An IP address of this machine. Everybody who can reach it can read the metrics.
        lost: Returns the number of journal lines that could not be written.

    Raises:
        UsageError: The address is invalid, or the port is taken.
        MissingExtra: The Prometheus client is not installed.
    """
    registry = _prometheus("registry").CollectorRegistry(auto_describe=False)
    registry.register(AgentMetrics(stock, counts, lost))
    try:
        family = AF_INET6 if ip_address(address).version == 6 else AF_INET
        local = ip_address(address).is_loopback
        names = LOOPBACK | ({address} if local else _names_of_this_machine())
        kind = type(
            "_Server", (_Server,), {"address_family": family, "registry": registry, "names": names, "local": local}
        )
        server = kind((address, port), _Handler)
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"metrics cannot be served at {address}, port {port}: {error}; name an IP address of this machine, such as "
            f"{METRICS_ADDRESS}, and a free port"
        ) from None
    return MetricsServer(server)


def _names_of_this_machine() -> frozenset[str]:
    """Return the names by which others may ask this machine, beside its addresses: its own, without a question to a
    server of names."""
    own = socket.gethostname().lower()
    return frozenset({own, own.partition(".")[0]})


class _Server(BoundedServer):
    registry: CollectorRegistry
    names: frozenset[str]
    local: bool

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.computing = threading.Lock()
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        """Answer with the current metrics."""
        if not names_host(self.headers.get("Host", ""), self.server.names, addresses=not self.server.local):
            self.send_error(403, f"Ask by an IP address, or as {', '.join(sorted(self.server.names))}")
            return
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "Only /metrics is here")
            return
        exposition = _prometheus("exposition")
        self.server.accept(self.connection)
        with self.server.computing:
            text = exposition.generate_latest(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", exposition.CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the journal is for the agent's events."""


def _prometheus(module: str) -> ModuleType:
    return import_extra(f"prometheus_client.{module}", "Serving metrics (--metrics-port)")


def _of_devices(offers: tuple[Offer, ...]) -> Iterator[Metric]:
    labels = ["device", "name"]
    gauge = _prometheus("core").GaugeMetricFamily
    offered = gauge("onebox_agent_device_offered", "1 for each device that is offered.", labels=labels)
    leases = gauge("onebox_agent_device_leases", "Leases that have a part of the device.", labels=labels)
    memory = gauge("onebox_agent_device_memory_bytes", "Memory that is offered.", labels=labels)
    free = gauge("onebox_agent_device_free_bytes", "Memory that is not leased.", labels=labels)
    load = gauge("onebox_agent_device_load", "Share of the time in which the device was busy, if known.", labels=labels)
    for offer in offers:
        names = [offer.device, offer.name]
        offered.add_metric(names, 1)
        leases.add_metric(names, len({holder.lease for holder in offer.holders}))
        memory.add_metric(names, offer.memory_bytes)
        free.add_metric(names, offer.free_bytes)
        if offer.load >= 0:
            load.add_metric(names, offer.load)
    yield from (offered, leases, memory, free, load)


def _leases(offers: tuple[Offer, ...]) -> int:
    return len({holder.lease for offer in offers for holder in offer.holders})
