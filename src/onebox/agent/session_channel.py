"""What clients say to an agent, and what they are told: over one socket, by the sessions that they say it in.

A client is known by the key that its connection was opened with. Before each message it puts a token of its own making,
and the two together are its session: somebody else's token is worth nothing with another key. What is said to a session
goes over the connection that it was heard on last, by the name that the socket gave it: no client can choose one, and
so none can take over what another one is told. Its connection may be cut; it comes back over another one and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import zmq

from onebox.agent.leases import Client
from onebox.agent.log_rate_limit import Reporter
from onebox.agent.sessions import Session, Sessions
from onebox.errors import WireError
from onebox.wire.protocol.agents import TOKEN_BYTES, AgentResponse, encode_agent

_BATCH = 256


class SessionChannel:
    """The messages of clients.

    Args:
        socket: A ROUTER that listens; it stays its owner's.
        name_of: From a public key to the name of its client; None where it is no longer let in.
        busy: Whether a session has something, and may not be forgotten.
        report: Told of what could not be said.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        name_of: Callable[[str], str | None],
        busy: Callable[[Client], bool],
        report: Reporter,
    ) -> None:
        self._socket = socket
        self._name_of = name_of
        self._busy = busy
        self._report = report
        self._sessions = Sessions()

    def take(self, now_s: float) -> Iterator[tuple[Session, bytes, bytes]]:
        """Yield what has been said, up to some; the rest next time.

        Args:
            now_s: The time.

        Yields:
            A session, the connection it was heard on, and a message of it.
        """
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != TOKEN_BYTES:  # no message of ours, which is one frame and a token
                continue
            session = self._session(str(frames[2].get("User-Id")), frames[1].bytes, now_s)
            if session is not None and session.rate.allows(now_s):
                yield session, frames[0].bytes, frames[2].bytes

    def say(self, client: Client, saying: AgentResponse, now_s: float) -> None:
        """Say something to a session, and remember it in case that it is lost with a connection."""
        session = self._sessions.get(client)
        if session is not None:
            session.said(saying, now_s)
            self._send(session, saying, now_s)

    def hear(self, session: Session, route: bytes, now_s: float) -> None:
        """Take a session's sign of life, and say again what it may have missed.

        Args:
            session: Which.
            route: The connection that it was heard on.
            now_s: The time.
        """
        for saying in session.heard(now_s, route):
            self._send(session, saying, now_s)

    def end(self, client: Client) -> None:
        """Forget a session: it has to introduce itself anew."""
        self._sessions.end(client)

    def tick(self, now_s: float) -> None:
        """Forget sessions that have long been idle."""
        self._sessions.forget(now_s, self._busy)

    def _session(self, key: str, token: bytes, now_s: float) -> Session | None:
        try:
            name = self._name_of(key)
        except Exception as error:  # the list of clients cannot be read, say
            self._report.refusal("failed", "clients", now_s, part="clients", reason=f"{type(error).__name__}: {error}")
            return None
        return None if name is None else self._sessions.find(Client(key, token, name), now_s, self._busy)

    def _send(self, session: Session, saying: AgentResponse, now_s: float) -> None:
        """Send something to a client; one that does not listen, or has gone, misses it."""
        name = session.client.name
        try:
            frame = encode_agent(saying)
        except WireError as error:
            self._report.refusal("unsaid", name, now_s, client=name, what=type(saying).__name__, reason=str(error))
            return
        with suppress(zmq.Again):
            self._socket.send_multipart([session.route, frame], zmq.NOBLOCK)


__all__ = ["SessionChannel"]
