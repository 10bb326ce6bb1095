"""Groups of emulated devices on one host: their messages have a spec and a time, and no elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from onebox.emulator.clock import DeviceClock
from onebox.emulator.device import EmulatedAccelerator
from onebox.emulator.links import EmulatedLinks, EmulatedRing, LinkSpeed
from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, spec_of
from onebox.wire.protocol.groups import EmulatedLink, FormGroup
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import ClientChannel, Finish, RankLost, ReceivedTensor, RowRange
from onebox.worker.comm.client import ChannelStore
from onebox.worker.comm.collectives import is_gather, require_agreement, require_joint
from onebox.worker.comm.manager import GroupManager
from onebox.worker.comm.shm.collective import ShmCollective
from onebox.worker.comm.shm.group import COLLECTIVES, ShmGroup
from onebox.worker.comm.shm.layout import FREE, ShmMessage, check_dimensions
from onebox.worker.comm.shm.receiver import PendingReceive
from onebox.worker.comm.shm.rendezvous import ShmPeers, find_shm_peers
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.comm.shm.sender import region_of
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
            group.retimed()

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


class EmulatedGroup(ShmGroup):
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
        links.lay(form.links)
        super().__init__(form, met, accelerator, progress, quota=quota)
        self._clock = clock
        self._links = links
        self._settle = settle
        self._link_to = {link.peer: link.link for link in form.links}
        self._ring = EmulatedRing()
        self._timed = 0  # collectives with a known end on the ring
        self._running: WeakValueDictionary[int, _Collective] = WeakValueDictionary()
        self.retimed()

    def retimed(self) -> None:
        """Publish the speed of this rank's slowest link; collectives in progress may use the former one."""
        if self._sender is not None:
            speed = self._links.slowest([*self._link_to.values()])
            _SPEED.pack_into(self._sender.memory.map, 8 * FREE, speed.latency_ns, speed.ns_per_byte)

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send the spec of a tensor, or of a part of one; return when it arrives."""
        sender, spec = self._member(peer), spec_of(tensor)
        place = region_of(spec, within, self._begun.pop((peer, channel), None))
        check_dimensions(place.whole)
        at_ns = self._sent(peer, spec)
        if place.last:
            sender.post(peer, channel, None, place.whole, at_ns=at_ns)
        else:
            self._begun[peer, channel] = place
        return at_ns

    def _sent(self, peer: int, spec: TensorSpec) -> int:
        """Return when what is sent now arrives at a rank."""
        now_ns = self._clock.now_ns
        return self._links.send(self._link_to[peer], spec.size_bytes, now_ns) if peer in self._link_to else now_ns

    def _wait(self, expected: PendingReceive) -> ShmMessage:
        if expected.find() is None:
            self._settle()
        return super()._wait(expected)

    def _made(self, expected: PendingReceive, message: ShmMessage, peer: int) -> Tensor:
        """Return a tensor without elements when it has arrived."""
        expected.give_back()
        self._clock.wait(message.at_ns)
        return _empty(message.spec)

    def _hand_on(self, tensors: Sequence[Tensor], spec: TensorSpec, code: int, peers: Sequence[int]) -> int:
        sender, ends_ns = self._member(self._rank), self._clock.now_ns
        for peer in peers:
            at_ns = self._sent(peer, spec)
            sender.post(peer, COLLECTIVES, None, spec, code=code, at_ns=at_ns)
            ends_ns = max(ends_ns, at_ns)
        return ends_ns

    def _start(
        self,
        tensors: Sequence[Tensor],
        spec: TensorSpec,
        code: int,
        combine: Callable[[ShmCollective, list[ShmMessage]], Tensor],
        *,
        alone: bool = False,
    ) -> Finish:
        sender = self._member(self._rank)
        self._order += 1
        order, now_ns = self._order, self._clock.now_ns
        for peer in [] if alone else self._peers:
            sender.post(peer, COLLECTIVES, None, spec, code=code, at_ns=now_ns)
        own = ShmMessage(0, code, -1, now_ns, spec)
        expected = {peer: self._inboxes[peer].expect(COLLECTIVES) for peer in self._peers}
        collective = _Collective(order, self._rank, own, None, (), expected, self._drop)
        if not alone:
            self._running[order] = collective

        def finish() -> ReceivedTensor:
            try:
                messages = collective.messages(self._wait)
                made = combine(collective, messages)
                self._time(order)
            finally:
                collective.give_back()
            self._clock.wait(max(message.at_ns for message in messages) if alone else collective.end_ns)
            return ReceivedTensor(made, self._clock.now_ns)

        return finish

    def _time(self, order: int) -> None:
        """Simulate all collectives on the ring up to one whose messages have arrived."""
        while self._timed < order:
            self._timed += 1
            collective = self._running.get(self._timed)
            if collective is not None:
                messages = collective.messages(self._wait)
                memories = [self._inboxes[rank].memory for rank in range(self._size)]
                speeds = [speed_in(memory) for memory in memories if memory is not None]
                collective.end_ns = self._ring.run([message.at_ns for message in messages], speeds, *_load(messages))


class _Collective(ShmCollective):
    """A collective whose results have no elements."""

    end_ns = 0

    def sum(self, messages: Sequence[ShmMessage]) -> Tensor:
        require_agreement(self._order, self._rank, messages)
        return _empty(messages[0].spec)

    def join(self, messages: Sequence[ShmMessage], dim: int, spec: TensorSpec) -> Tensor:
        require_agreement(self._order, self._rank, messages)
        require_joint([message.spec for message in messages], dim, spec)
        return _empty(spec)


def speed_in(memory: SharedMemory) -> LinkSpeed:
    """Return the speed of a rank's slowest link, from its memory.

    Raises:
        WireError: The memory holds none.
    """
    latency_ns, ns_per_byte = _SPEED.unpack_from(memory.map, 8 * FREE)
    if not (0 <= latency_ns < _SLOWEST and 0 <= ns_per_byte < _SLOWEST):
        raise WireError(f"a link of {latency_ns} ns and {ns_per_byte} ns for a byte; allowed: 0 to {_SLOWEST:g}")
    return LinkSpeed(latency_ns, ns_per_byte)


def _load(messages: Sequence[ShmMessage]) -> tuple[int, int]:
    """Return the number of ring passes of a collective, and its bytes."""
    if is_gather(messages[0].code):
        return 1, sum(message.spec.size_bytes for message in messages)
    return 2, messages[0].spec.size_bytes


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
