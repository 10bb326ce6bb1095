"""Workers that agents start on their hosts: one lease a host, and all leases of a pool or none."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from onebox.errors import PoolError, UsageError
from onebox.pool.backends.agents.agent_connection import AgentConnection, Busy
from onebox.pool.backends.agents.keep_alive import CUT_S
from onebox.pool.backends.agents.remote_worker import RemoteWorker
from onebox.pool.backends.base import SpareRequest, WorkerHandle
from onebox.pool.errors import wait_in_slices
from onebox.pool.keys.keyring import KnownAgent, identity, known_agent, known_agents
from onebox.pool.liveness import SILENCE_S
from onebox.pool.spec import GRAMMAR, AgentPart, wants
from onebox.pool.spec_suggestion import suggestion
from onebox.wire.protocol.agents import AGENT_PORT, GRACE_S, Queued, Want

_log = logging.getLogger("onebox.pool")

PORTS_S = 4.0
"""How long a new worker's ports may take to accept a connection."""

_NAMED = 8
"""The most agents that a message lists."""

Connect = Callable[[str], AgentConnection]
"""Function that connects to the agent at an address."""


def client_name() -> str:
    """Return the name of this client for others: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name, as in a container
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{platform.node() or 'unknown'}"


def connect_agent(address: str) -> AgentConnection:
    """Connect to an agent that this client was paired with.

    Args:
        address: ``HOST`` or ``HOST:PORT``.

    Raises:
        UsageError: This client was not paired with it, or the host has no address.
        PoolError: There is no agent, it refuses this client, or it is of another version.
    """
    agent = paired_agent(address)
    return AgentConnection(address, agent.key, identity("client"), client_name())


def paired_agent(address: str) -> KnownAgent:
    """Return the agent at an address.

    Raises:
        UsageError: This client was not paired with it.
    """
    agent = known_agent(address)
    if agent is None:
        others = [each.address for each in known_agents()]
        known = f"; it is paired with {', '.join(others[:_NAMED])}{' and others' * (len(others) > _NAMED)}"
        near = suggestion(address, [each.removesuffix(f":{AGENT_PORT}") for each in others])
        raise UsageError(
            f"this client is not paired with an agent at {address!r}{near}{known if others else ''}: run 'onebox pair "
            f"accept' there and 'onebox pair connect {address}' here, then 'onebox serve' there"
            + ("" if ":" in address else f"; if no host was meant, a pool may be {GRAMMAR}")
        )
    return agent


class AgentSource:
    """The workers of one host; a :class:`~onebox.pool.backends.base.WorkerSource`.

    Args:
        part: The requested devices.
        grace_s: How long this process may be silent before its leases end, and the network be interrupted before the
            workers are given up; :data:`GRACE_S` and :data:`CUT_S` where ``None``.
        connect: Function that connects to the agent.
    """

    def __init__(self, part: AgentPart, *, grace_s: float | None = None, connect: Connect = connect_agent) -> None:
        self.address = part.address
        self.plain_links = part.plain_links
        self._part = part
        self._grace_s = GRACE_S if grace_s is None else grace_s
        self._cut_s = CUT_S if grace_s is None else grace_s
        self._connect = connect
        self._connection: AgentConnection | None = None
        self._wants: tuple[Want, ...] = ()
        self._handles: list[RemoteWorker] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def rank(self) -> str:
        """Global order of agents: every client that waits for several leases them in this order, so that no two clients
        deadlock."""
        assert self._connection is not None
        return self._connection.key

    @property
    def patience_s(self) -> float:
        """How long its workers may send no heartbeat: a little longer than the agent may."""
        return max(SILENCE_S, self._cut_s + SILENCE_S - CUT_S)

    def connect(self) -> None:
        """Connect to the agent, and resolve the specification to its devices.

        Raises:
            UsageError: This client is not paired with it, or it offers no such devices.
            PoolError: It cannot be reached, or refuses this client.
        """
        connection = self._connect(self.address)
        with self._lock:
            if self._closed:
                connection.close()
                raise PoolError(f"the connection to {self.address} was given up")
            self._connection = connection
        self._wants = wants(self._part, connection.inspect().offers)

    def acquire(self, client_key: str, *, wait: bool) -> None:
        """Lease the requested devices.

        Args:
            client_key: The public CURVE key that the workers accept.
            wait: Whether to queue for devices that others hold.

        Raises:
            Busy: Others hold them, and ``wait`` is false.
            UsageError: No such devices are offered, or the request exceeds this client's limits.
            PoolError: A worker did not start, or the agent is gone.
        """
        self._handles = self._lease(self._wants, client_key, wait=wait)

    def _lease(self, wants: Sequence[Want], client_key: str, *, wait: bool) -> list[RemoteWorker]:
        """Lease devices whose workers can be reached from here; see :meth:`acquire`."""
        connection = self._connection
        assert connection is not None
        handles = connection.lease(
            wants, client_key, grace_s=self._grace_s, cut_s=self._cut_s, wait=wait, on_queued=self._queued
        )
        try:
            with ThreadPoolExecutor(len(handles), thread_name_prefix="onebox-ports") as threads:
                found = list(threads.map(lambda handle: handle.unreachable(PORTS_S), handles))
            faults = [f"{handle.place.device}: {why}" for handle, why in zip(handles, found, strict=True) if why != ""]
            if faults:
                raise PoolError(
                    f"{self.address} has leased devices, but their workers cannot be reached: {'; '.join(faults)}\n"
                    f"  The agent says that its host is at {handles[0].address}: if it is not, serve there with "
                    "--advertise and the address that it has for others; if it is, a firewall there or between may "
                    "stop these ports: serve with --worker-ports and let those in, for TCP"
                )
        except BaseException:
            _give_back(connection, handles)
            raise
        return handles

    def give_up(self) -> None:
        """Give the lease back, to request it again later."""
        assert self._connection is not None
        handles, self._handles = self._handles, []
        _give_back(self._connection, handles)

    def start(self, first: int, client_key: str) -> Sequence[tuple[WorkerHandle, str]]:
        """Return the workers, which :func:`acquire_all` has had started."""
        for number, handle in enumerate(self._handles, first):
            handle.number(number)
        return [(handle, handle.key) for handle in self._handles]

    def replace(self, number: int, client_key: str) -> tuple[WorkerHandle, str] | None:
        """Start a worker in the place of one that has ended; see :class:`~onebox.pool.backends.base.RestartableSource`.

        Raises:
            PoolError: It could not be started, or its device is now leased to others.
        """
        for index, (handle, want) in enumerate(zip(self._handles, self._wants, strict=True)):
            if handle.place.worker == number:
                if self._connection is None or self._connection.gone:
                    return None
                lasts = self._connection.end(handle)  # a hung worker still holds its device
                if lasts and not any(other.lease == handle.lease for other in self._handles if other is not handle):
                    self._connection.release(handle.lease)
                (made,) = self._lease([want], client_key, wait=False)
                made.number(number)
                self._handles[index] = made
                return made, made.key
        return None

    def spare(self, request: SpareRequest, client_key: str) -> tuple[WorkerHandle, str]:
        """Lease what another host's worker has had; see :class:`~onebox.pool.backends.base.SpareSource`.

        Raises:
            PoolError: The agent is gone, it has no room left, or the worker could not be started.
            UsageError: It offers no such devices, or this client may not have more of them.
        """
        if self._connection is None or self._connection.gone:
            raise PoolError(f"the agent at {self.address} cannot be reached")
        want = Want(request.kind, request.threads if request.kind == "cpu" else 0, request.memory_bytes)
        (made,) = self._lease([want], client_key, wait=False)
        made.number(request.number)
        others = [
            pair for pair in zip(self._handles, self._wants, strict=True) if pair[0].place.worker != made.place.worker
        ]
        self._handles = [*(handle for handle, _ in others), made]
        self._wants = (*(other for _, other in others), want)
        return made, made.key

    def connected(self) -> None:
        """Do nothing: the leases are needed as long as the pool."""

    def close(self) -> None:
        """Give the leases back and close the connection. Idempotent."""
        with self._lock:
            self._closed = True
            connection = self._connection
        for handle in self._handles:
            handle.close(grace_s=0.0)
        if connection is not None:
            connection.close()

    def _queued(self, queued: Queued) -> None:
        _log.warning(
            "waiting for %s: place %d in its queue, behind %s%s ('onebox status' shows who has what; Ctrl-C gives up)",
            self.address,
            queued.place,
            queued.behind,
            f", lacking {queued.lacking}" if queued.lacking else "",
        )


def _give_back(connection: AgentConnection, handles: Sequence[RemoteWorker]) -> None:
    for handle in handles:
        handle.close(grace_s=0.0)
    for lease in {handle.lease for handle in handles}:
        connection.release(lease)


def acquire_all(sources: Sequence[AgentSource], client_key: str, *, wait: bool = True) -> None:
    """Connect to agents and lease from all of them, or from none.

    All are asked at once. If one is busy, all leases are given back and then requested one after the other, each with a
    wait, in an order that is the same for all clients.

    Args:
        sources: The agents; closed by the caller.
        client_key: The public CURVE key that the workers accept.
        wait: Whether to queue for devices that others hold.

    Raises:
        UsageError: The devices are not offered, or this client is not paired with an agent.
        PoolError: An agent cannot be reached, or a worker did not start; or others hold the devices and ``wait`` is
            false.
    """
    with _together(sources) as together:
        together(lambda source: source.connect())
        try:
            together(lambda source: source.acquire(client_key, wait=wait and len(sources) == 1))
            return
        except Busy:
            if not wait:
                raise
        together(lambda source: source.give_up())
    for source in sorted(sources, key=lambda source: source.rank):
        source.acquire(client_key, wait=True)


@contextlib.contextmanager
def _together(sources: Sequence[AgentSource]) -> Iterator[Callable[[Callable[[AgentSource], None]], None]]:
    """Yield a function that applies an action to all sources at once; an error closes them."""
    with ThreadPoolExecutor(max(1, len(sources)), thread_name_prefix="onebox-agents") as threads:

        def do(action: Callable[[AgentSource], None]) -> None:
            futures: list[Future[None]] = [threads.submit(action, source) for source in sources]
            wait_in_slices(futures)
            first = next((future for future in futures if future.done() and future.exception()), None)
            if first is not None and not isinstance(first.exception(), Busy):
                first.result()
            for future in futures:  # which agents are busy is known only when all have answered
                future.exception()
            for future in sorted(futures, key=lambda future: isinstance(future.exception(), Busy)):
                future.result()

        try:
            yield do
        except BaseException:
            for source in sources:  # which ends the threads' waits
                source.close()
            raise
