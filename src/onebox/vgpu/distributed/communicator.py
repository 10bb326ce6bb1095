"""A communicator: one rank's device in a group of workers, and what it exchanges with the others there.

Everything is recorded and sent without waiting. A device does one thing after the other, and waits for the other ranks
with the first operator on a result: so nothing is recorded on one here. What goes from worker to worker does not pass
the client.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.errors import OneboxError, UsageError
from onebox.vgpu.core.handle import Handle
from onebox.vgpu.core.metadata import dense
from onebox.vgpu.core.tensor import VirtualTensor, wrap
from onebox.vgpu.dispatch.dispatch import launch
from onebox.vgpu.runtime.command_queue import CommandQueue
from onebox.wire import TensorSpec, dtype_name
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.instructions import Gather, Receive, Reduce, Send

aten = torch.ops.aten


class Communicator:
    """One rank's place in a group of workers.

    Args:
        stream: The rank's device.
        group: The number of the group, whose ranks are those of the workers.
        rank: This rank.
        size: How many there are.
    """

    def __init__(self, stream: CommandQueue, group: int, rank: int, size: int) -> None:
        self.stream = stream
        self.group = group
        self.rank = rank
        self.size = size

    def total(self, tensor: VirtualTensor) -> VirtualTensor:
        """Return the sum of each rank's tensor, in the order of the ranks; the tensor stays as it is.

        Args:
            tensor: Of the same shape and type on all ranks.
        """
        alias = launch(self.stream, aten.alias.default, tensor)  # a buffer of its own, which the sum then replaces
        self.stream.flush([Reduce((alias._handle.number,), self.group)])
        return wrap(alias._handle, dense(tensor.dtype, tuple(tensor.shape)))

    def joined(self, tensor: VirtualTensor, numel: int) -> VirtualTensor:
        """Return the elements of each rank's tensor in one flat tensor, in the order of the ranks.

        Args:
            tensor: Of the same type on all ranks; shapes may differ.
            numel: Elements of all of them.
        """
        flat = self._flat(tensor)
        handle = Handle(self.stream, self.stream.new_number())
        spec = TensorSpec(dtype_name(tensor.dtype), (numel,))
        self.stream.flush([Gather(flat._handle.number, handle.number, spec, self.group)])
        return wrap(handle, dense(tensor.dtype, (numel,)))

    def send(self, tensors: Sequence[VirtualTensor], peers: Sequence[int], channel: int) -> None:
        """Send tensors to ranks, each to its own.

        Args:
            tensors: The tensors.
            peers: The ranks.
            channel: What is sent to a rank on a channel arrives in order.
        """
        flats = [self._flat(tensor) for tensor in tensors]
        pairs = zip(flats, peers, strict=True)
        self.stream.flush([Send(flat._handle.number, self.group, peer, channel) for flat, peer in pairs])

    def receive(self, like: Tensor, peer: int, channel: int) -> VirtualTensor:
        """Return the elements of a tensor that a rank sends, flat.

        Args:
            like: A tensor of its type and size.
            peer: The rank.
            channel: On which it is sent.
        """
        handle = Handle(self.stream, self.stream.new_number())
        spec = TensorSpec(dtype_name(like.dtype), (like.numel(),))
        self.stream.before(Receive(handle.number, spec, self.group, peer, channel))
        return wrap(handle, dense(like.dtype, (like.numel(),)))

    def leave(self) -> None:
        """Leave the group; ranks that wait there for this one are told that it will not come."""
        _release(self.stream)
        with contextlib.suppress(OneboxError):  # of a pool that is gone there is nothing to leave
            self.stream.flush([LeaveGroup(self.group)])

    def _flat(self, tensor: VirtualTensor) -> Any:
        return tensor.detach().reshape(-1)


_lock = threading.Lock()
_claims: weakref.WeakKeyDictionary[CommandQueue, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The devices that ranks use, by the thread that is the rank and the number of communicators."""


def _claim(stream: CommandQueue) -> None:
    """Note that a device is this rank's: what two ranks ask of one could each wait for what is behind the other."""
    own = threading.get_ident()
    with _lock:
        thread, count = _claims.get(stream, (own, 0))
        if thread != own:
            raise UsageError(f"{stream.device} is another rank's already: let each rank have devices of its own")
        _claims[stream] = own, count + 1


def _release(stream: CommandQueue) -> None:
    with _lock:
        thread, count = _claims.pop(stream, (0, 0))
        if count > 1:
            _claims[stream] = thread, count - 1


def form(store: Any, name: str, stream: CommandQueue, rank: int, size: int) -> Communicator:
    """Form the group of the workers whose devices the ranks of a process group use; all ranks call it.

    Args:
        store: A key-value store that the ranks share.
        name: Of the group, unique in the store.
        stream: This rank's device.
        rank: This rank.
        size: How many there are.

    Raises:
        UsageError: The device is another rank's.
        OneboxError: The group could not be formed.
    """
    _claim(stream)
    try:
        store.set(f"{name}/{rank}", str(stream.worker))
        workers = [int(store.get(f"{name}/{other}")) for other in range(size)]
        if rank == 0:
            store.set(name, str(stream.pool.form_group(workers, "workers")))
        return Communicator(stream, int(store.get(name)), rank, size)
    except BaseException:
        _release(stream)
        raise
