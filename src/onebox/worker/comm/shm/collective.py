"""One reduction or gather over the ranks of a group on one host, and the purpose codes of messages for collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec
from onebox.worker.comm.shm.arena import MemoryBlock
from onebox.worker.comm.shm.layout import ShmMessage
from onebox.worker.comm.shm.receiver import PendingReceive, ShmReceiver

Purpose = Literal["a sum", "a sum for one rank", "a broadcast"]
_PURPOSES = get_args(Purpose)


def code_of(purpose: Purpose, fingerprint: int) -> int:
    """Return the purpose code of a message for a collective other than a gather; that of a gather is its dimension.

    Args:
        purpose: The kind of collective.
        fingerprint: A 32-bit fingerprint of the rank's call, which must equal that of the other ranks.
    """
    return -1 - (_PURPOSES.index(purpose) << 32 | fingerprint)


def flat_spec(specs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the spec of tensors of one type, concatenated."""
    return TensorSpec(specs[0].dtype, (sum(math.prod(spec.shape) for spec in specs),))


def is_gather(code: int) -> bool:
    """Return whether a message belongs to a gather."""
    return code >= 0


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
        """Return the sum, added up in the order of the ranks.

        Raises:
            WireError: Another rank's call differs.
        """
        self.agree_on_sum(messages)
        parts = self._parts(messages)
        total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
        for part in parts[2:]:
            total += part
        return total

    def join(self, messages: Sequence[ShmMessage], dim: int, spec: TensorSpec) -> Tensor:
        """Return the concatenation of all ranks' parts.

        Args:
            messages: Messages of all ranks.
            dim: The dimension of concatenation.
            spec: Expected spec of the result.

        Raises:
            WireError: Another rank's call differs, or the result has another spec.
        """
        self.agree_on_gather(messages, dim, spec)
        parts = self._parts(messages)
        return torch.cat([part.view(message.spec.shape) for part, message in zip(parts, messages, strict=True)], dim)

    def agree_on_sum(self, messages: Sequence[ShmMessage]) -> None:
        """Require that all ranks add up the same.

        Raises:
            WireError: Another rank's call differs.
        """
        self._agree(messages, [message.spec for message in messages])

    def agree_on_gather(self, messages: Sequence[ShmMessage], dim: int, spec: TensorSpec) -> None:
        """Require that all ranks gather the same, and that the whole has a spec; see :meth:`join`."""
        self._agree(messages, [_without(message.spec, dim) for message in messages])
        own = self._own.spec
        joint = sum(message.spec.shape[dim] for message in messages)
        made = TensorSpec(own.dtype, (*own.shape[:dim], joint, *own.shape[dim + 1 :]))
        if made != spec:
            raise WireError(f"{made} comes of a gather along dimension {dim} where {spec} was to come")

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

    def _agree(self, messages: Sequence[ShmMessage], specs: Sequence[TensorSpec]) -> None:
        mine = specs[self._rank]
        for rank, (message, spec) in enumerate(zip(messages, specs, strict=True)):
            if message.code != self._own.code or spec != mine:
                raise disagreement(self._order, self._rank, self._own, rank, message)

    def _parts(self, messages: Sequence[ShmMessage]) -> list[Tensor]:
        return [inbox.part(message) for inbox, message in zip(self._inboxes, messages, strict=True)]


def _without(spec: TensorSpec, dim: int) -> TensorSpec:
    """Return a specification with the size of one dimension left out."""
    return TensorSpec(spec.dtype, (*spec.shape[:dim], -1, *spec.shape[dim + 1 :]))


def disagreement(order: int, rank: int, own: ShmMessage, peer: int, message: ShmMessage) -> WireError:
    """Return the error for ranks that call different collectives.

    Args:
        order: The number of the collective in the group.
        rank: This rank.
        own: This rank's message.
        peer: The other rank.
        message: The message of the other rank.
    """
    other = _name(message) if _name(message) != _name(own) else "one of tensors of other sizes, or another rank"
    return WireError(
        f"the ranks disagree on collective {order} of the group: rank {rank} came for {_name(own)}, rank {peer} for "
        f"{other}"
    )


def _name(message: ShmMessage) -> str:
    code = message.code
    kind = f"a gather along dimension {code}" if is_gather(code) else _PURPOSES[(-1 - code >> 32) % len(_PURPOSES)]
    return f"{kind} of {message.spec}"
