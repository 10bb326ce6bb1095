"""The sessions of clients that an agent knows of: not too many of them, each heard not too often; pure.

A session is a client's key, which its connection was opened with, and a token that the client chose. It outlives its
connection: a client that comes back over another one says the same token, and goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onebox.agent.leases import Client
from onebox.agent.quiet import Rate
from onebox.wire.agents import AgentSaying, LogLines, Renewed, Stock

SESSIONS = 1024
"""The most sessions that are known at a time."""

SESSIONS_OF_ONE = 64
"""The most of one key."""

NEW_S = 0.05
"""How often there may be another session of one key, after as many as there may be: the bursts that come with them are
less than what so many sessions may say."""

IDLE_S = 60.0
"""How long a session is remembered that says nothing and has nothing."""

CUT_S = 0.9
"""A client that was silent for so long, almost two signs of life, may have lost what was said to it meanwhile."""

LOG_BYTES = 512 << 10
"""The most bytes of a log that are said at once: they have to fit a message."""

_FLIGHT_S = 1.0
_REMEMBERED = 64

_BURST = 100.0
_EVERY_S = 0.02


@dataclass
class Session:
    """A session: whose it is, over which connection it was heard last, how often it may say something, whether its
    versions match, what it was told of late.

    What was under way when the line was cut is lost, and neither side is told; what is said twice, clients ignore.
    """

    client: Client
    rate: Rate
    heard_s: float
    route: bytes = b""
    introduced: bool = False
    _said: deque[tuple[float, AgentSaying]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def said(self, saying: AgentSaying, now_s: float) -> None:
        """Remember what a client is told, unless it will ask again."""
        if not isinstance(saying, Renewed | Stock | LogLines):
            self._said.append((now_s, saying))

    def heard(self, now_s: float, route: bytes = b"") -> list[AgentSaying]:
        """Take a sign of life, and return what the client may have missed.

        Args:
            now_s: The time.
            route: The connection that it came over, where the client is answered from now on.
        """
        since_s, self.heard_s = self.heard_s, now_s
        cut = self.introduced and route != self.route
        self.route = route
        if now_s - since_s < CUT_S and not cut:
            return []
        return [saying for said_s, saying in self._said if said_s > since_s - _FLIGHT_S]


class Sessions:
    """All sessions."""

    def __init__(self) -> None:
        self._known: dict[Client, Session] = {}
        self._new: dict[str, Rate] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, client: Client, now_s: float, busy: Callable[[Client], bool]) -> Session | None:
        """Return a session, a new one if it is not known; None if there are too many, or new ones too often.

        Args:
            client: Whose it is.
            now_s: The time.
            busy: Whether a session has something, and may not be forgotten for another one.
        """
        session = self._known.get(client)
        if session is None:
            new = self._new.setdefault(client.key, Rate(SESSIONS_OF_ONE, NEW_S, now_s))
            if not new.allows(now_s) or not self._room_for(client, busy):
                return None
            session = self._known[client] = Session(client, Rate(_BURST, _EVERY_S, now_s), now_s)
        return session

    def get(self, client: Client) -> Session | None:
        """Return a session that is known."""
        return self._known.get(client)

    def end(self, client: Client) -> None:
        """Forget a session at once."""
        self._known.pop(client, None)

    def forget(self, now_s: float, busy: Callable[[Client], bool]) -> None:
        """Forget sessions that have long been idle, and keys that have none and could have all again."""
        for client, session in list(self._known.items()):
            if now_s - session.heard_s > IDLE_S and not busy(client):
                del self._known[client]
        here = {client.key for client in self._known}
        for key in [key for key, rate in self._new.items() if key not in here and rate.full(now_s)]:
            del self._new[key]

    def _room_for(self, client: Client, busy: Callable[[Client], bool]) -> bool:
        """Tell whether there may be one more, for which the idle one that was heard the longest ago makes room."""
        mine = [session for session in self._known.values() if session.client.key == client.key]
        if len(mine) < SESSIONS_OF_ONE and len(self._known) < SESSIONS:
            return True
        crowd = mine if len(mine) >= SESSIONS_OF_ONE else list(self._known.values())
        idle = [session for session in crowd if not busy(session.client)]
        if not idle:
            return False
        del self._known[min(idle, key=lambda session: session.heard_s).client]
        return True


def newest(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last of some lines, as many as fit a message."""
    left = LOG_BYTES
    for count, line in enumerate(reversed(lines)):
        left -= len(line.encode(errors="replace")) + 8
        if left < 0:
            return tuple(lines[len(lines) - count :])
    return tuple(lines)
