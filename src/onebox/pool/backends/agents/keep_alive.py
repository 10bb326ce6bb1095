"""Keep-alive of a client's connection to an agent: when to send a heartbeat, when the agent counts as lost. Pure: the
time is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.errors import OneboxError
from onebox.wire.protocol.agents import RENEW_S

CUT_S = 3.0
"""Default bound of a network interruption: the failure of an agent or its host is noticed within five seconds. The
agent itself waits longer for a client, see ``GRACE_S``."""

BACK_S = 1.25
"""Allowance on top of an interruption: the last heartbeat before it may be a second old, and the connection has to be
made anew."""

_ASLEEP_S = 2 * RENEW_S
"""The client thread wakes several times a second; after a gap of this length it was stopped or swapped out."""


class KeepAlive:
    """Liveness of one agent, as seen by a client.

    The agent answers every heartbeat. One that is silent for longer than an interruption may last is gone, or cannot be
    reached.

    Args:
        now_s: The time.
    """

    def __init__(self, now_s: float) -> None:
        self._woke_s = self._heard_s = now_s
        self._due_s = _after(now_s)
        self._cuts: dict[int, float] = {}
        self.error: OneboxError | None = None
        """The error of every request while the agent counts as lost: the loss is a state, which ends when the agent is
        heard again."""

    @property
    def gone(self) -> bool:
        """True while the agent counts as lost."""
        return self.error is not None

    @property
    def bound_s(self) -> float:
        """The longest permitted silence of the agent."""
        return max(CUT_S, min(self._cuts.values(), default=CUT_S)) + BACK_S

    @property
    def leases(self) -> tuple[int, ...]:
        """Numbers of the leases that are held."""
        return tuple(self._cuts)

    def wake(self, now_s: float) -> None:
        """Note that this client runs; after a pause of its own, the agent's silence is counted from now."""
        asleep_s = now_s - self._woke_s
        if asleep_s > _ASLEEP_S:
            self._heard_s += asleep_s
        self._woke_s = now_s

    def heard(self, now_s: float) -> None:
        """Note that a message of the agent has come."""
        self._heard_s = now_s
        self.error = None

    def lose(self, error: OneboxError) -> None:
        """Count the agent as lost from now on.

        Args:
            error: The error of every request until it is heard again; the first one is kept.
        """
        self.error = self.error or error

    def hold(self, lease: int, cut_s: float) -> None:
        """Add a lease.

        Args:
            lease: Its number.
            cut_s: How long the network to its workers may be interrupted.
        """
        self._cuts[lease] = cut_s

    def let_go(self, lease: int) -> None:
        """Remove a lease."""
        self._cuts.pop(lease, None)

    def unknown(self, renewed: Sequence[int]) -> list[int]:
        """Return the held leases that the agent no longer knows.

        Args:
            renewed: The leases that it knows.
        """
        return [lease for lease in self._cuts if lease not in renewed]

    def renew(self, now_s: float) -> bool:
        """Return whether a heartbeat is due now, and note that it is sent."""
        if now_s < self._due_s:
            return False
        self._due_s = _after(now_s)
        return True

    def lost(self, now_s: float) -> float | None:
        """Return the seconds of silence where the agent is to be counted as lost, and is not yet; else ``None``."""
        silent_s = now_s - self._heard_s
        return None if self.gone or silent_s < self.bound_s else silent_s

    def patience_s(self, now_s: float) -> float:
        """Return the seconds until the next heartbeat, or until the agent counts as lost."""
        due_s, lost_s = self._due_s, self._heard_s + self.bound_s
        return max(0.0, (min(due_s, lost_s) if not self.gone and lost_s > now_s else due_s) - now_s)


def _after(now_s: float) -> float:
    """Return when the heartbeat after a time is due: the threads of all agents, and workers of this host, wake
    together."""
    return (now_s // RENEW_S + 1) * RENEW_S
