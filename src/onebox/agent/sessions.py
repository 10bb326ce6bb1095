"""The client sessions of an agent, limited in number. Pure.

A session is identified by a client's key, with which its connection was opened, and a token that the client chose. It
outlives its connection: a client that reconnects with the same token continues it.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from onebox.agent.leases import Client
from onebox.agent.reporter import Reporter
from onebox.wire.protocol.agents import AgentResponse, LogLines, Renewed, Stock

SESSIONS = 1024
"""The most sessions at a time."""

SESSIONS_OF_ONE = 64
"""The most sessions of one key."""

IDLE_S = 60.0
"""How long an idle session without leases is kept."""

CUT_S = 1.8
"""Silence, of almost two heartbeat intervals, after which a client may have missed messages."""

LOG_BYTES = 512 << 10
"""The most bytes of a log in one message."""

_FLIGHT_S = 1.0
_REMEMBERED = 64


@dataclass
class Session:
    """A session: its client, its last connection, its version check, its latest messages.

    Messages in flight at an interruption are lost without notice to either side; clients ignore duplicates.
    """

    client: Client
    heard_s: float
    route: bytes = b""
    introduced: bool = False
    _sent: deque[tuple[float, AgentResponse]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def sent(self, message: AgentResponse, now_s: float) -> None:
        """Store a message to the client, unless the client would ask again for it."""
        if not isinstance(message, Renewed | Stock | LogLines):
            self._sent.append((now_s, message))

    def heard(self, now_s: float, route: bytes = b"") -> list[AgentResponse]:
        """Record a heartbeat, and return the messages that the client may have missed.

        Args:
            now_s: The time.
            route: The connection that it came over, which replies use from now on.
        """
        since_s, self.heard_s = self.heard_s, now_s
        cut = self.introduced and route != self.route
        self.route = route
        if now_s - since_s < CUT_S and not cut:
            return []
        return [message for sent_s, message in self._sent if sent_s > since_s - _FLIGHT_S]


class Sessions:
    """The set of all sessions."""

    def __init__(self) -> None:
        self._known: dict[Client, Session] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, client: Client, now_s: float, busy: Callable[[Client], bool]) -> Session | None:
        """Return a session, a new one if it is unknown; None if there are too many.

        Args:
            client: Its client.
            now_s: The time.
            busy: Returns whether a session has leases or requests, and must be kept.
        """
        session = self._known.get(client)
        if session is None:
            if not self._room_for(client, busy):
                return None
            session = self._known[client] = Session(client, now_s)
        return session

    def explain_refusal(self, client: Client) -> str:
        """Say why :meth:`find` has just returned no session, and what to do."""
        mine = sum(session.client.key == client.key for session in self._known.values())
        return (
            f"there are {mine} sessions of this client and {len(self)} in all, and none of them is idle; allowed "
            f"are {SESSIONS_OF_ONE} of a client and {SESSIONS} in all: close pools that hold leases here, or come "
            "back when others have"
        )

    def get(self, client: Client) -> Session | None:
        """Return a known session."""
        return self._known.get(client)

    def end(self, client: Client) -> None:
        """Remove a session."""
        self._known.pop(client, None)

    def forget(self, now_s: float, busy: Callable[[Client], bool]) -> None:
        """Remove sessions that have long been idle."""
        for client, session in list(self._known.items()):
            if now_s - session.heard_s > IDLE_S and not busy(client):
                del self._known[client]

    def _room_for(self, client: Client, busy: Callable[[Client], bool]) -> bool:
        """Return whether there is room for one more session, evicting the idle one that was silent the longest if
        needed."""
        crowd = self._crowd(client)
        if not crowd:
            return True
        idle = [session for session in crowd if not busy(session.client)]
        if not idle:
            return False
        del self._known[min(idle, key=lambda session: session.heard_s).client]
        return True

    def _crowd(self, client: Client) -> list[Session]:
        """Return the sessions of which one has to go before a client gets another; none if there is room."""
        mine = [session for session in self._known.values() if session.client.key == client.key]
        if len(mine) < SESSIONS_OF_ONE and len(self._known) < SESSIONS:
            return []
        return mine if len(mine) >= SESSIONS_OF_ONE else list(self._known.values())


def newest(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last of some lines, as many as fit a message."""
    left = LOG_BYTES
    for count, line in enumerate(reversed(lines)):
        left -= len(line.encode(errors="replace")) + 8
        if left < 0:
            return tuple(lines[len(lines) - count :])
    return tuple(lines)


_NOBODY = "the agent itself"


class SessionFaultIsolator:
    """Runs parts of the work, each isolated from the others.

    Args:
        report: Sink of failures: the part, its client, and the place in the code.
        part_with: Function that ends a session, with a reason for its client.
    """

    def __init__(self, report: Reporter, part_with: Callable[[Client, str, float], None]) -> None:
        self._report = report
        self._part_with = part_with
        self._parting = False

    def __call__(self, part: str, client: Client | None, do: Callable[[], object], now_s: float) -> bool:
        """Run a part of the work.

        Args:
            part: Its name in the journal.
            client: The session that it serves; None for no particular one.
            do: The work.
            now_s: The time.

        Returns:
            Whether it succeeded; a failure has been reported.
        """
        try:
            do()
        except Exception as error:  # a bug must not end the leases of other clients
            why = f"{type(error).__name__}: {error}"
            place = traceback.extract_tb(error.__traceback__)[-1]
            name = _NOBODY if client is None else client.name
            where = f"{Path(place.filename).name}:{place.lineno}"
            self._report.refusal("failed", name, now_s, client=name, part=part, reason=why, where=where)
        else:
            return True
        if client is not None and not self._parting:  # unless it is the session's end that fails
            self._parting = True
            try:
                end = partial(self._part_with, client, f"the agent failed at something of this client's: {why}", now_s)
                self(part, client, end, now_s)
            finally:
                self._parting = False
        return False


__all__ = ["SessionFaultIsolator"]
