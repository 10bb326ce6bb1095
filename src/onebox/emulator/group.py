"""Groups of emulated devices on one host: their messages have a spec and a time, and no elements."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Any, Protocol

import torch
from torch import Tensor

from onebox.emulator.clock import DeviceClock
from onebox.emulator.device import EmulatedAccelerator
from onebox.emulator.links import EmulatedLinks, EmulatedRing, LinkSpeed
from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.wire.protocol.groups import EmulatedLink, FormGroup
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import Begun, ClientChannel, Finish, RankLost, ReceivedTensor, RowRange
from onebox.worker.comm.carrier import Posted
from onebox.worker.comm.client import ChannelStore
from onebox.worker.comm.collectives import MessageInfo, flat_spec
from onebox.worker.comm.group import CarriedGroup
from onebox.worker.comm.manager import GroupManager
from onebox.worker.comm.shm.carrier import ShmCarrier
from onebox.worker.comm.shm.layout import FREE, check_dimensions
from onebox.worker.comm.shm.receiver import PendingReceive
from onebox.worker.comm.shm.rendezvous import ShmPeers, find_shm_peers
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.comm.shm.sender import BlockRegion, region_of
from onebox.worker.memory.shared import SharedMemoryQuota
from onebox.worker.progress import WorkerProgress

_SPEED = Struct("=2d")
"""Speed of the slowest link of a rank; in the free words of its control page."""

_SLOWEST = 1e18


class EmulatorChannel(ClientChannel, Protocol):
    """The channel to the client of an emulated device."""

    def settle(self) -> None:
        """Send the replies that wait, each when it is due."""


class EmulatedGroups(GroupManager):
    """Groups by number, with the links between their devices; arguments as for a worker's."""

    def __init__(
        self, channel: EmulatorChannel, accelerator: EmulatedAccelerator, progress: WorkerProgress, **options: Any
    ) -> None:
        super().__init__(channel, accelerator, progress, **options)
        self._clock = accelerator.clock
        self._links = EmulatedLinks()
        self._settle = channel.settle

    def retime(self, links: Sequence[EmulatedLink]) -> None:
        """Change the speeds of this device's links; see :meth:`EmulatedLinks.retime`.

        Raises:
            WireError: One of them is invalid.
        """
        self._links.retime(links)
        for group in self._groups.values():
            assert isinstance(group, EmulatedGroup)
            group.carrier.publish_speed()

    def _join(self, form: FormGroup, accelerator: Accelerator, progress: WorkerProgress) -> EmulatedGroup:
        store = ChannelStore(self._channel, form.group, form.timeout_s)
        with progress.wait():
            met = find_shm_peers(form, store, sharing_key=self._sharing_key) if form.shared and supported() else None
        if met is None or not met.whole:
            raise RankLost("a sim device can only be in a group of one agent's sim devices, on a host with x86-64")
        if form.aside:  # it delays no other work
            return EmulatedGroup(form, met, self._accelerator, progress, DeviceClock(), self._links, self._shared)
        return EmulatedGroup(
            form, met, self._accelerator, progress, self._clock, self._links, self._shared, settle=self._settle
        )


