"""When a client gives an agent a sign of life, and when it takes the agent for gone. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.wire.protocol.agents import RENEW_S

CUT_S = 3.0
"""How long the way to an agent may be cut unless a longer time was asked for: it is noticed within five seconds that an
agent, or its host, has failed. The agent itself waits longer for a client, see ``GRACE_S``."""

BACK_S = 0.75
"""How much longer than a cut its silence lasts: the last word before it may be half a second old, and then a connection
is to be made anew."""

_ASLEEP_S = 2 * RENEW_S
"""A thread that is woken several times a second and was not for so long did not run: it was stopped, or swapped out."""


class KeepAlive:
    """What a client knows of its contact with one agent.

    The agent answers every sign of life, so one that says nothing for as long as the way to it may be cut is gone, or
    cannot be reached.

    Args:
        now_s: The time.
    """

    def __init__(self, now_s: float) -> None:
        self._woke_s = self._heard_s = self._renewed_s = now_s
        self._cuts: dict[int, float] = {}
        self.gone = False
        """Whether it is taken for gone, and has not been heard since."""

    @property
    def bound_s(self) -> float:
        """For how long the agent may be silent."""
        return max(CUT_S, min(self._cuts.values(), default=CUT_S)) + BACK_S

    @property
    def leases(self) -> tuple[int, ...]:
        """What is held."""
        return tuple(self._cuts)

    def wake(self, now_s: float) -> None:
        """Note that this side runs; while it did not, it could not hear anything either."""
        asleep_s = now_s - self._woke_s
        if asleep_s > _ASLEEP_S:
            self._heard_s += asleep_s
        self._woke_s = now_s

    def heard(self, now_s: float) -> None:
        """Note that the agent has said something."""
        self._heard_s = now_s
        self.gone = False

    def hold(self, lease: int, cut_s: float) -> None:
        """Note a lease.

        Args:
            lease: Its number.
            cut_s: For how long the way to its workers may be cut.
        """
        self._cuts[lease] = cut_s

    def let_go(self, lease: int) -> None:
        """Forget a lease."""
        self._cuts.pop(lease, None)

    def unknown(self, renewed: Sequence[int]) -> list[int]:
        """Return the leases that the agent does not know any more.

        Args:
            renewed: Those that it does.
        """
        return [lease for lease in self._cuts if lease not in renewed]

    def renew(self, now_s: float) -> bool:
        """Tell whether to give a sign of life now, and note that it is given."""
        if now_s - self._renewed_s < RENEW_S:
            return False
        self._renewed_s = now_s
        return True

    def lost(self, now_s: float) -> float | None:
        """Return for how many seconds the agent has been silent, once: when it is to be taken for gone."""
        silent_s = now_s - self._heard_s
        if self.gone or silent_s < self.bound_s:
            return None
        self.gone = True
        return silent_s

    def patience_s(self, now_s: float) -> float:
        """Return how long to sleep until the next sign of life."""
        return max(0.0, self._renewed_s + RENEW_S - now_s)
