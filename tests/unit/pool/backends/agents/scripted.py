"""An agent that says what a test lets it say."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import zmq

from onebox.pool.backends.agents.agent_connection import AgentConnection
from onebox.pool.backends.compatibility import own_versions
from onebox.wire import KeyPair, configure, new_keys
from onebox.wire.protocol.agents import (
    TOKEN_BYTES,
    AgentResponse,
    Done,
    Inspect,
    Introduce,
    Introduced,
    Lease,
    Leased,
    Offer,
    Release,
    Renew,
    Renewed,
    Request,
    Started,
    Stock,
    decode_request,
    encode_agent,
)

OFFERS = (Offer("cpu", "cores", 8 << 30, 4, 8 << 30),)
KEYS = new_keys()

Answer = Callable[[Request], Sequence[AgentResponse | bytes] | None]


class ScriptedAgent:
    """Answers like an agent that has room for everybody, unless a test has another answer.

    Args:
        answer: Returns what to say instead, or ``None``.
        port: Where to listen; 0 for any.
        host: Likewise; IPv6 in brackets.
        keys: Its own.
    """

    def __init__(
        self,
        answer: Answer = lambda request: None,
        port: int = 0,
        host: str = "127.0.0.1",
        keys: KeyPair = KEYS,
    ) -> None:
        self.keys = keys
        self.answer = answer
        self.heard: list[Request] = []
        self.leases: list[int] = []
        self.mute = False
        self._client = b""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, self.keys, server_key=None)
        self._socket.setsockopt(zmq.IPV6, "[" in host)
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        self.address = self._socket.last_endpoint.decode().removeprefix("tcp://")
        self._say: list[AgentResponse] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def line(self) -> AgentConnection:
        return AgentConnection(self.address, self.keys.public, new_keys(), "ana@desk")

    def send(self, message: AgentResponse) -> None:
        """Say something unasked."""
        self._say.append(message)

    def kinds(self) -> list[str]:
        """Return what was asked for so far, but for signs of life."""
        return [type(request).__name__ for request in self.heard if not isinstance(request, Renew)]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._socket.close(0)
        self._context.term()

    def _run(self) -> None:
        while not self._stop.is_set():
            while self._say:
                self._send(self._say.pop(0))
            if not self._socket.poll(10):
                continue
            self._client, token, frame = self._socket.recv_multipart()
            assert len(token) == TOKEN_BYTES
            request = decode_request(frame)
            self.heard.append(request)
            if not self.mute:
                found = self.answer(request)
                for message in self._usual(request) if found is None else found:
                    self._send(message)

    def _send(self, message: AgentResponse | bytes) -> None:
        frame = message if isinstance(message, bytes) else encode_agent(message)
        self._socket.send_multipart([self._client, frame])

    def _usual(self, request: Request) -> list[AgentResponse]:
        match request:
            case Introduce():
                return [Introduced(request.number, own_versions(), "h", "192.0.2.7")]
            case Inspect():
                return [Stock(request.number, OFFERS)]
            case Renew():
                return [Renewed(request.number, tuple(self.leases))]
            case Release():
                self.leases = [lease for lease in self.leases if lease != request.lease]
                return [Done(request.number)]
            case Lease():
                return [self.lease(request)]
        raise AssertionError(request)

    def lease(self, request: Lease) -> Leased:
        """Return a lease of workers that are not there."""
        self.leases.append(100 + request.number)
        workers = [
            Started(want.device, 7, KEYS.public, "tcp://192.0.2.7:1", "tcp://192.0.2.7:2") for want in request.wants
        ]
        return Leased(request.number, self.leases[-1], tuple(workers))


@contextlib.contextmanager
def scripted(answer: Answer = lambda request: None, keys: KeyPair = KEYS) -> Iterator[ScriptedAgent]:
    """Run such an agent."""
    agent = ScriptedAgent(answer, keys=keys)
    try:
        yield agent
    finally:
        agent.close()
