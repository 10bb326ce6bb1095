"""Groups some of whose ranks reach each other by NCCL."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onebox.wire import TensorSpec
from onebox.wire.protocol.responses import Joined
from onebox.worker.comm.api import Begun, Finish, RowRange, WorkerGroup
from onebox.worker.comm.nccl import NcclGroup


class HybridGroup:
    """A group that sends to some ranks by NCCL, and to the others as workers without a GPU do.

    All messages between two ranks use one way, so that they arrive in order.

    Args:
        near: The way by NCCL to some ranks.
        whole: A way to all ranks.
        collectives: The one of the two that all ranks have in common, for collectives.
    """

    def __init__(self, near: NcclGroup, whole: WorkerGroup, collectives: WorkerGroup) -> None:
        self._near = near
        self._whole = whole
        self._collectives = collectives
        self._peers = frozenset(near.peers)

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._whole.rank

    @property
    def joined(self) -> Joined:
        """Return the ranks that share memory with this one."""
        return self._whole.joined

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        return self._collectives.reduce(tensors)

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank."""
        return self._collectives.collect(tensors, root)

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank."""
        return self._collectives.broadcast(specs, tensors, root)

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension."""
        return self._collectives.gather(tensor, spec, dim, sizes)

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a tensor, or a part of one, to a rank."""
        return self._way(peer).send(tensor, peer, channel, within)

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank."""
        return self._way(peer).receive(spec, peer, channel, rows)

    def check(self) -> int:
        """Return this worker's progress when the oldest operation began that goes on without the host; 0 for none."""
        return min(filter(None, (self._near.check(), self._whole.check())), default=0)

    def attend(self) -> bool:
        """Ask the client what other threads need of it; return whether they may need more."""
        return self._near.attend() | self._whole.attend()

    def interrupt(self) -> None:
        """End all waits; callable from any thread."""
        self._near.interrupt()
        self._whole.interrupt()

    def close(self) -> None:
        """Leave the group."""
        self._near.close()
        self._whole.close()

    def _way(self, peer: int) -> WorkerGroup:
        return self._near if peer in self._peers else self._whole
