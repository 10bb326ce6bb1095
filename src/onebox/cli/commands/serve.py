"""``onebox serve``: the agent of this machine, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from types import TracebackType

from onebox.agent import Agent, ClientLimits, Offered, check_clients, offered_devices
from onebox.agent.cgroups import LeaseCgroups
from onebox.agent.journal import Journal
from onebox.agent.lease_processes import LeaseIsolation
from onebox.agent.metrics import serve_metrics
from onebox.cli.options.agents import ServeConfig
from onebox.errors import UsageError
from onebox.extras import import_extra
from onebox.pool.keys.keyring import AllowedClients, fingerprint, identity
from onebox.pool.launch.worker_user import lease_users
from onebox.sizes import size_text

_ELSEWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849): their route begins like that to other public addresses."""


def serve(config: ServeConfig) -> None:
    """Offer this machine's devices until a signal ends the agent.

    Raises:
        UsageError: A device does not exist, an address does not belong to this machine, no client could connect, or
            workers cannot run as users of their own.
        MissingExtra: Metrics are to be served without the Prometheus client.
    """
    if config.metrics_port is not None:
        import_extra("prometheus_client", "--metrics-port")  # before anything is offered
    clients = AllowedClients()
    faults = UsageFaults()  # all of them are told at once, rather than one a run
    with faults:
        users = lease_users(config.user, config.user_id_range, allow_root=config.allow_root)
    with faults:
        advertise = config.advertise or _advertised(config.bind)
    with faults:
        check_clients(config.bind, has_clients=len(clients) > 0)
    with faults:
        offers = offered_devices(config.devices, threads=config.cores, memory_bytes=config.memory_bytes)
    faults.require_none()
    keys = identity("agent")
    with Journal(config.journal, sys.stdout) as journal, contextlib.ExitStack() as stack:
        isolation = LeaseIsolation(users, LeaseCgroups(), import_per_client=config.import_per_client)
        stack.callback(isolation.close)
        agent = Agent(
            keys=keys,
            name_of=_names(clients, journal),
            bind=config.bind,
            port=config.port,
            advertise=advertise,
            offers=offers,
            limits=_limits(config),
            tell=journal.tell,
            has_clients=len(clients) > 0,
            read_log=journal.last,
            isolation=isolation,
            worker_ports=config.port_range,
        )
        stack.callback(agent.close)
        stack.enter_context(_ended_by_signals(agent.stop))
        if config.metrics_port is not None:
            address, port = config.metrics_address, config.metrics_port
            metrics = serve_metrics(
                agent.stock, lambda: journal.counts, port=port, address=address, lost=lambda: journal.lost
            )
            stack.enter_context(metrics)
            _say(f"metrics at {metrics.url}")
        if config.page:
            stack.enter_context(_page(agent, journal, config.page_port))
        _say(f"agent at {agent.endpoint.removeprefix('tcp://')}, fingerprint {fingerprint(keys.public)}")
        if users is None and os.geteuid() == 0:
            _say("workers run as root: a hole in a library would be one in this machine; leave --allow-root out")
        _say(f"offers {_listing(offers)} to {_people(len(clients))}; Ctrl-C ends it and its workers")
        agent.run()


def _page(agent: Agent, journal: Journal, port: int) -> contextlib.AbstractContextManager[object]:
    """Serve the page of this host, and print its address.

    Raises:
        UsageError: The port is taken.
    """
    from onebox.report import HostState
    from onebox.report.page import serve_page
    from onebox.report.page.host_offers import JOURNAL_LINES, HostOffers

    address, host = agent.endpoint.removeprefix("tcp://"), socket.gethostname()
    page = serve_page(
        HostOffers(
            lambda: [HostState(address=address, host=host, stock=agent.stock())],
            lambda: journal.last(JOURNAL_LINES),
            here=True,
        ),
        port=port,
    )
    _say(f"page at {page.url}")
    return page


class UsageFaults:
    """A context manager, to be entered repeatedly, that collects usage errors."""

    def __init__(self) -> None:
        self._found: list[UsageError] = []

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, UsageError):
            self._found.append(error)
            return True
        return False

    def require_none(self) -> None:
        """Raise all errors as one.

        Raises:
            UsageError: There was one.
        """
        if self._found:
            marks = [f"({number}) " if len(self._found) > 1 else "" for number in range(1, 1 + len(self._found))]
            raise UsageError("\n".join(f"{mark}{error}" for mark, error in zip(marks, self._found, strict=True)))


def _names(clients: AllowedClients, journal: Journal) -> Callable[[str], str | None]:
    """Return a function that finds a client's name; an invalid file of clients is reported once."""
    told: str | None = None

    def name_of(key: str) -> str | None:
        nonlocal told
        name = clients.name(key)
        if clients.problem != told:
            told = clients.problem
            journal.tell("clients-unreadable" if told else "clients-readable", reason=told)
        return name

    return name_of


def _limits(config: ServeConfig) -> ClientLimits:
    return ClientLimits(
        devices=config.max_devices_per_client,
        memory_bytes=config.client_memory_bytes,
        threads=config.max_cores_per_client,
        lease_s=config.max_lease or 0.0,
    )


@contextlib.contextmanager
def _ended_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """End the agent in order on Ctrl-C, SIGTERM, and the end of the terminal, however often they come."""
    if threading.current_thread() is not threading.main_thread():  # which has no handlers, and is ended otherwise
        yield
        return
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signals.append(signal.SIGHUP)
    before = [signal.signal(number, lambda *_: stop()) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _advertised(bind: str) -> str:
    """Return the address at which others reach this machine: the listening one, or that of its default route.

    Raises:
        UsageError: It listens on all addresses, and has no default route.
    """
    address = ip_address(bind)
    if not address.is_unspecified:
        return bind
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[address.version], 9))  # of a datagram socket: nothing is sent
        except OSError:
            raise UsageError(
                f"--bind {bind}: this machine has no way to others, which would tell the address that they reach it "
                "by; name it with --advertise"
            ) from None
        return str(probe.getsockname()[0])


def _listing(offers: list[Offered]) -> str:
    return ", ".join(f"{offer.device} ({size_text(offer.memory_bytes)}, {offer.threads} cores)" for offer in offers)


def _people(count: int) -> str:
    if count == 0:
        return "nobody yet: pair a client with onebox pair accept"
    return f"{count} paired client{'s' if count > 1 else ''}"


def _say(text: str) -> None:
    """Print a message to standard error; standard output is for the journal's lines."""
    with contextlib.suppress(OSError):
        print(f"onebox: {text}", file=sys.stderr, flush=True)
