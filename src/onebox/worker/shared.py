"""Groups of the workers of one host, through shared memory: no sockets, no threads, and one wait at the end.

A rank lets the others have its tensors by copying them into memory that they map (see :mod:`onebox.worker.letters`).
For a sum each rank adds up all parts itself, in the order of the ranks, so that every rank gets the same bits: for n
ranks a bucket of S bytes costs each rank one copy and one sum of n parts; Gloo over loopback copies it through the
kernel twice in each direction (``benchmarks/scaling.py``).

Devices that do not compute have tensors without elements (torch's ``meta`` device): they send what the tensors are, and
get tensors without elements, at the same times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, dtype_name, spec_of
from onebox.wire.messages import FormGroup
from onebox.worker.agreement import meaning
from onebox.worker.arena import Block
from onebox.worker.collective import Collective, is_sum, of_sum
from onebox.worker.handover import Post
from onebox.worker.inbox import Expected, Inbox
from onebox.worker.letters import FREE, LEFT, READY, Letter, check_dimensions
from onebox.worker.links import Ring, Speed, Wires
from onebox.worker.memory import LEAST_BYTES, SPAN_BYTES, Memory, PeerLost, ProcessWatch, sleep_until, wake_on_time
from onebox.worker.outbox import Outbox
from onebox.worker.peers import Arrived, Finish, Keys
from onebox.worker.tape import Progress

_COLLECTIVES = -1 << 62
"""The channel of sums and gathers."""

_SPEED = Struct("=2d")
"""The slowest of a rank's links, in the free words of its control page."""


