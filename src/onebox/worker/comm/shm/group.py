"""Groups of workers on one host, over shared memory: no sockets, and one wait at the end.

A rank sends tensors by copying them into memory that the others map (see :mod:`onebox.worker.comm.shm.layout`). Large
ones are used in place without another copy (``benchmarks/transfers.py``); an accelerator copies to and from there
asynchronously (see :mod:`onebox.worker.comm.shm.gpu_sender`).

In an all-reduce each rank adds all parts itself, in the order of the ranks, so that results are bitwise equal on all
ranks: for n ranks a bucket of S bytes costs each rank one copy and one sum of n parts (``benchmarks/scaling.py``). In a
reduction to one rank only that rank adds, in the same order; in a broadcast all readers share one block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.responses import Joined
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.agreement import collective_fingerprint
from onebox.worker.comm.api import Begun, Finish, RankLost, ReceivedTensor, RowRange, check_rows, parts_of
from onebox.worker.comm.collectives import code_of, disagreement, flat_spec
from onebox.worker.comm.shm.arena import MemoryBlock
from onebox.worker.comm.shm.collective import ShmCollective
from onebox.worker.comm.shm.gpu_sender import GpuShmSender, ShmCopier
from onebox.worker.comm.shm.layout import ShmMessage, check_dimensions
from onebox.worker.comm.shm.receiver import PendingReceive, ShmReceiver
from onebox.worker.comm.shm.rendezvous import ShmPeers
from onebox.worker.comm.shm.sender import BlockRegion, ShmSender, region_of
from onebox.worker.memory.shared import SharedMemoryQuota
from onebox.worker.progress import WorkerProgress

ROOM_S = 90.0
"""Longest wait for readers where there is no room for another message: longer than a reader may wait for its disk."""

_ROOM_STEP_S = 0.001

_MOST_AHEAD_NS = 86_400 * 10**9
"""Longest time from now until a message may be available; an emulated device is ahead of the clock."""

COLLECTIVES = -1 << 62
"""Channel of reductions, gathers and broadcasts."""


class ShmGroup:
    """A group of workers on this host, or the part of a group on this host.

    Args:
        form: The group, with this worker's rank.
        met: Memories of the ranks on this host. Reductions and gathers require those of all ranks.
        accelerator: Device of its tensors.
        progress: Marked during waits.
        copier: Copier for a device whose tensors are not in host memory.
        quota: Counts this worker's shared memory, and limits it.
    """

    def __init__(
        self,
        form: FormGroup,
        met: ShmPeers,
        accelerator: Accelerator,
        progress: WorkerProgress,
        copier: ShmCopier | None = None,
        quota: SharedMemoryQuota | None = None,
    ) -> None:
        self._rank = form.rank
        self._size = form.size
        self._timeout_s = form.timeout_s
        self._accelerator = accelerator
        self._progress = progress
        self._watches = met.watches
        self._apart = met.apart
        self._order = 0
        self._interrupted = False
        self._begun: dict[tuple[int, int], BlockRegion] = {}  # the last part of incomplete tensors, by rank and channel
        self._sender: ShmSender | None = ShmSender(
            met.memories[self._rank],
            self._size,
            paged=met.paged,
            quota=quota,
            wait=self._wait_for_room,
            ended=self._has_ended,
        )
        self._gpu_sender = None if copier is None else GpuShmSender(self._sender, copier)
        ranks = sorted(met.memories)
        self._inboxes = {rank: ShmReceiver(met.memories[rank], rank, self._rank, self._watch) for rank in ranks}

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._rank

    @property
    def joined(self) -> Joined:
        """Return the ranks that share memory with this one."""
        return Joined(tuple(self._inboxes), self._apart)

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a copy of a tensor to a rank; return the time at which it is available, in monotonic nanoseconds.

        For an accelerator it is available when its copy is complete, which is not known here. Parts of one tensor share
        a block, which the reader receives with the last part.

        Raises:
            WireError: It is not the next part.
        """
        sender, begin_ns = self._member(peer), time.monotonic_ns()
        place = region_of(spec_of(tensor), within, self._begun.pop((peer, channel), None))
        last = place.last
        check_dimensions(place.whole)
        if self._gpu_sender is not None:
            place = self._gpu_sender.send(tensor, peer, channel, place)
        else:
            place = sender.write_part(tensor, place)
        if not last:
            self._begun[peer, channel] = place
        if self._gpu_sender is not None or not last:
            return begin_ns
        return sender.post(peer, channel, place.block, place.whole)

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank; it arrives whole, in whatever parts it is sent."""
        check_rows(spec, rows)

        def check(message: ShmMessage) -> None:
            if message.spec != spec:
                raise WireError(f"rank {peer} sent {message.spec} on channel {channel}, where {spec} was to come")

        return self._expect(peer, channel, check)

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        specs = [spec_of(tensor) for tensor in tensors]
        code = code_of("a sum", collective_fingerprint(self._order, specs))
        return self._start(tensors, flat_spec(specs), code, lambda collective, messages: collective.sum(messages))

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank, which receives those of the others."""
        self._member(root)
        specs = [spec_of(tensor) for tensor in tensors]
        code = code_of("a sum for one rank", collective_fingerprint(self._order, specs, root))
        if root != self._rank:
            self._order += 1
            return self._hand_on(tensors, flat_spec(specs), code, [root])
        combine = lambda collective, messages: collective.sum(messages)  # noqa: E731
        return self._start(tensors, flat_spec(specs), code, combine, alone=True)

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank, with a send to each of the others."""
        self._member(root)
        code, spec = code_of("a broadcast", collective_fingerprint(self._order, specs, root)), flat_spec(specs)
        order, self._order = self._order + 1, self._order + 1
        if root == self._rank:
            return self._hand_on(tensors, spec, code, self._peers)
        own = ShmMessage(0, code, -1, 0, spec)

        def check(message: ShmMessage) -> None:
            if (message.code, message.spec) != (code, spec):
                raise disagreement(order, self._rank, own, root, message)

        return self._expect(root, COLLECTIVES, check)

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension."""
        own = spec_of(tensor)
        check_dimensions(own)
        parts_of(own, spec, dim, sizes, self._rank)
        return self._start([tensor], own, dim, lambda collective, messages: collective.join(messages, dim, spec))

    def close(self) -> None:
        """Leave the group and release its memory. Idempotent."""
        if self._sender is not None:
            if self._gpu_sender is not None:
                with self._progress.wait():
                    self._gpu_sender.close()
                self._gpu_sender = None
            self._sender.leave()
            self._sender = None
            self._begun.clear()
            for inbox in self._inboxes.values():
                inbox.close()

    def check(self) -> int:
        """Return 0: waits are those of the host."""
        return 0

    def attend(self) -> bool:
        """Return that nothing is needed of the client."""
        return False

    def interrupt(self) -> None:
        """End all waits; callable from any thread, effective within :data:`SLICE_S`."""
        self._interrupted = True

    def _made(self, expected: PendingReceive, message: ShmMessage, peer: int) -> Tensor:
        """Return the tensor of a message, which is returned when its elements are no longer needed."""
        if self._gpu_sender is not None and message.offset >= 0:
            memory = self._inboxes[peer].memory
            assert memory is not None
            return self._gpu_sender.receive(expected, message, memory)
        return expected.take(message)

    def _expect(self, peer: int, channel: int, check: Callable[[ShmMessage], None]) -> Finish:
        """Expect the next message of a channel, which is checked on arrival."""
        self._member(peer)
        expected = self._inboxes[peer].expect(channel)

        def finish() -> ReceivedTensor:
            try:
                message = self._wait(expected)
                check(message)
                made = self._made(expected, message, peer)
            except BaseException:
                expected.give_back()
                raise
            return ReceivedTensor(made, message.at_ns)

        return finish

    # ---- collectives

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank]

    def _write(self, tensors: Sequence[Tensor], spec: TensorSpec) -> MemoryBlock:
        """Return a block with tensors concatenated."""
        host = [self._accelerator.to_host(tensor) for tensor in tensors]
        return self._member(self._rank).write(host, spec.size_bytes)

    def _hand_on(self, tensors: Sequence[Tensor], spec: TensorSpec, code: int, peers: Sequence[int]) -> int:
        """Send tensors, one flat tensor for each, to some ranks; return the time at which the last of them has it."""
        sender = self._member(self._rank)
        block = self._write(tensors, spec) if peers else None
        for peer in peers:
            sender.post(peer, COLLECTIVES, block, spec, code=code)
        return time.monotonic_ns()

    def _start(
        self,
        tensors: Sequence[Tensor],
        spec: TensorSpec,
        code: int,
        combine: Callable[[ShmCollective, list[ShmMessage]], Tensor],
        *,
        alone: bool = False,
    ) -> Finish:
        """Begin a collective with a result on this rank, and on all others unless it is for this rank alone."""
        sender = self._member(self._rank)
        self._order += 1
        block = self._write(tensors, spec)
        block.readers += 1  # this rank
        for peer in [] if alone else self._peers:
            sender.post(peer, COLLECTIVES, block, spec, code=code)
        own = ShmMessage(0, code, block.offset, 0, spec)
        expected = {peer: self._inboxes[peer].expect(COLLECTIVES) for peer in self._peers}
        inboxes = [self._inboxes[rank] for rank in range(self._size)]
        collective = ShmCollective(self._order, self._rank, own, block, inboxes, expected, self._drop)

        def finish() -> ReceivedTensor:
            try:
                messages = collective.messages(self._wait)
                made = combine(collective, messages)
            finally:
                collective.give_back()
            return ReceivedTensor(self._accelerator.to_device(made), time.monotonic_ns())

        return finish

    def _drop(self, block: MemoryBlock) -> None:
        if self._sender is not None:
            self._sender.drop(block)

    # ---- waits

    def _member(self, peer: int) -> ShmSender:
        if self._sender is None:
            raise RankLost("the group has been left")
        if peer not in self._inboxes:
            raise WireError(f"rank {peer} of a group of {self._size}; allowed are 0 to {self._size - 1}")
        return self._sender

    def _wait(self, expected: PendingReceive) -> ShmMessage:
        message = expected.find()
        if message is None:
            with self._progress.wait():
                message = expected.wait()
        ahead_ns = message.at_ns - time.monotonic_ns()
        if message.at_ns < 0 or ahead_ns > _MOST_AHEAD_NS:
            raise RankLost(f"a message that arrives in {ahead_ns / 1e9:g} s; allowed: a day")
        return message

    def _wait_for_room(self, begin_s: float) -> bool:
        """Wait a moment for readers to return memory; return whether there is patience left."""
        with self._progress.wait():
            time.sleep(_ROOM_STEP_S)
        if self._interrupted:
            raise RankLost("nobody reads what was sent: the group is given up")
        return time.monotonic() < begin_s + min(self._timeout_s, ROOM_S)

    def _has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended, or does not share this one's memory."""
        return rank not in self._watches or self._watches[rank].ended()

    def _watch(self, rank: int, begin_s: float) -> None:
        """Raise if an awaited rank can no longer send."""
        watch = self._watches.get(rank)
        if watch is not None and watch.ended():
            raise RankLost(f"rank {rank} has ended: process {watch.process} is gone")
        if self._interrupted:
            raise RankLost(f"rank {rank} is waited for no longer: the group is given up")
        if time.monotonic() > begin_s + self._timeout_s:
            raise RankLost(f"rank {rank} did not come within {self._timeout_s:.0f} s")
