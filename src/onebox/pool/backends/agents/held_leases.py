"""Leases that a client holds of one agent, and their workers. Pure, except that it notifies the workers."""

from __future__ import annotations

from collections.abc import Sequence

from onebox.errors import OneboxError
from onebox.pool.backends.agents.keep_alive import KeepAlive
from onebox.pool.backends.agents.remote_worker import RemoteWorker

LOST_S = 20.0
"""How long a lease is kept whose workers were given up while their agent could not be reached."""


class HeldLeases:
    """The leases of one agent connection with the workers of each; used under the connection's lock.

    Args:
        contact: Keep-alive state, which gets each lease.
    """

    def __init__(self, contact: KeepAlive) -> None:
        self._contact = contact
        self._handles: dict[int, list[RemoteWorker]] = {}
        self._released: set[int] = set()

    def hold(self, lease: int, handles: list[RemoteWorker], cut_s: float) -> None:
        """Add a lease.

        Args:
            lease: Its number.
            handles: Its workers.
            cut_s: How long the network to them may be interrupted.
        """
        self._handles[lease] = handles
        self._released.discard(lease)
        self._contact.hold(lease, cut_s)

    def release(self, lease: int) -> None:
        """Remove a lease that is to be released, now or as soon as the agent can be reached; see :meth:`renewed`."""
        self._drop(lease)
        self._released.add(lease)

    def position(self, handle: RemoteWorker) -> int | None:
        """Return a worker's position in its lease; ``None`` where the lease is no longer held."""
        handles = self._handles.get(handle.lease, [])
        return handles.index(handle) if handle in handles else None

    def heard(self, now_s: float) -> None:
        """Note that the agent can be reached."""
        self._contact.heard(now_s)
        for handles in self._handles.values():
            for handle in handles:
                handle.heard_s = now_s

    def renewed(self, known: Sequence[int]) -> list[int]:
        """Drop the leases that the agent no longer knows; return those that it keeps although they were released.

        A release is lost with an agent that cannot be reached.
        """
        for lease in self._contact.unknown(known):
            self.end(
                lease, "the agent does not know of it any more: it has ended meanwhile, or the agent was started anew"
            )
        self._released.intersection_update(known)
        return sorted(self._released)

    def worker_ended(self, lease: int, worker: int, exit_status: int | None, last_words: str) -> None:
        """Mark a worker as ended by itself."""
        handles = self._handles.get(lease, [])
        if 0 <= worker < len(handles):
            handles[worker].ended(exit_status, last_words)

    def end(self, lease: int, why: str) -> None:
        """Mark a lease as ended, with all its workers."""
        handles = self._handles.get(lease, [])
        self._drop(lease)
        for handle in handles:
            handle.lost(f"is gone, as your lease ended: {why}")

    def lose(self, error: OneboxError) -> None:
        """Count the agent as lost, and with it all workers; the leases stay in case it comes back."""
        self._contact.lose(error)
        for handles in self._handles.values():
            for handle in handles:
                handle.lost(f"cannot be reached: {error}")

    def release_forsaken(self, now_s: float) -> None:
        """Release the leases all of whose workers were given up a while ago, should the agent be back.

        They are no longer used. The delay exists because recovery of a pool ends each of these workers itself when it
        starts a replacement.
        """
        if not self._contact.gone:
            for lease, handles in list(self._handles.items()):
                if all(_is_lost(each, now_s) for each in handles):
                    self.release(lease)

    def _drop(self, lease: int) -> None:
        self._contact.let_go(lease)
        self._handles.pop(lease, None)


def _is_lost(handle: RemoteWorker, now_s: float) -> bool:
    return handle.lost_s is not None and now_s - handle.lost_s > LOST_S


__all__ = ["HeldLeases"]
