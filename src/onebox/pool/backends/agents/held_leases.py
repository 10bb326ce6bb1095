"""What a client holds of one agent: leases, their workers, and news of them. Pure but for the workers that are told."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.pool.backends.agents.keep_alive import KeepAlive
from onebox.pool.backends.agents.remote_worker import RemoteWorker

LOST_S = 20.0
"""How long leases are kept whose workers were given up while their agent could not be reached."""


class HeldLeases:
    """The leases of one line to an agent, with the workers of each; used under the line's lock.

    Args:
        contact: Told of the leases.
    """

    def __init__(self, contact: KeepAlive) -> None:
        self._contact = contact
        self._members: dict[int, list[RemoteWorker]] = {}

    def hold(self, lease: int, members: list[RemoteWorker], cut_s: float) -> None:
        """Note a lease.

        Args:
            lease: Its number.
            members: Its workers.
            cut_s: For how long the way to them may be cut.
        """
        self._members[lease] = members
        self._contact.hold(lease, cut_s)

    def let_go(self, lease: int) -> None:
        """Forget a lease."""
        self._contact.let_go(lease)
        self._members.pop(lease, None)

    def position(self, member: RemoteWorker) -> int | None:
        """Return a worker's position in its lease; ``None`` where the lease is not held any more."""
        members = self._members.get(member.lease, [])
        return members.index(member) if member in members else None

    def heard(self, now_s: float) -> None:
        """Note that the agent can be heard."""
        self._contact.heard(now_s)
        for members in self._members.values():
            for member in members:
                member.heard_s = now_s

    def renewed(self, known: Sequence[int]) -> None:
        """Take the news of which leases the agent knows."""
        for lease in self._contact.unknown(known):
            self.end(lease, "the agent does not know of it any more: it has been started anew")

    def worker_ended(self, lease: int, worker: int, exit_status: int | None, last_words: str) -> None:
        """Take the news that a worker ended by itself."""
        members = self._members.get(lease, [])
        if 0 <= worker < len(members):
            members[worker].ended(exit_status, last_words)

    def end(self, lease: int, why: str) -> None:
        """Take the news that a lease has ended."""
        members = self._members.get(lease, [])
        self.let_go(lease)
        for member in members:
            member.lost(f"was ended with its lease: {why}")

    def lose(self, why: str) -> None:
        """Take the news that the agent is gone; its leases stay, should it be back."""
        for members in self._members.values():
            for member in members:
                member.lost(f"cannot be reached: {why}")

    def forsaken(self, now_s: float) -> list[int]:
        """Forget the leases all of whose workers were given up a while ago, should the agent be back, and return them.

        Nobody uses them. A while, because a pool that heals ends each of them when it starts another one in its place.
        """
        if self._contact.gone:
            return []
        found = [lease for lease, members in self._members.items() if all(_is_lost(each, now_s) for each in members)]
        for lease in found:
            self.let_go(lease)
        return found


def _is_lost(member: RemoteWorker, now_s: float) -> bool:
    return member.lost_s is not None and now_s - member.lost_s > LOST_S


__all__ = ["HeldLeases"]
