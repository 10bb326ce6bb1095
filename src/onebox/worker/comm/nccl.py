"""Groups over NCCL, between GPUs.

The rules of ``torch.distributed.ProcessGroupNCCL``, 2.11 to 2.13, that determine this module:

- The operations of one communicator run one after the other on its own stream, in the order in which the host calls
  them; tags are ignored. So a receive that is called before its tensor exists holds up all that follow it. Each
  direction between two ranks is therefore a communicator of its own: its sender only sends and its receiver only
  receives, and the n-th send there is the n-th receive. Plans make both in one order
- A communicator that is made at its first use holds up the host until both ranks come to it. All of them are made when
  the group is formed, in one order on all ranks. After ``eager_connect_single_device``, point-to-point operations use
  the communicator of the process group instead of a new one for each pair
- A wait for an operation makes the current stream wait, not the host, and never fails. The host notices a failure when
  it waits for the device, and what was computed on the device meanwhile is undefined: see :meth:`NcclGroup.check`
- An abort ends the kernels of a communicator, whose results are then undefined. It may hang
- Its threads use the store at any time: see :class:`~onebox.worker.comm.client.ChannelStore`
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.responses import Joined
from onebox.worker.accelerator import Accelerator, Event
from onebox.worker.comm.agreement import (
    FINGERPRINT_ELEMENTS,
    check_fingerprints,
    collective_fingerprint,
    fingerprint_elements,
)
from onebox.worker.comm.api import Begun, Finish, RankLost, ReceivedTensor, RowRange, check_rows, parts_of
from onebox.worker.progress import WorkerProgress

REACH = 4
"""Distance, in the ring of ranks, up to which two ranks send to each other by NCCL. A communicator takes tens of MiB of
each GPU's memory, so a rank has at most four times as many, however large its group is; up to nine ranks all reach each
other."""

ABORT_S = 5.0
"""Longest time that aborting communicators may take; the process ends after it."""

FREE_S = 10.0
"""Longest time that a thread may stay in one call after the abort that should have ended it."""

CLOSE_S = 5.0
"""Longest wait of a leaving worker for its sends to be received."""

_HEAD_BYTES = 16

_COLLECT, _BROADCAST = 1, 2  # fingerprints of collectives other than an all-reduce

_FEW = 32
"""Operations up to which completed ones are not looked for."""

_STAGED = 64
"""Fingerprints of collectives that may be on their way to the host at a time."""

_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error of a peer must not end this process: it is reported
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # uses the store
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # polls the store
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # would end this process when an abort takes long
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # polls the store
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # about what the directions are for
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # after an error its thread sleeps for four times as long
}


def connect(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Return a communicator as a ``ProcessGroupNCCL``, made when all ranks are there.

    Args:
        store: Key-value store of these ranks alone.
        rank: This rank.
        size: Number of ranks.
        device: This rank's GPU.
        timeout: Bound of its operations.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 1
    made = dist.ProcessGroupNCCL(store, rank, size, options)
    made.eager_connect_single_device(device)
    return made


def directions(size: int) -> Iterator[tuple[int, int]]:
    """Return the pairs of sender and receiver that have a communicator, in the order in which they are made.

    Example:
        >>> list(directions(2))
        [(0, 1), (1, 0)]
        >>> sum(0 in pair for pair in directions(100))
        16
    """
    for one in range(size):
        for other in range(one + 1, size):
            if min(other - one, size - other + one) <= REACH:
                yield one, other
                yield other, one


@functools.cache
def _staging(accelerator: Accelerator) -> deque[Tensor]:
    """Return unused page-locked memory for fingerprints; it stays locked, as unlocking waits for the whole device."""
    return deque(accelerator.pinned(_STAGED * 8 * FINGERPRINT_ELEMENTS).split(8 * FINGERPRINT_ELEMENTS))


def end_process(reason: str) -> None:
    """End this process, so that recovery replaces it."""
    print(f"onebox worker: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


class NcclGroup:
    """A group of GPUs: a communicator for collectives, and one for each direction.

    Args:
        form: The group, with this worker's rank; the GPUs of ``form.nccl`` are its members.
        store: Key-value store for the rendezvous.
        accelerator: Device of the tensors.
        progress: Marked during waits.
    """

    def __init__(
        self,
        form: FormGroup,
        store: dist.Store,
        accelerator: Accelerator,
        progress: WorkerProgress,
    ) -> None:
        rank, size = form.nccl.index(form.rank), len(form.nccl)
        os.environ.update(_SETTINGS)
        self._store = store  # PyTorch's threads refer to it
        self._form = form
        self._failure = ""
        self._interrupting = threading.Lock()
        self._works: list[tuple[Any, Sequence[Tensor], bool, int]] = []
        self._most = _FEW
        self._agreed: set[int] = set()
        self._unread: deque[tuple[Event, Tensor, Callable[[Tensor], None], int]] = deque()
        self._staging = _staging(accelerator) if accelerator.asynchronous else None  # type: ignore[arg-type]
        self._ways: dict[tuple[int, int], Any] = {}
        timeout = timedelta(seconds=form.timeout_s)
        make = functools.partial(connect, device=accelerator.device, timeout=timeout)
        store = dist.PrefixStore(f"nccl-{form.nccl[0]}", store)  # ranks of other hosts may have a set of their own
        whole = make(dist.PrefixStore("all", store), rank, size)
        self.rank = rank
        self._size = size
        self._group = whole
        self._accelerator = accelerator
        self._device = accelerator.device
        self._progress = progress
        self._order = 0
        try:
            for way in directions(size):
                if rank in way:
                    prefix = dist.PrefixStore("{}-{}".format(*way), store)
                    self._ways[way] = make(prefix, way.index(rank), 2)  # rank 0 sends, and rank 1 receives
        except BaseException:
            self._abort([self._group, *self._ways.values()])
            raise

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of the formed group, which may have other members, that are reached by NCCL."""
        return tuple(self._form.nccl[target] for source, target in self._ways if source == self.rank)

    @property
    def joined(self) -> Joined:
        """Return that no memory is shared."""
        return Joined()

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        specs = [spec_of(tensor) for tensor in tensors]
        fingerprint = self._fingerprint(specs)
        flat = self._flat(tensors, fingerprint)
        work = self._begin(lambda: self._group.allreduce([flat]), flat)
        return self._finish([work], self._checked(flat, specs, fingerprint, self._size))

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank."""
        self._check_root(root)
        specs = [spec_of(tensor) for tensor in tensors]
        fingerprint = self._fingerprint(specs, _COLLECT, root)
        flat = self._flat(tensors, fingerprint)
        options = dist.ReduceOptions()
        options.rootRank = root
        work = self._begin(lambda: self._group.reduce([flat], options), flat, sent=self.rank != root)
        if self.rank == root:
            return self._finish([work], self._checked(flat, specs, fingerprint, self._size))
        return time.monotonic_ns()

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank."""
        self._check_root(root)
        fingerprint = self._fingerprint(specs, _BROADCAST, root)
        if self.rank == root:
            flat = self._flat(tensors, fingerprint)
        else:
            dtype = DTYPES[specs[0].dtype]
            count = sum(prod(spec.shape) for spec in specs) * (2 if dtype.is_complex else 1) + FINGERPRINT_ELEMENTS
            flat = torch.empty(count, dtype=dtype.to_real(), device=self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work = self._begin(lambda: self._group.broadcast([flat], options), flat, sent=self.rank == root)
        if self.rank != root:
            return self._finish([work], self._checked(flat, specs, fingerprint, 1))
        return time.monotonic_ns()

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise WireError(f"rank {root} of a group of {self._size}; allowed are 0 to {self._size - 1}")

    def _fingerprint(self, specs: Sequence[TensorSpec], *more: int) -> tuple[int, int]:
        """Return the number of the next collective, and the fingerprint of this rank's call."""
        order, self._order = self._order, self._order + 1
        return order, collective_fingerprint(order, specs, *more)

    def _flat(self, tensors: Sequence[Tensor], fingerprint: tuple[int, int]) -> Tensor:
        """Return tensors as one real tensor, with the fingerprint appended."""
        parts = [as_real(tensor).reshape(-1) for tensor in tensors]
        fingerprint_part = fingerprint_elements(fingerprint[1], parts[0].dtype, self._size, self._device)
        return torch.cat([*parts, fingerprint_part])

    def _checked(
        self, flat: Tensor, specs: Sequence[TensorSpec], fingerprint: tuple[int, int], times: int
    ) -> Callable[[], Tensor]:
        """Return a function that returns the received elements after checking the fingerprint; ``times`` is its
        multiplicity.
        """
        order, own = fingerprint
        kind = collective_fingerprint(times, specs)

        def made() -> Tensor:
            self._require(
                flat[-FINGERPRINT_ELEMENTS:],
                kind,
                lambda summed: check_fingerprints(summed, own, self._size, order, times=times),
            )
            elements = flat[:-FINGERPRINT_ELEMENTS]
            complex_made = elements.dtype is not DTYPES[specs[0].dtype]
            return torch.view_as_complex(elements.view(-1, 2)) if complex_made else elements

        return made

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension.

        Each rank sends as many bytes as the longest part has, behind the fingerprint of its call.

        Raises:
            WireError: The tensor is no such part; or later, another rank's call differs.
        """
        order, self._order = self._order, self._order + 1
        specs = parts_of(spec_of(tensor), spec, dim, sizes, self.rank)
        if len(specs) != self._size:
            raise WireError(f"{len(specs)} parts of a gather in a group of {self._size}")
        fingerprint = crc32(f"gather {order} {spec} {dim} {sizes}".encode())
        longest = max(part.size_bytes for part in specs)
        mine = torch.zeros(_HEAD_BYTES + longest, dtype=torch.uint8, device=self._device)
        mine[:_HEAD_BYTES].view(torch.int64).fill_(fingerprint)
        mine[_HEAD_BYTES : _HEAD_BYTES + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in specs]
        work = self._begin(lambda: self._group.allgather([parts], [mine]), mine, *parts)

        def check(seen: Tensor) -> None:
            if (rank := int(seen[0])) >= 0:
                raise WireError(f"rank {rank} came for another gather than that of {spec} along dimension {dim}")

        def made() -> Tensor:
            others = torch.stack([part[:_HEAD_BYTES].view(torch.int64)[0] for part in parts]) != fingerprint
            first = torch.where(others.any(), others.to(torch.uint8).argmax(), -1).reshape(1)
            self._require(first, crc32(f"gather {spec} {dim} {sizes}".encode()), check)
            dtype, end = DTYPES[spec.dtype], _HEAD_BYTES
            dense = [
                part[end : end + of.size_bytes].view(dtype).view(of.shape)
                for part, of in zip(parts, specs, strict=True)
            ]
            return torch.cat(dense, dim)

        return self._finish([work], made)

    def _finish(self, works: Sequence[Any], made: Callable[[], Tensor]) -> Finish:
        def finish() -> ReceivedTensor:
            with self._progress.wait():
                for work in works:
                    self._guard(work.wait)
            return ReceivedTensor(made(), time.monotonic_ns())

        return finish

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Begin to send a tensor to a rank with its present contents, after all that has been sent to that rank."""
        dense = tensor.contiguous()
        if dense.data_ptr() == tensor.data_ptr():
            dense = dense.clone()
        way = self._way(self.rank, self._form.nccl.index(peer))
        self._begin(lambda: way.send([as_real(dense)], 1, 0), dense, sent=True)
        return time.monotonic_ns()

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank: the next one that it sends, in any channel.

        Raises:
            WireError: The chunks do not form the whole.
        """
        check_rows(spec, rows)
        tensor = self._accelerator.empty(spec.shape, DTYPES[spec.dtype])
        way = self._way(self._form.nccl.index(peer), self.rank)
        parts = tensor.split(list(rows)) if rows else [tensor]
        works = [self._begin(functools.partial(way.recv, [as_real(part)], 0, 0), part) for part in parts]
        return self._finish(works, lambda: tensor)

    def check(self) -> int:
        """Return this worker's progress when the oldest operation began that is not complete; 0 for none.

        Raises:
            RankLost: One was interrupted or has failed.
        """
        self._sort()
        if self._failure:
            raise RankLost(self._failure)
        return min((begun for *_, begun in (*self._works, *self._unread)), default=0)

    def attend(self) -> bool:
        """Return that nothing is needed of the client."""
        return False

    def interrupt(self, reason: str = "another worker of the group does not answer") -> None:
        """Abort all communicators, in another thread; end this process if they or their waits do not end."""
        with self._interrupting:
            if self._failure:
                return
            self._failure = reason
        threading.Thread(target=self._free, name="onebox-abort", daemon=True).start()

    def close(self) -> None:
        """Leave the group when sends have ended, or after a timeout; what peers still wait for does not come.

        What this rank has not received is undefined from then on: :meth:`check` fails.
        """
        if self._group is None:
            return
        end_s = time.monotonic() + CLOSE_S
        with self._progress.wait():
            while not self._failure and self._sends() and time.monotonic() < end_s:
                time.sleep(0.001)
                self._sort()
            self._sort()
            if any(not sent for _, _, sent, _ in self._works):
                self._failure = self._failure or "this worker left the group before it had received everything"
            communicators = [self._group, *self._ways.values()]
            self._group = None
            self._ways.clear()
            self._abort(communicators)
        self._works.clear()

    def _sends(self) -> bool:
        """Return whether something of this rank, or the check of something that it has received, is not complete."""
        return bool(self._unread) or any(sent for _, _, sent, _ in self._works)

    def _require(self, summed: Tensor, kind: int, check: Callable[[Tensor], None]) -> None:
        """Have the fingerprints of the first collective of a kind checked when they have come to the host, which does
        not wait for them; the group has then failed if they differ.

        Args:
            summed: Their sum, or another tensor of as many bytes at most, on the device.
            kind: The same number for all collectives with the same types and sizes.
            check: Checks it in the host's memory; raises :class:`WireError` if they differ.
        """
        if self._staging is None:
            check(summed)
        elif kind not in self._agreed and self._staging:
            self._agreed.add(kind)
            seen = self._staging.popleft()[: summed.nbytes].view(summed.dtype)
            seen.copy_(summed, non_blocking=True)
            self._unread.append((self._accelerator.current().record(), seen, check, self._progress_now()))

    def _way(self, source: int, target: int) -> Any:
        way = self._ways.get((source, target))
        if way is None:
            raise RankLost(f"no direction from rank {source} to rank {target} in a group of {self._size} over NCCL")
        return way

    def _begin(self, call: Callable[[], Any], *tensors: Tensor, sent: bool = False) -> Any:
        """Begin an operation on a tensor and return its work; the tensors are kept until it is complete."""
        work = self._guard(call)
        self._works.append((work, tensors, sent, self._progress_now()))
        if len(self._works) > self._most:
            self._sort()
            self._most = _FEW + 2 * len(self._works)
        return work

    def _progress_now(self) -> int:
        return max(1, self._progress.executed)

    def _sort(self) -> None:
        """Release what is complete, and interrupt the group if an operation has failed."""
        left = []
        for work, tensors, sent, begun in self._works:
            if not work.is_completed():
                left.append((work, tensors, sent, begun))
            elif (error := work.exception()) is not None:
                self.interrupt(str(error).splitlines()[0])
        self._works = left
        while self._unread and self._unread[0][0].query():
            _, seen, check, _ = self._unread.popleft()
            try:
                check(seen)
            except WireError as error:
                self.interrupt(str(error))
            assert self._staging is not None
            self._staging.append(seen.view(torch.uint8))

    def _guard(self, call: Callable[[], Any]) -> Any:
        if self._failure:
            raise RankLost(self._failure)
        if self._group is None:
            raise RankLost("the group has been left")
        try:
            made = call()
        except RuntimeError as error:
            raise RankLost(self._failure or str(error).splitlines()[0]) from error
        if self._failure:  # a wait for an aborted operation ends without an error
            raise RankLost(self._failure)
        return made

    def _abort(self, communicators: list[Any]) -> None:
        """Abort communicators and release those of the list; end this process if that takes too long."""
        threads = []
        while communicators:
            each = communicators.pop()
            threads.append(threading.Thread(target=_abort, args=(each,), name="onebox-abort", daemon=True))
            del each  # the last reference is the thread's: releasing one waits for PyTorch's threads
            threads[-1].start()
        end_s = time.monotonic() + ABORT_S
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            end_process(f"NCCL has not ended the communicators of group {self._form.group} within {ABORT_S:.0f} s")

    def _free(self) -> None:
        """Abort all communicators, and see the working thread go on."""
        progress = self._progress
        before = progress.executed
        group = self._group
        self._abort([*self._ways.values()] + ([] if group is None else [group]))
        del group
        end_s = time.monotonic() + FREE_S
        while time.monotonic() < end_s:
            if progress.executed != before or progress.waiting or self._group is None:  # it has left the group
                return
            time.sleep(0.01)
        end_process(f"a wait for group {self._form.group} has not ended {FREE_S:.0f} s after it was interrupted")


def _abort(communicator: Any) -> None:
    with suppress(RuntimeError):
        communicator.abort()


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one, as NCCL has no complex numbers: real and imaginary parts side by side."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
