"""A communicator: one rank's device in a group of workers, and its exchanges with the other ranks.

Everything is recorded and sent without waiting. A device executes sequentially, and waits for the other ranks at the
first operator on a result: so none is recorded here. Transfers from worker to worker do not pass the client.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from onebox.errors import OneboxError, UsageError
from onebox.pool.errors import CAUSE_S
from onebox.vgpu.core.metadata import dense
from onebox.vgpu.core.tensor import Handle, alias_of, handle_of, wrap
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.wire import TensorSpec, dtype_name
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.instructions import Gather, Receive, Reduce, Send

_LOOK_S = 0.002
"""Interval of checks for the notice of a worker that has left."""


class Communicator:
    """One rank's membership of a group of workers.

    Args:
        queue: Command queue of the rank's device.
        group: The number of the group, whose ranks are those of the workers.
        rank: This rank.
        size: Number of ranks.
        tagged: Whether messages on different channels may be received in another order than sent, which NCCL, the way
            between GPUs, does not support.
    """

    def __init__(self, queue: CommandQueue, group: int, rank: int, size: int, *, tagged: bool = True) -> None:
        self.queue = queue
        self.group = group
        self.rank = rank
        self.size = size
        self.tagged = tagged
        self.moment = 0
        """That of the latest failure of which the rank had been told with its latest collective."""
        self._lost_peer = queue.channel.lost_peer()

    def has_failed(self) -> bool:
        """Return whether a rank has left because of a failure; a process that shares the devices of its parent does not
        learn it.

        A rank that has lacked another one's data since its latest collective may know so before that one's notice has
        come: it waits for the notice, or :data:`~onebox.pool.errors.CAUSE_S` if it was another group's.
        """
        pool, channel = self.queue.pool, self.queue.channel
        if pool.attached:
            return False
        if channel.moment > self.moment:
            before, self._lost_peer = self._lost_peer, channel.lost_peer()
            end_s = time.monotonic() + CAUSE_S
            while self._lost_peer > before and pool.is_whole(self.group) and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
        return pool.has_failed(self.group)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of each rank's tensor, in the order of the ranks; the tensor is not modified.

        Args:
            tensor: A tensor of the same shape and type on all ranks.
        """
        # a buffer of its own, which the sum then replaces
        handle = alias_of(tensor)
        self.queue.flush([Reduce((handle.number,), self.group)])
        return wrap(handle, dense(tensor.dtype, tuple(tensor.shape)))

    def joined(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the elements of each rank's tensor in one flat tensor, in the order of the ranks.

        Args:
            tensor: A tensor of the same type on all ranks; shapes may differ.
            sizes: Number of elements of each.
        """
        numel = sum(sizes)
        own = self._flat(tensor)
        handle = Handle(self.queue, self.queue.new_number())
        spec = TensorSpec(dtype_name(tensor.dtype), (numel,))
        self.queue.flush([Gather(own.number, handle.number, spec, self.group, tuple(sizes))])
        return wrap(handle, dense(tensor.dtype, (numel,)))

    def send(self, tensors: Sequence[Tensor], peers: Sequence[int], channel: int) -> None:
        """Send each of some ranks its tensor.

        Args:
            tensors: The tensors.
            peers: The ranks.
            channel: Channel of the transfer; those to a rank on one channel arrive in order.
        """
        flats = [self._flat(tensor) for tensor in tensors]
        pairs = zip(flats, peers, strict=True)
        self.queue.flush([Send(flat.number, self.group, peer, channel) for flat, peer in pairs])

    def receive(self, like: Tensor, peer: int, channel: int) -> Tensor:
        """Return the elements of a tensor that a rank sends, flattened.

        Args:
            like: A tensor of its type and size.
            peer: The rank.
            channel: Channel of the transfer.
        """
        handle = Handle(self.queue, self.queue.new_number())
        spec = TensorSpec(dtype_name(like.dtype), (like.numel(),))
        self.queue.before(Receive(handle.number, spec, self.group, peer, channel))
        return wrap(handle, dense(like.dtype, (like.numel(),)))

    def leave(self) -> None:
        """Leave the group; ranks that wait there for this one get an error."""
        _release(self.queue)
        with contextlib.suppress(OneboxError):  # nothing to leave in a closed pool
            self.queue.flush([LeaveGroup(self.group)])

    def _flat(self, tensor: Tensor) -> Handle:
        return handle_of(tensor.detach().reshape(-1))


_lock = threading.Lock()
_claims: weakref.WeakKeyDictionary[CommandQueue, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The devices that ranks use, with the rank's thread and the number of communicators."""


def _claim(queue: CommandQueue) -> None:
    """Reserve a device for this rank: two ranks' requests on one device could each wait for what is behind the
    other."""
    own = threading.get_ident()
    with _lock:
        thread, count = _claims.get(queue, (own, 0))
        if thread != own:
            raise UsageError(f"{queue.device} is another rank's already: let each rank have devices of its own")
        if not count:
            queue.pool.claim(queue.worker)
            queue.channel.begin_rank()
        _claims[queue] = own, count + 1


def _release(queue: CommandQueue) -> None:
    with _lock:
        thread, count = _claims.pop(queue, (0, 0))
        if count > 1:
            _claims[queue] = thread, count - 1
        elif count:
            queue.channel.end_rank()
            with contextlib.suppress(OneboxError):  # nothing to release in a closed pool
                queue.pool.release(queue.worker)


def form(store: Any, name: str, queue: CommandQueue, rank: int, size: int) -> Communicator:
    """Form the group of the workers whose devices the ranks of a process group use; all ranks call it.

    Args:
        store: A key-value store that the ranks share.
        name: Name of the group, unique in the store.
        queue: Command queue of this rank's device.
        rank: This rank.
        size: Number of ranks.

    Raises:
        UsageError: The device is another rank's.
        OneboxError: The group could not be formed.
    """
    _claim(queue)
    try:
        store.set(f"{name}/{rank}", str(queue.worker))
        workers = [int(store.get(f"{name}/{other}")) for other in range(size)]
        if rank == 0:
            store.set(name, str(queue.pool.form_group(workers, "workers")))
        tagged = not any(queue.pool.nccl_ranks(workers))
        return Communicator(queue, int(store.get(name)), rank, size, tagged=tagged)
    except BaseException:
        _release(queue)
        raise
