"""A process group of ``torch.distributed`` whose ranks, threads or processes, have a virtual device each.

Its collectives are those of the workers. As with NCCL, the client does not wait for them: a device executes
sequentially, and ``wait`` orders later operators after the collective.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.errors import UsageError
from onebox.vgpu.core.tensor import command_queue_of, is_virtual
from onebox.vgpu.dispatch.copies import upload
from onebox.vgpu.distributed.collective_work import CollectiveWork, PendingWrite, storages_of, write_in_order
from onebox.vgpu.distributed.communicator import Communicator, form
from onebox.vgpu.runtime import context
from onebox.vgpu.runtime.command_queue import CommandQueue

NAME = "onebox"
"""The backend, for ``torch.distributed.init_process_group``."""

Ops: Any = dist.ReduceOp.RedOpType
_Base: Any = dist.ProcessGroup  # its types differ between versions

_COLLECTIVE = 1
"""The channel of collectives; a message with tag t uses channel 2 t."""

_FOLDS: dict[Any, Callable[[Tensor], Tensor]] = {
    Ops.SUM: lambda parts: parts.sum(0, dtype=parts.dtype),
    Ops.PRODUCT: lambda parts: parts.prod(0, dtype=parts.dtype),
    Ops.MIN: lambda parts: parts.amin(0),
    Ops.MAX: lambda parts: parts.amax(0),
    Ops.BAND: lambda parts: functools.reduce(torch.bitwise_and, parts.unbind()),
    Ops.BOR: lambda parts: functools.reduce(torch.bitwise_or, parts.unbind()),
    Ops.BXOR: lambda parts: functools.reduce(torch.bitwise_xor, parts.unbind()),
}
"""Reductions of the ranks' tensors along a new first dimension."""


def _kind(op: Any) -> Any:
    """Return the reduction of an option.

    Raises:
        UsageError: It is not supported.
    """
    for known in (Ops.AVG, *_FOLDS):
        if op == known:
            return known
    raise UsageError(f"{op} is no reduction of virtual devices: sum, avg, product, min, max, band, bor and bxor are")


def _fold(parts: Tensor, op: Any) -> Tensor:
    """Reduce the tensors of all ranks along the first dimension."""
    return _averaged(_FOLDS[Ops.SUM](parts), len(parts)) if op == Ops.AVG else _FOLDS[op](parts)


def _piece(flat: Tensor, start: int, end: int) -> Callable[[], Tensor]:
    return lambda: flat[start:end]


def _averaged(total: Tensor, size: int) -> Tensor:
    exact = total.is_floating_point() or total.is_complex()
    return total.div(size, rounding_mode=None if exact else "trunc")


def _issuing(call: Callable[..., list[PendingWrite]]) -> Callable[..., CollectiveWork]:
    """Decorator for methods that return pairs of target and source, to return the work instead."""

    @functools.wraps(call)
    def issue(self: VirtualProcessGroup, *args: Any, **kwargs: Any) -> CollectiveWork:
        with torch.no_grad():
            write_in_order(self, storages_of((args, *kwargs.values())))  # a group is in order, as with NCCL
            self.write_unwaited()
            pairs = call(self, *args, **kwargs)
        targets = [target for target, _ in pairs]
        return CollectiveWork(self, pairs, targets, [self._queue(target) for target in targets])

    return issue


def _same(tensor: Tensor) -> PendingWrite:
    return tensor, lambda: tensor