class EmulatedGroup(CarriedGroup):
    """A group of emulated devices.

    Args:
        form: The group, with this device's rank and its links to others.
        met: As for a group of workers.
        accelerator: Likewise.
        progress: Likewise.
        clock: The clock of the device.
        links: State of the device's links.
        quota: As for a group of workers.
        settle: Called before a wait for another device, which may be one for what the client posts after a reply.
    """

    def __init__(
        self,
        form: FormGroup,
        met: ShmPeers,
        accelerator: Accelerator,
        progress: WorkerProgress,
        clock: DeviceClock,
        links: EmulatedLinks,
        quota: SharedMemoryQuota | None = None,
        *,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.carrier = EmulatedCarrier(form, met, progress, clock, links, quota, settle)
        super().__init__(form, [self.carrier], accelerator, progress, self.carrier.joined)
        self._clock = clock
        self._ring = EmulatedRing()
        self._begun: deque[weakref.ref[_OnRing]] = deque()  # of which it is not known when they end

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks, as one flat tensor."""
        with self.carrier.on_ring() as expected:
            return self._finish(super().reduce(tensors), expected, 2)

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension."""
        with self.carrier.on_ring() as expected:
            return self._finish(super().gather(tensor, spec, dim, sizes), expected, 1)

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank."""
        begun = super().collect(tensors, root)
        return begun if isinstance(begun, int) else lambda: ReceivedTensor(begun().tensor, self._clock.now_ns)

    def _finish(self, made: Finish, expected: Sequence[EmulatedReceive], passes: int) -> Finish:
        begun = _OnRing(made, self._clock.now_ns, expected, passes)
        self._begun.append(weakref.ref(begun))

        def finish() -> ReceivedTensor:
            while begun.tensor is None:  # the ring is simulated in the order in which collectives began
                first = self._begun.popleft()() if self._begun else begun
                if first is not None:
                    first.run(self._ring, self.carrier)
            self._clock.wait(begun.end_ns)
            return ReceivedTensor(begun.tensor, self._clock.now_ns)

        return finish


class _OnRing:
    """A collective on the ring of a group.

    Args:
        finish: Makes its result.
        begin_ns: When this rank begins it.
        expected: Messages of the others, which say when they do.
        passes: How many times each byte goes round.
    """

    def __init__(self, finish: Finish, begin_ns: int, expected: Sequence[EmulatedReceive], passes: int) -> None:
        self._finish = finish
        self._begin_ns = begin_ns
        self._expected = expected
        self._passes = passes
        self.tensor: Tensor | None = None
        self.end_ns = 0

    def run(self, ring: EmulatedRing, carrier: EmulatedCarrier) -> None:
        """Wait for all ranks, and find out when it ends."""
        made = self._finish().tensor
        begun_ns = [self._begin_ns, *(message.wait().at_ns for message in self._expected)]
        self.end_ns = ring.run(begun_ns, carrier.speeds(), self._passes, made.nbytes)
        self.tensor = made


class EmulatedCarrier(ShmCarrier):
    """Carries messages without elements to emulated devices on this host, over emulated links.

    Args:
        form: The group, with this device's rank and its links to others.
        met: As for a group of workers.
        progress: Likewise.
        clock: The clock of the device.
        links: State of the device's links.
        quota: As for a group of workers.
        settle: Called before a wait.
    """

    def __init__(
        self,
        form: FormGroup,
        met: ShmPeers,
        progress: WorkerProgress,
        clock: DeviceClock,
        links: EmulatedLinks,
        quota: SharedMemoryQuota | None,
        settle: Callable[[], None],
    ) -> None:
        links.lay(form.links)
        super().__init__(form, met, progress, quota=quota)
        self._memories = [*met.memories.values()]
        self._clock = clock
        self._links = links
        self._settle = settle
        self._link_to = {link.peer: link.link for link in form.links}
        self._incomplete: dict[tuple[int, int], BlockRegion] = {}
        self._on_ring: list[EmulatedReceive] | None = None
        self.publish_speed()

    def publish_speed(self) -> None:
        """Tell the others the speed of this rank's slowest link; collectives in progress may use the former one."""
        speed = self._links.slowest([*self._link_to.values()])
        _SPEED.pack_into(self.sender.memory.map, 8 * FREE, speed.latency_ns, speed.ns_per_byte)

    def speeds(self) -> list[LinkSpeed]:
        """Return the speeds of all ranks' slowest links."""
        return [speed_in(memory) for memory in self._memories]

    @contextmanager
    def on_ring(self) -> Iterator[Sequence[EmulatedReceive]]:
        """Begin a collective on the ring: messages say when each rank begins it. Return those that are expected."""
        self._on_ring = expected = list[EmulatedReceive]()
        try:
            yield expected
        finally:
            self._on_ring = None

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send the spec of a tensor, or of a part of one; return when it arrives."""
        spec = spec_of(tensor)
        place = region_of(spec, within, self._incomplete.pop((peer, channel), None))
        check_dimensions(place.whole)
        at_ns = self._arrival_ns(peer, spec)
        if place.last:
            self.sender.post(peer, channel, None, place.whole, at_ns=at_ns)
        else:
            self._incomplete[peer, channel] = place
        return at_ns

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
        """Send a spec to some ranks."""
        check_dimensions(spec)
        now_ns = self._clock.now_ns
        posted = Posted(_empty(flat_spec([spec])), now_ns)
        for peer in peers:
            at_ns = now_ns if self._on_ring is not None else self._arrival_ns(peer, spec)
            self.sender.post(peer, channel, None, spec, code=code, at_ns=at_ns)
            posted.at_ns = max(posted.at_ns, at_ns)
        return posted

    def expect(self, peer: int, channel: int) -> EmulatedReceive:
        """Ask for the next message of a channel that has not been asked for."""
        message = super().expect(peer, channel)
        assert isinstance(message, PendingReceive)
        expected = EmulatedReceive(message, self._clock, self._settle)
        if self._on_ring is not None:
            self._on_ring.append(expected)
        return expected

    def close(self) -> None:
        """Leave the group. Idempotent."""
        super().close()
        self._memories.clear()

    def _arrival_ns(self, peer: int, spec: TensorSpec) -> int:
        """Return when what is sent now arrives at a rank."""
        now_ns = self._clock.now_ns
        return self._links.send(self._link_to[peer], spec.size_bytes, now_ns) if peer in self._link_to else now_ns


class EmulatedReceive:
    """A message that was asked for, whose tensor has no elements.

    Args:
        expected: The message.
        clock: The clock of the device.
        settle: Called before a wait.
    """

    lasting = True

    def __init__(self, expected: PendingReceive, clock: DeviceClock, settle: Callable[[], None]) -> None:
        self._expected = expected
        self._clock = clock
        self._settle = settle
        self.give_back = expected.give_back

    def wait(self, *, aside: bool = False) -> MessageInfo:
        """Wait for it, not for the time at which it arrives.

        Raises:
            RankLost: It does not come.
        """
        if self._expected.find() is None:
            self._settle()
        return self._expected.wait()

    def part(self) -> Tensor:
        """Return its tensor, flat, when it has arrived."""
        return self.take().view(-1)

    def take(self) -> Tensor:
        """Return its tensor when it has arrived."""
        message = self._expected.wait()
        self._clock.wait(message.at_ns)
        self.give_back()
        return _empty(message.spec)


def speed_in(memory: SharedMemory) -> LinkSpeed:
    """Return the speed of a rank's slowest link, from its memory.

    Raises:
        WireError: The memory holds none.
    """
    latency_ns, ns_per_byte = _SPEED.unpack_from(memory.map, 8 * FREE)
    if not (0 <= latency_ns < _SLOWEST and 0 <= ns_per_byte < _SLOWEST):
        raise WireError(f"a link of {latency_ns} ns and {ns_per_byte} ns for a byte; allowed: 0 to {_SLOWEST:g}")
    return LinkSpeed(latency_ns, ns_per_byte)


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