class SharedGroup:
    """A group of this worker and others of its host.

    Args:
        form: This worker's place in it.
        keys: The group's key-value store.
        device: ``cpu``, or ``meta`` for a worker that does not compute.
        progress: Marked during waits.
        wires: What is under way on this worker's emulated links.

    Raises:
        PeerLost: Another rank did not come.
    """

    def __init__(self, form: FormGroup, keys: Keys, device: torch.device, progress: Progress, wires: Wires) -> None:
        self._rank = form.rank
        self._size = form.size
        self._timeout_s = form.timeout_s
        self._device = device
        self._progress = progress
        self._wires = wires
        self._links = {link.peer: (link.link, Speed.of(link)) for link in form.links}
        self._watches: dict[int, ProcessWatch] = {}
        self._order = 0
        self._timed = 0  # collectives whose end on the ring is known
        self._running: WeakValueDictionary[int, Collective] = WeakValueDictionary()
        memories = self._meet(keys)
        self._outbox: Outbox | None = Outbox(memories[self._rank], self._size)
        self._inboxes = [Inbox(memory, rank, self._rank, self._watch) for rank, memory in enumerate(memories)]
        offset = 8 * FREE
        self._ring = Ring([Speed(*_SPEED.unpack_from(memory.map, offset)) for memory in memories])
        wake_on_time()

    def send(self, tensor: Tensor, peer: int, channel: int) -> int:
        """Let a rank have a copy of a tensor; return when it is there, in monotonic nanoseconds."""
        outbox = self._member(peer)
        begin_ns = time.monotonic_ns()
        spec = spec_of(tensor)
        check_dimensions(spec)
        block = None if tensor.is_meta else outbox.write([tensor], spec.size_bytes)
        due_ns = 0
        if peer in self._links:
            due_ns = self._wires.send(*self._links[peer], spec.size_bytes, begin_ns)
        return outbox.post(peer, channel, block, spec, at_ns=due_ns)

    def receive(self, spec: TensorSpec, peer: int, channel: int) -> Finish:
        """Start to receive a tensor from a rank."""
        self._member(peer)
        expected = self._inboxes[peer].expect(channel)

        def finish() -> Arrived:
            try:
                letter = self._wait(expected)
                if letter.spec != spec:
                    raise WireError(f"rank {peer} sent {letter.spec} on channel {channel}, where {spec} was to come")
                if self._device.type == "meta":
                    made = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
                else:
                    made = expected.take(letter)
            finally:
                expected.give_back()
            self._sleep_until(letter.at_ns)
            return Arrived(made, letter.at_ns)

        return finish

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Start to sum tensors of one type over the ranks, as one flat tensor."""
        code = of_sum(meaning(self._order, tensors))
        spec = TensorSpec(dtype_name(tensors[0].dtype), (sum(tensor.numel() for tensor in tensors),))
        return self._start(tensors, spec, code, lambda collective, letters: collective.sum(letters))

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int) -> Finish:
        """Start to put the ranks' tensors together along a dimension."""
        own = spec_of(tensor)
        check_dimensions(own)
        if not 0 <= dim < len(own.shape):
            raise WireError(f"{own} has no dimension {dim} to be gathered along")
        return self._start([tensor], own, dim, lambda collective, letters: collective.join(letters, dim, spec))

    def close(self) -> None:
        """Leave the group and let go of its memory. Idempotent."""
        if self._outbox is not None:
            self._outbox.leave()
            self._outbox = None
            for inbox in self._inboxes:
                inbox.close()

    # ---- collectives

    def _start(
        self,
        tensors: Sequence[Tensor],
        spec: TensorSpec,
        code: int,
        combine: Callable[[Collective, list[Letter]], Tensor],
    ) -> Finish:
        outbox = self._member(self._rank)
        self._order += 1
        order = self._order
        block = None if tensors[0].is_meta else outbox.write(tensors, spec.size_bytes)
        if block is not None:
            block.readers += 1  # this rank
        now_ns = time.monotonic_ns()
        peers = [peer for peer in range(self._size) if peer != self._rank]
        for peer in peers:
            outbox.post(peer, _COLLECTIVES, block, spec, code=code, at_ns=now_ns)
        own = Letter(0, code, -1 if block is None else block.offset, now_ns, spec)
        expected = {peer: self._inboxes[peer].expect(_COLLECTIVES) for peer in peers}
        collective = Collective(order, self._rank, own, block, self._inboxes, expected, self._drop)
        if self._ring.emulated:
            self._running[order] = collective

        def finish() -> Arrived:
            try:
                letters = collective.letters(self._wait)
                made = combine(collective, letters)
                self._time(order)
            finally:
                collective.give_back()
            self._sleep_until(collective.end_ns)
            return Arrived(made, time.monotonic_ns())

        return finish

    def _time(self, order: int) -> None:
        """Let the ring run all collectives up to one, whose letters have come."""
        while self._ring.emulated and self._timed < order:
            self._timed += 1
            collective = self._running.get(self._timed)
            if collective is not None:
                letters = collective.letters(self._wait)
                collective.end_ns = self._ring.run([letter.at_ns for letter in letters], *_load(letters))

    def _drop(self, block: Block) -> None:
        if self._outbox is not None:
            self._outbox.drop(block)

    # ---- waits

    def _member(self, peer: int) -> Outbox:
        if self._outbox is None:
            raise PeerLost("the group has been left")
        if not 0 <= peer < self._size:
            raise WireError(f"rank {peer} of a group of {self._size}; allowed are 0 to {self._size - 1}")
        return self._outbox

    def _wait(self, expected: Expected) -> Letter:
        letter = expected.find()
        if letter is None:
            with self._progress.wait():
                letter = expected.wait()
        return letter

    def _sleep_until(self, end_ns: int) -> None:
        if end_ns > time.monotonic_ns():
            with self._progress.wait():
                sleep_until(end_ns)

    def _watch(self, rank: int, begin_s: float) -> None:
        """Raise if a rank that is waited for cannot come any more."""
        watch = self._watches.get(rank)
        if watch is not None and watch.ended():
            raise PeerLost(f"rank {rank} has ended: process {watch.process} is gone")
        if time.monotonic() > begin_s + self._timeout_s:
            raise PeerLost(f"rank {rank} did not come within {self._timeout_s:.0f} s")

    # ---- the beginning

    def _meet(self, keys: Keys) -> list[Memory]:
        """Return the memories of all ranks, each mapped by everybody."""
        own = Memory.make()
        speed = Speed.slowest([speed for _, speed in self._links.values()])
        _SPEED.pack_into(own.map, 8 * FREE, speed.latency_ns, speed.ns_per_byte)
        try:
            memories = self._exchange(own, keys)
            own.publish(READY, 1)
            for rank, memory in enumerate(memories):
                begin_s = time.monotonic()
                while not memory.words[READY]:
                    if memory.words[LEFT]:
                        raise PeerLost(f"rank {rank} has left the group")
                    if memory.sleep(READY, 0):
                        self._watch(rank, begin_s)
        except BaseException:
            Outbox(own, self._size).leave()
            raise
        finally:
            own.seal()
        return memories

    def _exchange(self, own: Memory, keys: Keys) -> list[Memory]:
        """Let the others map this rank's memory, and map theirs."""
        post = Post()
        try:
            keys.set(f"memory/{self._rank}", f"{os.getpid()}:{len(own.map)}:{own.inode}:{post.name}")
            others = {rank: _Named.of(keys.get(f"memory/{rank}")) for rank in range(self._size) if rank != self._rank}
            self._watches = {rank: ProcessWatch(other.process) for rank, other in others.items()}
            names = {rank: other.post for rank, other in others.items()}
            inodes = {rank: other.inode for rank, other in others.items()}
            begin_s = time.monotonic()
            came = post.exchange(own.descriptor, names, inodes, lambda rank: self._watch(rank, begin_s))
        finally:
            post.close()
        memories = {self._rank: own}
        try:
            for rank, other in others.items():
                memories[rank] = Memory.of(came.pop(rank), other.size)
        finally:
            for descriptor in came.values():
                os.close(descriptor)
        return [memories[rank] for rank in range(self._size)]


@dataclass(frozen=True)
class _Named:
    """Another rank's memory, as it is named in the keys: by process, bytes, inode, and the name of a :class:`Post`."""

    process: int
    size: int
    inode: int
    post: str

    @classmethod
    def of(cls, text: bytes) -> _Named:
        """Read such a name.

        Raises:
            WireError: It is none.
        """
        try:
            process, size, inode, post = text.decode("ascii").split(":")
            bytes.fromhex(post)
            named = cls(int(process), int(size), int(inode), post)
        except ValueError:
            raise WireError(f"a rank's memory is named {text[:80]!r}, which is no name of one") from None
        if not LEAST_BYTES <= named.size <= SPAN_BYTES or named.size % 8 or not post:
            raise WireError(f"a memory of {named.size} bytes; allowed are {LEAST_BYTES} to {SPAN_BYTES}")
        return named


def _load(letters: Sequence[Letter]) -> tuple[int, int]:
    """Return how often a collective's bytes go round the ring, and how many of them there are."""
    if is_sum(letters[0].code):
        return 2, letters[0].spec.size_bytes
    return 1, sum(letter.spec.size_bytes for letter in letters)