class VirtualProcessGroup(_Base):
    """A process group over virtual devices; each rank belongs to a thread, or to a process that shares the pool.

    A rank's device is determined by its first collective, as with NCCL: that of the tensor; for a host tensor the one
    that the rank has chosen, or that of its number on its host.

    Args:
        store: A key-value store that the ranks share.
        rank: This rank.
        size: Number of ranks.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._formed = 0
        self._communicators: dict[CommandQueue, Communicator] = {}
        self._names = ("", "")

    def _set_group_name(self, name: str) -> None:
        self._names = (name, self._names[1])

    def _set_group_desc(self, description: str) -> None:
        self._names = (self._names[0], description)

    def getGroupName(self) -> str:
        """Return the name by which functional collectives find the group; called by PyTorch's C++ code."""
        return self._names[0]

    def getGroupDesc(self) -> str:
        """Return a description; called by PyTorch's C++ code."""
        return self._names[1]

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def getBackendName(self) -> str:
        """Return the name of the backend; called by PyTorch's C++ code."""
        return NAME

    name = getBackendName

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        """Leave the groups of workers; a rank that waits there for this one gets an error."""
        self.write_unwaited()
        for communicator in self._communicators.values():
            communicator.leave()
        self._communicators.clear()

    abort = shutdown

    def write_unwaited(self) -> None:
        """Write the results that nobody has waited for; see :meth:`CommandQueue.write_unwaited`."""
        for queue in self._communicators:
            queue.write_unwaited()

    # ---- tensors

    def _queue(self, tensor: Tensor) -> CommandQueue:
        """Return the command queue of a tensor's device; of the rank's one for a host tensor."""
        if is_virtual(tensor):
            return command_queue_of(tensor)
        if self._communicators and not context.has_chosen_device():
            return next(iter(self._communicators))
        return context.queue_of(torch.device("vgpu", context.device_of_rank(self._rank)))

    def _at(self, tensor: Tensor) -> Communicator:
        """Return the communicator of a tensor's device; formed with the first tensor there.

        A rank that cannot do its part because of a failure leaves it. Then each rank is told of a failure once, with
        its next collective at the latest, and all form another group with the first one after that.

        Raises:
            OneboxError: It could not be formed; or the failure, if the script has not been told of it.
            torch.OutOfMemoryError: Likewise, a lack of memory.
        """
        queue = self._queue(tensor)
        found = self._communicators.get(queue)
        if found is not None and found.has_failed():
            queue.synchronize()
            queue.channel.require_told(found.moment)
            self._communicators.pop(queue).leave()
            found = None
        if found is None:
            self._formed += 1
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store over restarts
            found = form(self._store, f"devices{self._formed}/{restarts}", queue, self._rank, self._size)
            self._communicators[queue] = found
        found.moment = queue.channel.moment
        return found

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a tensor, or the copy of a host tensor on the rank's device."""
        return tensor if is_virtual(tensor) else upload(tensor, self._at(tensor).queue)

    # ---- reductions

    def _reduced(self, tensor: Tensor, op: Any) -> PendingWrite:
        kind = _kind(op)
        at, there, size = self._at(tensor), self._there(tensor), self._size
        if not tensor.numel():
            return _same(tensor)
        if kind in (Ops.SUM, Ops.AVG) and tensor.dtype != torch.bool:
            total = at.total(there)
            return tensor, lambda: _averaged(total, size) if kind == Ops.AVG else total
        parts = at.joined(there, [tensor.numel()] * size)
        return tensor, lambda: _fold(parts.view(size, -1), kind)

    @_issuing
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Reduce tensors over the ranks, in place."""
        op = Ops.SUM if opts is None else opts.reduceOp
        return [self._reduced(tensor, op) for tensor in tensors]

    allreduce_coalesced = allreduce

    @_issuing
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """Reduce tensors over the ranks, in place on one of them."""
        pairs = [self._reduced(tensor, opts.reduceOp) for tensor in tensors]
        return pairs if opts.rootRank == self._rank else []

    @_issuing
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        """Reduce one tensor for each rank; each rank gets one result."""
        op = Ops.SUM if opts is None else opts.reduceOp
        return [self._scattered(output, parts, op) for output, parts in zip(outputs, inputs, strict=True)]

    def _scattered(self, output: Tensor, parts: Sequence[Tensor] | Tensor, op: Any) -> PendingWrite:
        kind = _kind(op)
        if not output.numel():
            return _same(output)
        pairs = self._exchanged([output] * self._size, parts)
        return output, lambda: _fold(torch.stack([result().reshape(-1) for _, result in pairs]), kind)

    @_issuing
    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        """Reduce tensors and give each rank an equal part of each."""
        pairs = zip(outputs, inputs, strict=True)
        return [self._scattered(out, given.reshape(self._size, *out.shape), opts.reduceOp) for out, given in pairs]

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any) -> CollectiveWork:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    # ---- equal results on all ranks

    @_issuing
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """Copy one rank's tensors to all ranks."""
        if opts.rootRank != self._rank:
            return [self._received(tensor, opts.rootRank) for tensor in tensors]
        peers = [peer for peer in range(self._size) if peer != self._rank]
        for tensor in tensors:
            self._at(tensor).send([self._there(tensor)] * len(peers), peers, _COLLECTIVE)
        return [_same(tensor) for tensor in tensors]

    @_issuing
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Gather the tensors of all ranks on every rank; their shapes may differ."""
        pairs = []
        for parts, given in zip(outputs, inputs, strict=True):
            sizes = [part.numel() for part in parts]
            ends = list(itertools.accumulate(sizes))
            flat = self._at(given).joined(self._there(given), sizes)
            pairs += [(part, _piece(flat, end - part.numel(), end)) for part, end in zip(parts, ends, strict=True)]
        return pairs

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> CollectiveWork:
        """Gather likewise, with the lists transposed: for each rank its tensors."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    @_issuing
    def allgather_into_tensor_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        """Gather the tensors of all ranks on every rank, concatenated."""
        pairs = []
        for output, given in zip(outputs, inputs, strict=True):
            flat = self._at(given).joined(self._there(given), [given.numel()] * self._size)
            pairs.append((output, _piece(flat, 0, output.numel())))
        return pairs

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> CollectiveWork:
        return self.allgather_into_tensor_coalesced([output], [given], opts)

    # ---- from rank to rank

    def _received(self, tensor: Tensor, peer: int, channel: int = _COLLECTIVE) -> PendingWrite:
        if not tensor.numel():
            return _same(tensor)
        flat = self._at(tensor).receive(tensor, peer, channel)
        return tensor, lambda: flat

    def _sent(self, tensors: Sequence[Tensor], peers: Sequence[int], channel: int = _COLLECTIVE) -> None:
        """Send ranks their tensors, except empty ones."""
        pairs = [(self._there(given), peer) for given, peer in zip(tensors, peers, strict=True) if given.numel()]
        if pairs:
            there, known = zip(*pairs, strict=True)
            self._at(there[0]).send(there, known, channel)

    def _exchanged(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor] | Tensor) -> list[PendingWrite]:
        """Send each rank its tensor, and return the tensors that each has sent to this one.

        Args:
            outputs: Tensors of the types and sizes of those received.
            inputs: The tensors to send.
        """
        peers = [peer for peer in range(self._size) if peer != self._rank]
        self._sent([inputs[peer] for peer in peers], peers)
        own = self._there(inputs[self._rank]).clone()
        return [
            (output, lambda: own) if peer == self._rank else self._received(output, peer)
            for peer, output in enumerate(outputs)
        ]

    @_issuing
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Exchange one tensor between every two ranks."""
        return self._exchanged(outputs, inputs)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> CollectiveWork:
        """Exchange parts of each rank's tensor, along the first dimension, between every two ranks."""
        outputs = output.split(list(output_sizes) or output.size(0) // self._size)
        return self.alltoall(outputs, given.split(list(input_sizes) or given.size(0) // self._size))

    @_issuing
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Any:
        """Gather the tensors of all ranks on one rank."""
        (given,) = inputs
        if opts.rootRank != self._rank:
            self._sent([given], [opts.rootRank])
            return []
        own = self._there(given).clone()
        return [
            (output, lambda: own) if peer == self._rank else self._received(output, peer)
            for peer, output in enumerate(outputs[0])
        ]

    @_issuing
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Any:
        """Give each rank one of one rank's tensors."""
        (output,) = outputs
        if opts.rootRank != self._rank:
            return [self._received(output, opts.rootRank)]
        peers = [peer for peer in range(self._size) if peer != self._rank]
        self._sent([inputs[0][peer] for peer in peers], peers)
        own = inputs[0][self._rank].clone()
        return [(output, lambda: own)]

    @_issuing
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        """Send a tensor to a rank.

        Raises:
            UsageError: GPUs exchange messages without tags.
        """
        self._require_tags(tensors, tag)
        for tensor in tensors:
            self._sent([tensor], [peer], 2 * tag)
        return [_same(tensor) for tensor in tensors]

    @_issuing
    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        """Receive a tensor from a rank.

        Raises:
            UsageError: GPUs exchange messages without tags.
        """
        self._require_tags(tensors, tag)
        return [self._received(tensor, peer, 2 * tag) for tensor in tensors]

    def _require_tags(self, tensors: Sequence[Tensor], tag: int) -> None:
        if tag and not all(self._at(tensor).tagged for tensor in tensors):
            raise UsageError(
                f"tag={tag}: NCCL has no tags; leave it out, and receive from a rank in its order of sends"
            )

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> CollectiveWork:
        """Raise an error: the sender must be given.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("a virtual device receives from a rank that is named: torch.distributed.recv(src=…)")

    @_issuing
    def barrier(self, opts: Any = None) -> Any:
        """Wait until all ranks have reached the barrier and their devices have finished all earlier operators."""
        here = torch.zeros(1)
        return [self._reduced(here, Ops.SUM)]

    # names in torch 2.13 of methods that torch 2.11 names otherwise
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def create(options: Any, _: Any = None) -> VirtualProcessGroup:
    """Return this rank's process group; called by ``torch.distributed`` for the backend's name.

    Args:
        options: Options of ``torch.distributed``: store, rank and size.
    """
    return VirtualProcessGroup(options.store, options.group_rank, options.group_size)


def register() -> None:
    """Register the backend with ``torch.distributed``."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["vgpu", "cpu"])


__all__ = ["NAME", "VirtualProcessGroup", "register"]
