"""Groups over several hosts: shared memory within a host, sockets between hosts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onebox.wire import TensorSpec
from onebox.wire.protocol.responses import Joined
from onebox.worker.comm.api import Begun, Finish, RowRange
from onebox.worker.comm.shm.group import ShmGroup
from onebox.worker.comm.torch_dist import TorchDistGroup


class HybridGroup:
    """A group that uses shared memory or sockets between two ranks, and sockets for collectives.

    All messages between two ranks use one path, so that they arrive in order.

    Args:
        near: The part of the group that shares memory.
        whole: The whole group, over sockets.
    """

    def __init__(self, near: ShmGroup, whole: TorchDistGroup) -> None:
        self._near = near
        self._all = whole
        self._ranks = frozenset(near.joined.near)

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._near.rank

    @property
    def joined(self) -> Joined:
        """Return the ranks that share memory with this one."""
        return self._near.joined

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        return self._all.reduce(tensors)

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank."""
        return self._all.collect(tensors, root)

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank."""
        return self._all.broadcast(specs, tensors, root)

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int) -> Finish:
        """Begin to gather the ranks' tensors along a dimension."""
        return self._all.gather(tensor, spec, dim)

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a tensor, or a part of one, to a rank."""
        return self._way(peer).send(tensor, peer, channel, within)

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank."""
        return self._way(peer).receive(spec, peer, channel, rows)

    def interrupt(self) -> None:
        """End all waits; callable from any thread."""
        self._near.interrupt()
        self._all.interrupt()

    def close(self) -> None:
        """Leave the group."""
        self._near.close()
        self._all.close()

    def _way(self, peer: int) -> ShmGroup | TorchDistGroup:
        return self._near if peer in self._ranks else self._all
