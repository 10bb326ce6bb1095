"""The channel of client sessions: messages of all clients over one socket.

A client is identified by the key of its connection. It puts a token of its choice before each message; key and token
together identify its session, so a token is useless with another key. Messages to a session go over the connection that
it was last heard on, addressed by the socket's own name for it: a client cannot choose that name, and so cannot receive
another one's messages. After an interruption a session continues over a new connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import zmq

from onebox.agent.leases import Client
from onebox.agent.reporter import Reporter
from onebox.agent.sessions import Session, Sessions
from onebox.errors import WireError
from onebox.wire import ReceiveWatch, connection_of
from onebox.wire.protocol.agents import TOKEN_BYTES, AgentResponse, Refused, Renew, decode_request, encode_agent

REMOVED = "you are no longer let in: this client was removed from those that are paired with it"

_BATCH = 256

TURN_S = 0.1
"""Longest time that received messages take in one turn of the agent, unless one of them takes longer."""

_FRAMES = 3


class SessionChannel:
    """Receives from and sends to client sessions.

    Args:
        socket: A listening ROUTER; the caller closes it.
        name_of: Maps a public key to the name of its client; None where it is no longer accepted.
        busy: Returns whether a session has leases or requests, and must be kept.
        report: Sink of failures to send.
        watch: The watch of the socket's connections.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        name_of: Callable[[str], str | None],
        busy: Callable[[Client], bool],
        report: Reporter,
        watch: ReceiveWatch,
    ) -> None:
        self._watch = watch
        self._socket = socket
        self._name_of = name_of
        self._busy = busy
        self._report = report
        self._sessions = Sessions()

    def take(self, now_s: float) -> Iterator[tuple[Session, bytes, bytes]]:
        """Yield received messages up to a limit; the rest next time.

        Args:
            now_s: The time.

        Yields:
            A session, the connection it was heard on, and a message of it.
        """
        end_s = time.monotonic() + TURN_S
        for _ in range(_BATCH):
            if time.monotonic() >= end_s:
                return
            try:
                frames = self._receive()
            except zmq.Again:
                return
            if len(frames) != _FRAMES or len(frames[1]) != TOKEN_BYTES:  # not of this protocol: one frame after a token
                continue
            session = self._session(str(frames[2].get("User-Id")), frames, now_s)
            if session is not None:
                yield session, frames[0].bytes, frames[2].bytes

    def send(self, client: Client, message: AgentResponse, now_s: float) -> None:
        """Send a message to a session, and store it in case it is lost with a connection."""
        session = self._sessions.get(client)
        if session is not None:
            session.sent(message, now_s)
            self._transmit(session, message, now_s)

    def hear(self, session: Session, route: bytes, now_s: float) -> None:
        """Record a session's heartbeat, and send again the messages that it may have missed.

        Args:
            session: The session.
            route: The connection that it was heard on.
            now_s: The time.
        """
        for message in session.heard(now_s, route):
            self._transmit(session, message, now_s)

    def end(self, client: Client) -> None:
        """Remove a session: its client has to introduce itself again."""
        self._sessions.end(client)

    def tick(self, now_s: float) -> None:
        """Remove sessions that have long been idle; shut down connections that bring too much without a message."""
        self._sessions.forget(now_s, self._busy)
        for cut in self._watch.check(now_s):
            self._report.refusal("cut-off", cut.address, now_s, address=cut.address, unread_bytes=cut.size_bytes)

    def _receive(self) -> list[zmq.Frame]:
        """Return the frames of the next message, of a long one only the first few.

        Raises:
            zmq.Again: There is none.
        """
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        self._watch.delivered(connection_of(frames[0]))
        while frames[-1].more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames = [*frames[:_FRAMES], frame]
        return frames

    def _refuse(self, client: Client, frames: list[zmq.Frame], why: str, now_s: float) -> None:
        """Note that a message is not taken, and say so to its client, unless it is a heartbeat, which comes again."""
        self._report.refusal("over-limit", client.name, now_s, client=client.name, reason=why)
        with suppress(WireError, zmq.Again):
            request = decode_request(frames[2].bytes)
            if not isinstance(request, Renew):
                refused = encode_agent(Refused(request.number, "failed", why))
                self._socket.send_multipart([frames[0].bytes, refused], zmq.NOBLOCK)

    def _session(self, key: str, frames: list[zmq.Frame], now_s: float) -> Session | None:
        try:
            name = self._name_of(key)
        except Exception as error:  # for instance, the list of clients cannot be read
            self._report.refusal("failed", "clients", now_s, part="clients", reason=f"{type(error).__name__}: {error}")
            return None
        route, token = frames[0].bytes, frames[1].bytes
        if name is not None:
            client = Client(key, token, name)
            found = self._sessions.find(client, now_s, self._busy)
            if found is None:
                self._refuse(client, frames, self._sessions.explain_refusal(client), now_s)
            return found
        known = self._sessions.get(Client(key, token))  # it was accepted when it connected
        if known is not None:
            known.route = route
            self._transmit(known, Refused(0, "removed", REMOVED), now_s)
        return None

    def _transmit(self, session: Session, message: AgentResponse, now_s: float) -> None:
        """Send a message to a client; it is dropped where the client does not read, or has gone."""
        name = session.client.name
        try:
            frame = encode_agent(message)
        except WireError as error:
            self._report.refusal("unsaid", name, now_s, client=name, what=type(message).__name__, reason=str(error))
            return
        with suppress(zmq.Again):
            self._socket.send_multipart([session.route, frame], zmq.NOBLOCK)


__all__ = ["SessionChannel"]
