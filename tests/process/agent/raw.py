"""A client of an agent that says just what it is told to, and an agent in a thread."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import zmq

from onebox.agent import Agent, ClientLimits, Offered
from onebox.pool.backends.compatibility import own_versions
from onebox.wire import KeyPair, configure, new_keys
from onebox.wire.protocol.agents import (
    TOKEN_BYTES,
    AgentResponse,
    Introduce,
    Introduced,
    Lease,
    Leased,
    Renew,
    Renewed,
    Request,
    Want,
    decode_agent_response,
    encode_agent,
)

T = TypeVar("T")

WAIT_S = 60.0
"""Longer than a worker takes to start on a busy machine."""

CPUS = Offered(device="cpu", name="a CPU", memory_bytes=1 << 30, threads=2)


class Raw:
    """One connection of a client, which renews while it waits."""

    def __init__(self, endpoint: str, agent_key: str, keys: KeyPair, route: bytes = b"") -> None:
        self.keys = keys
        self.endpoint = endpoint
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        configure(self.socket, keys, server_key=agent_key)
        if route:
            self.socket.setsockopt(zmq.ROUTING_ID, route)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.connect()
        self.numbers = 0
        self.heard: list[AgentResponse] = []

    def connect(self) -> None:
        self.socket.setsockopt(zmq.IPV6, "[" in self.endpoint)
        self.socket.connect(self.endpoint)

    def disconnect(self) -> None:
        self.socket.disconnect(self.endpoint)

    def send(self, request: Request | bytes) -> None:
        self.socket.send_multipart([self.token, request if isinstance(request, bytes) else encode_agent(request)])

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def take(self, kind: type[T], *, renew: bool = True, within_s: float = WAIT_S) -> T:
        """Return the first saying of a kind that has not been taken; what comes before it is kept."""
        end_s = time.monotonic() + within_s
        while True:
            for message in self.heard:
                if isinstance(message, kind):
                    self.heard.remove(message)
                    return message
            if time.monotonic() > end_s:
                raise AssertionError(f"no {kind.__name__} within {within_s} s, but {self.heard}")
            if self.socket.poll(300):
                self.heard.append(decode_agent_response(self.socket.recv()))
            elif renew:
                self.send(Renew(0))

    def renewed(self) -> tuple[int, ...]:
        """Send a heartbeat, and return the leases that the agent says it has of this session."""
        number = self.number()
        self.send(Renew(number))
        while (found := self.take(Renewed)).number != number:  # of heartbeats in waits before
            pass
        return found.leases

    def introduce(self) -> Introduced:
        self.send(Introduce(self.number(), own_versions(), "somebody"))
        return self.take(Introduced)

    def ask(self, *wants: Want, **more: Any) -> int:
        """Ask for a lease and return the number of the request."""
        number = self.number()
        self.send(Lease(number, wants, self.keys.public, **more))
        return number

    def lease(self, *wants: Want, **more: Any) -> Leased:
        self.ask(*wants, **more)
        return self.take(Leased)

    def close(self) -> None:
        self.context.destroy(linger=0)


def greeted(endpoint: str, worker_key: str, keys: KeyPair, within_s: float) -> bool:
    """Connect to a worker and tell whether it says anything."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        configure(socket, keys, server_key=worker_key)
        socket.connect(endpoint)
        return bool(socket.poll(int(within_s * 1000)))
    finally:
        context.destroy(linger=0)


class House:
    """An agent that serves in a thread, and its clients."""

    def __init__(
        self,
        *offers: Offered,
        limits: ClientLimits | None = None,
        bind: str = "127.0.0.1",
        read_log: Callable[[int], Sequence[str]] | None = None,
        worker_ports: range = range(0),
    ) -> None:
        self.keys = new_keys()
        self.known = {new_keys().public: "nobody"}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.agent = Agent(
            keys=self.keys,
            name_of=self.name_of,
            bind=bind,
            port=0,
            advertise=bind,
            offers=offers or (CPUS,),
            limits=limits or ClientLimits(),
            tell=lambda event, **fields: self.events.append((event, fields)),
            worker_ports=worker_ports,
            read_log=read_log or (lambda lines: [f'{{"line": {number}}}' for number in range(lines)]),
        )
        self.clients: list[Raw] = []
        self.thread = threading.Thread(target=self.agent.run)
        self.thread.start()

    def name_of(self, key: str) -> str | None:
        return self.known.get(key)

    def raw(self, name: str | None, keys: KeyPair | None = None, route: bytes = b"") -> Raw:
        """Return a connection of a client that the agent knows by a name, or does not know."""
        keys = keys or new_keys()
        if name is not None:
            self.known[keys.public] = name
        self.clients.append(Raw(self.agent.endpoint, self.keys.public, keys, route))
        return self.clients[-1]

    def client(self, name: str, keys: KeyPair | None = None) -> Raw:
        """Return a connection of a client that has introduced itself."""
        raw = self.raw(name, keys)
        raw.introduce()
        return raw

    def told(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def until(self, event: str, count: int = 1) -> None:
        """Wait until the agent has told of an event so many times."""
        end_s = time.monotonic() + WAIT_S
        while len(self.told(event)) < count:
            if time.monotonic() > end_s:
                raise AssertionError(f"not {count} times {event} within {WAIT_S} s, but {self.events}")
            time.sleep(0.02)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.agent.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def house(*offers: Offered, **more: Any) -> Iterator[House]:
    """Let an agent serve as long as a block lasts."""
    made = House(*offers, **more)
    try:
        yield made
    finally:
        made.close()


def gone(processes: Sequence[int], within_s: float = 60.0) -> bool:
    """Wait until processes have ended; tell whether they have."""
    end_s = time.monotonic() + within_s
    while any(_is_there(process) for process in processes):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def _is_there(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
