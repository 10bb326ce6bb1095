"""The client's services for groups of workers: rendezvous, sums, and notices about members that left. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from onebox.errors import WireError
from onebox.pool.client.rendezvous import ClientSums, KeyValues
from onebox.pool.errors import WorkerLocation
from onebox.wire import from_frame, to_frame
from onebox.wire.protocol.groups import Reduced, Rendezvous, TicketCancelled
from onebox.wire.protocol.responses import Contribution, Left, Lookup


class GroupNotice(NamedTuple):
    """A message for a worker.

    Args:
        worker: Its number.
        instruction: The instruction.
        frames: Raw elements of its tensors.
    """

    worker: int
    instruction: Rendezvous | Reduced | TicketCancelled
    frames: tuple[Any, ...] = ()


class GroupServices:
    """Serves the groups of a pool; methods return the notices to send."""

    def __init__(self) -> None:
        self._key_values = KeyValues()
        self._sums = ClientSums()
        self._members: dict[int, tuple[int, ...]] = {}

    def form(self, group: int, members: Sequence[int]) -> None:
        """Start to serve a group, until one of its members leaves."""
        self._sums.form(group, members)
        self._members[group] = tuple(members)

    def serves(self, group: int) -> bool:
        """Return whether a group is served: it has been formed, and none of its members has left."""
        return group in self._members

    def of(self, worker: int) -> list[int]:
        """Return the groups that a worker is in."""
        return [group for group, members in self._members.items() if worker in members]

    def dissolve(self, group: int) -> list[GroupNotice]:
        """Stop serving a group; return notices for the workers that wait for it."""
        self._members.pop(group, None)
        waiting = self._key_values.forget(group) + self._sums.forget(group)
        return [GroupNotice(member, TicketCancelled(ticket)) for member, ticket in waiting]

    def take(
        self, place: WorkerLocation, saying: Left | Lookup | Contribution, frames: Sequence[Any]
    ) -> list[GroupNotice]:
        """Process a worker's message to a group.

        Args:
            place: The worker.
            saying: The message.
            frames: Raw elements of its tensors.

        Raises:
            WireError: The message violates the protocol.
        """
        if isinstance(saying, Left):
            return self.dissolve(saying.group)
        if saying.group not in self._members:
            return [GroupNotice(place.worker, TicketCancelled(saying.ticket))]
        if isinstance(saying, Contribution):
            return self._add_up(place, saying, frames)
        answers = self._key_values.lookup(place.worker, saying)
        return [GroupNotice(answer.worker, Rendezvous(answer.ticket, answer.value)) for answer in answers]

    def _add_up(self, place: WorkerLocation, contribution: Contribution, frames: Sequence[Any]) -> list[GroupNotice]:
        """Add a contribution to a sum; the last one returns the sum for all contributors."""
        if len(frames) != 1:
            raise WireError(f"{place} contributed {len(frames)} frames to a sum; one is needed")
        bucket = from_frame(contribution.spec, frames[0])
        total = self._sums.contribute(place.worker, contribution, bucket)
        if total is None:
            return []
        frame = to_frame(total.total)
        return [GroupNotice(member, Reduced(ticket), (frame,)) for member, ticket in total.tickets]
