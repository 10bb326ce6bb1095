"""Messages between workers on one host, through shared memory: no sockets, and one wait at the end.

A rank sends tensors by copying them into memory that the others map (see :mod:`onebox.worker.comm.shm.layout`); all
readers of a message share one block. Large tensors are used in place without another copy
(``benchmarks/transfers.py``); an accelerator copies to and from there asynchronously (see
:mod:`onebox.worker.comm.shm.gpu_sender`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from onebox.wire import TensorSpec, spec_of
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.responses import Joined
from onebox.worker.comm.api import RankLost, RowRange
from onebox.worker.comm.carrier import Expected, Posted
from onebox.worker.comm.shm.gpu_sender import GpuReceive, GpuShmSender, ShmCopier
from onebox.worker.comm.shm.layout import check_dimensions
from onebox.worker.comm.shm.receiver import ShmReceiver
from onebox.worker.comm.shm.rendezvous import ShmPeers
from onebox.worker.comm.shm.sender import BlockRegion, ShmSender, region_of
from onebox.worker.memory.shared import SharedMemoryQuota
from onebox.worker.progress import WorkerProgress

ROOM_S = 90.0
"""Longest wait for readers where there is no room for another message: longer than a reader may wait for its disk."""

_ROOM_STEP_S = 0.001


class ShmCarrier:
    """Carries messages to the ranks that share memory with this one, itself among them.

    Args:
        form: The group, with this worker's rank.
        met: Memories of these ranks.
        progress: Marked during waits.
        copier: Copier for a device whose tensors are not in host memory.
        quota: Counts this worker's shared memory, and limits it.
    """

    shares_sums = False

    def __init__(
        self,
        form: FormGroup,
        met: ShmPeers,
        progress: WorkerProgress,
        copier: ShmCopier | None = None,
        quota: SharedMemoryQuota | None = None,
    ) -> None:
        self._timeout_s = form.timeout_s
        self._progress = progress
        self._thread = threading.get_ident()
        self._watches = met.watches
        self._interrupted = False
        self._begun: dict[tuple[int, int], BlockRegion] = {}  # the last part of incomplete tensors, by rank and channel
        own = met.memories[form.rank]
        self._sender: ShmSender | None = ShmSender(
            own, form.size, paged=met.paged, quota=quota, wait=self._wait_for_room, ended=self._has_ended
        )
        self._gpu_sender = None if copier is None else GpuShmSender(self.sender, copier)
        self.peers = tuple(sorted(met.memories))
        self.joined = Joined(self.peers, met.apart)
        """The ranks that share memory with this one, and those of this host that do not."""
        self._inboxes = {rank: ShmReceiver(met.memories[rank], rank, form.rank, self._watch) for rank in self.peers}

    @property
    def sender(self) -> ShmSender:
        """The sending end of this rank.

        Raises:
            RankLost: The group has been left.
        """
        if self._sender is None:
            raise RankLost("the group has been left")
        return self._sender

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a copy of a tensor to a rank; return the time at which it is available, in monotonic nanoseconds.

        For an accelerator it is available when its copy is complete, which is not known here. Parts of one tensor share
        a block, which the reader receives with the last part.

        Raises:
            WireError: It is not the next part.
        """
        begin_ns = time.monotonic_ns()
        place = region_of(spec_of(tensor), within, self._begun.pop((peer, channel), None))
        last = place.last
        check_dimensions(place.whole)
        if self._gpu_sender is not None:
            place = self._gpu_sender.send(tensor, peer, channel, place)
        else:
            place = self.sender.write_part(tensor, place)
        if not last:
            self._begun[peer, channel] = place
        if self._gpu_sender is not None or not last:
            return begin_ns
        return self.sender.post(peer, channel, place.block, place.whole)

    def post(
        self,
        tensors: Sequence[Tensor],
        spec: TensorSpec,
        peers: Sequence[int],
        channel: int,
        code: int,
        *,
        kept: bool = False,
    ) -> Posted:
        """Send a copy of tensors, concatenated, to some ranks, which read one block."""
        check_dimensions(spec)
        sender = self.sender
        block = sender.write(tensors, spec.size_bytes)
        block.readers += 1  # this rank
        posted = Posted(sender.memory.elements(spec, block.offset), 0, functools.partial(sender.drop, block))
        for peer in peers:
            sender.post(peer, channel, block, spec, code=code)
        posted.at_ns = time.monotonic_ns()
        return posted

    def expect(self, peer: int, channel: int) -> Expected:
        """Ask for the next message of a channel that has not been asked for."""
        expected = self._inboxes[peer].expect(channel)
        return expected if self._gpu_sender is None else GpuReceive(expected, self._gpu_sender)

    def attend(self, *, waiting: bool = False) -> bool:
        """Return that nothing is needed of the client."""
        return False

    def interrupt(self) -> None:
        """End all waits; callable from any thread, effective within :data:`SLICE_S`."""
        self._interrupted = True

    def close(self) -> None:
        """Leave the group and release its memory. Idempotent."""
        if self._sender is None:
            return
        if self._gpu_sender is not None:
            with self._progress.wait():
                self._gpu_sender.close()
            self._gpu_sender = None
        self._sender.leave()
        self._sender = None  # the quota holds it until its memory is not read any more
        self._begun.clear()
        for inbox in self._inboxes.values():
            inbox.close()

    # ---- waits

    def _wait_for_room(self, begin_s: float) -> bool:
        """Wait a moment for readers to return memory; return whether there is patience left."""
        if threading.get_ident() == self._thread:  # another one's waits are not the worker's
            with self._progress.wait():
                time.sleep(_ROOM_STEP_S)
        else:
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
