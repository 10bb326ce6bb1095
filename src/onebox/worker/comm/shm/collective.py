"""One reduction or gather over the ranks of a group on one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from onebox.wire import TensorSpec
from onebox.worker.comm.collectives import joined, rank_sum, require_agreement, require_joint
from onebox.worker.comm.shm.arena import MemoryBlock
from onebox.worker.comm.shm.layout import ShmMessage
from onebox.worker.comm.shm.receiver import PendingReceive, ShmReceiver


class ShmCollective:
    """One reduction or gather.

    Args:
        order: Its number in the group.
        rank: This rank.
        own: This rank's message.
        block: Its elements; ``None`` if it has none.
        inboxes: The receiver for each rank.
        expected: The awaited messages of the other ranks.
        drop: Called with the block when this rank has read it.
    """

    def __init__(
        self,
        order: int,
        rank: int,
        own: ShmMessage,
        block: MemoryBlock | None,
        inboxes: Sequence[ShmReceiver],
        expected: dict[int, PendingReceive],
        drop: Callable[[MemoryBlock], None],
    ) -> None:
        self._order = order
        self._rank = rank
        self._own = own
        self._block = block
        self._inboxes = inboxes
        self._expected = expected
        self._drop = drop

    def messages(self, wait: Callable[[PendingReceive], ShmMessage]) -> list[ShmMessage]:
        """Return the messages of all ranks, in order."""
        size = len(self._expected) + 1
        return [self._own if rank == self._rank else wait(self._expected[rank]) for rank in range(size)]

    def sum(self, messages: Sequence[ShmMessage]) -> Tensor:
        """Return the sum.

        Raises:
            WireError: Another rank's call differs.
        """
        require_agreement(self._order, self._rank, messages)
        return rank_sum(self._parts(messages))

    def join(self, messages: Sequence[ShmMessage], dim: int, spec: TensorSpec) -> Tensor:
        """Return the concatenation of all ranks' parts.

        Args:
            messages: Messages of all ranks.
            dim: The dimension of concatenation.
            spec: Expected spec of the result.

        Raises:
            WireError: Another rank's call differs, or the result has another spec.
        """
        require_agreement(self._order, self._rank, messages)
        specs = [message.spec for message in messages]
        require_joint(specs, dim, spec)
        return joined(self._parts(messages), specs, dim)

    def give_back(self) -> None:
        """Return all ranks' memory. Idempotent."""
        for expected in self._expected.values():
            expected.give_back()
        self._drop_block()

    def __del__(self) -> None:
        self._drop_block()  # the messages are returned as they are dropped

    def _drop_block(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            self._drop(block)

    def _parts(self, messages: Sequence[ShmMessage]) -> list[Tensor]:
        return [inbox.part(message) for inbox, message in zip(self._inboxes, messages, strict=True)]
