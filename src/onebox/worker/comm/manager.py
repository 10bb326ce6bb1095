"""The groups that a worker belongs to: formed over shared memory, TCP, NCCL or the client; and left."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import msgspec

from onebox.errors import WireError
from onebox.wire.protocol.groups import FormGroup
from onebox.wire.protocol.instructions import Broadcast, Gather, Receive, Reduce, Send, Vote
from onebox.wire.protocol.requests import Routine
from onebox.wire.protocol.responses import GroupTraffic, Joined, Left, RelayRequest, WorkerFailure
from onebox.worker.accelerator import Accelerator, accelerator_for
from onebox.worker.comm import nccl
from onebox.worker.comm.api import ClientChannel, RankLost, WorkerGroup
from onebox.worker.comm.carrier import Carrier
from onebox.worker.comm.client import ChannelStore, ClientGroup
from onebox.worker.comm.group import CarriedGroup
from onebox.worker.comm.hybrid import HybridGroup
from onebox.worker.comm.nccl import REACH, NcclGroup
from onebox.worker.comm.reachability import require_reachable
from onebox.worker.comm.shm.carrier import ShmCarrier
from onebox.worker.comm.shm.gpu_sender import shm_copier_for
from onebox.worker.comm.shm.rendezvous import find_shm_peers, share_no_memory
from onebox.worker.comm.shm.segment import supported
from onebox.worker.comm.tcp.carrier import TcpCarrier
from onebox.worker.comm.tcp.mesh import GroupNetwork
from onebox.worker.memory.buffers import Poisoned
from onebox.worker.memory.shared import SharedMemoryQuota
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.cpu_affinity import threads_on_all_cores
from onebox.worker.system.network_interfaces import NoAddress, bind_nccl, forwarded_address, listening_address

_HOST = accelerator_for("cpu")

_CONNECT_STEP_S = 0.005

MOST_GROUPS = 1024
"""Most groups of a worker at a time: each takes address space, and perhaps sockets."""


class GroupManager:
    """Groups by number.

    Args:
        channel: The channel to the client.
        accelerator: Device of the tensors.
        progress: Marked during waits.
        address: The address of this host at which its owner lets workers of other hosts connect; empty for that which
            the client names, where it is the owner.
        network: Where workers of other hosts find this one, beside that address.
        quota_bytes: Most bytes of the worker's buffers, which limits the memory that it shares; 0 for no limit.
        sharing_key: See :func:`find_shm_peers`.
    """

    def __init__(
        self,
        channel: ClientChannel,
        accelerator: Accelerator,
        progress: WorkerProgress,
        *,
        address: str = "",
        network: GroupNetwork | None = None,
        quota_bytes: int = 0,
        sharing_key: bytes = b"",
    ) -> None:
        self._sharing_key = sharing_key
        self._network = network or GroupNetwork()
        self._shared = SharedMemoryQuota(quota_bytes)
        self._channel = channel
        self._address = address
        self._accelerator = accelerator
        self._progress = progress
        self._groups: dict[int, WorkerGroup] = {}
        self._lost: dict[int, WorkerFailure] = {}
        self._failed: set[int] = set()
        self._failures = 0
        self._last_failure = ""
        self._forming: FormGroup | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the worker's groups."""
        return tuple(self._groups)

    def form(self, form: FormGroup) -> Joined:
        """Join a group; return the ranks that share memory there.

        Raises:
            RankLost: The others did not join in time.
            WireError: This worker is in too many groups.
        """
        if len(self._groups) >= MOST_GROUPS:
            raise WireError(f"this worker is in {len(self._groups)} groups; no more are allowed")
        accelerator, progress = (_HOST, WorkerProgress()) if form.aside else (self._accelerator, self._progress)
        form = msgspec.structs.replace(form, address=self._address or form.address)
        with threads_on_all_cores():
            self._forming = form
            try:
                group = self._groups[form.group] = self._join(form, accelerator, progress)
            finally:
                self._forming = None
        return group.joined

    def _join(self, form: FormGroup, accelerator: Accelerator, progress: WorkerProgress) -> WorkerGroup:
        return form_group(
            form,
            self._channel,
            accelerator,
            progress,
            shared=self._shared,
            network=self._network,
            sharing_key=self._sharing_key,
        )

    def get(self, number: int) -> WorkerGroup:
        """Return a group.

        Raises:
            Poisoned: This worker has left it because of a failure.
            RankLost: This worker is not in it.
        """
        if number in self._lost:
            raise Poisoned(self._lost[number])
        group = self._groups.get(number)
        if group is None:
            raise RankLost(f"this worker is not, or no longer, in group {number}")
        return group

    def leave(self, number: int, *, failed: bool = False) -> None:
        """Leave a group, and have the client notify the ranks that wait there.

        Args:
            number: The group.
            failed: Whether this worker cannot do its part.
        """
        self._lost.pop(number, None)
        group = self._groups.pop(number, None)
        try:
            with suppress(RankLost):
                while group is not None and not failed and group.attend():
                    time.sleep(_CONNECT_STEP_S)  # who waits for what is sent has to know this worker before it has left
            self._channel.send_to_client(Left(number, failed))
        finally:  # also where the client takes nothing any more
            if group is not None:
                group.close()
                self._note(number, group)
        self._failed.discard(number)

    def traffic(self) -> tuple[GroupTraffic, ...]:
        """Return what was carried to workers of other hosts since the last call."""
        return self._network.meters.take()

    def settle(self) -> bool:
        """Free memory that was shared in groups that this worker has left; return whether none of it is left."""
        return self._shared.settle()

    def attend(self) -> tuple[bool, dict[int, RankLost]]:
        """Ask the client what other threads need of it; return whether they may need more, and the groups that have
        failed in such a thread, with the reason."""
        more, failed = False, {}
        for number, group in self._groups.items():
            try:
                more |= group.attend()
            except RankLost as error:
                failed[number] = error
        return more, failed

    def check(self) -> bool:
        """Return whether operations of groups go on without the host.

        Require that what the device has received is what other ranks have sent, as far as the host knows.

        The host does not wait for operations of NCCL, so that their failures show nowhere else: see
        :meth:`WorkerGroup.check`.

        Raises:
            RankLost: An operation of a group has failed or was interrupted.
        """
        going = [group.check() for group in self._groups.values()]  # all, as one may have failed
        return any(going)

    def oldest(self) -> int:
        """Return this worker's progress when the oldest operation began that goes on without the host; 0 for none.

        Groups that have failed have none.
        """
        found = []
        for group in self._groups.values():
            with suppress(RankLost):
                found.append(group.check())
        return min(filter(None, found), default=0)

    def failures(self) -> int:
        """Return the number of groups that have failed until now, with those that this worker has left since."""
        for number, group in self._groups.items():
            self._note(number, group)
        return self._failures

    def check_since(self, failures: int) -> None:
        """Require that no group has failed since a call of :meth:`failures`, also none that was left since.

        Args:
            failures: The result of that call.

        Raises:
            RankLost: One has.
        """
        if self.failures() > failures:
            raise RankLost(self._last_failure)

    def _note(self, number: int, group: WorkerGroup) -> None:
        """Count the failure of a group, once."""
        try:
            group.check()
        except RankLost as error:
            if number not in self._failed:
                self._failed.add(number)
                self._failures += 1
                self._last_failure = str(error)

    def interrupt(self, number: int) -> None:
        """End waits for a silent rank of a group; callable from any thread."""
        group, forming = self._groups.get(number), self._forming
        if group is not None:
            group.interrupt()
        elif forming is not None and forming.group == number and forming.rank in forming.nccl:
            threading.Thread(target=self._watch, args=(forming,), name="onebox-abort", daemon=True).start()

    def _watch(self, forming: FormGroup) -> None:
        """End this process if a group is not given up in time: nothing ends the wait in which a communicator is made,
        if a rank has ended before it."""
        end_s = time.monotonic() + nccl.FREE_S
        while self._forming is forming and time.monotonic() < end_s:
            time.sleep(0.01)
        if self._forming is forming:
            nccl.end_process(f"the others of group {forming.group} did not come to their communicators")

    def abandon(self, number: int, failure: WorkerFailure) -> None:
        """Leave a group in which this worker cannot do its part, unless it has left before."""
        if number not in self._lost:
            self.leave(number, failed=True)
            self._lost[number] = failure

    def close(self) -> None:
        """Leave all groups without notification."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def groups_of(routine: Routine) -> tuple[int, ...]:
    """Return the groups that a routine uses."""
    exchanges = Send | Receive | Reduce | Gather | Broadcast | Vote
    return tuple({step.group for step in routine.steps if isinstance(step, exchanges) and step.group})


def form_group(
    form: FormGroup,
    channel: ClientChannel,
    accelerator: Accelerator,
    progress: WorkerProgress,
    *,
    shared: SharedMemoryQuota | None = None,
    network: GroupNetwork | None = None,
    sharing_key: bytes = b"",
) -> WorkerGroup:
    """Join a group.

    Args:
        form: The group, with this worker's rank.
        channel: The channel to the client, for the rendezvous.
        accelerator: Device of the tensors.
        progress: Marked during waits.
        shared: Limit of the memory that it shares; none by default.
        network: Where workers of other hosts find this one, beside the group's address.
        sharing_key: See :func:`find_shm_peers`.

    Raises:
        RankLost: The others did not join in time.
        NoAddress: This host does not have the address under which others reach it, nor one to which that is forwarded;
            or that stands for all of its addresses.
        WireError: Its links are to be emulated.
    """
    if form.links:
        raise WireError("links are emulated between sim devices only")
    if form.backend == "client":
        return ClientGroup(form, channel, accelerator)
    store = ChannelStore(channel, form.group, form.timeout_s)

    def relay(peer: int) -> None:
        channel.send_to_client(RelayRequest(form.group, peer))

    def by_host() -> CarriedGroup:
        """Join through memory where it is shared, and over TCP where not."""
        carriers: list[Carrier] = []
        joined, whole = Joined(), False
        if form.shared and not supported():
            share_no_memory(form, store)
        elif form.shared:
            copier = shm_copier_for(accelerator)
            met = find_shm_peers(form, store, paged=copier is not None, sharing_key=sharing_key)
            whole = met.whole
            if whole or len(met.memories) > 1 or met.apart:
                memory = ShmCarrier(form, met, progress, copier, shared)
                carriers.append(memory)
                joined = memory.joined
        try:
            if not whole:
                encrypted, place = form.backend == "tls", network or GroupNetwork()
                address, advertised = forwarded_address(form.address, place.bound)
                carrier = TcpCarrier(
                    form,
                    store,
                    accelerator,
                    progress,
                    address,
                    encrypted=encrypted,
                    advertised=advertised,
                    network=place,
                    relay=relay if encrypted else None,
                    near=joined.near,
                )
                carriers.append(carrier)
        except BaseException:
            for each in carriers:
                each.close()
            raise
        return CarriedGroup(form, carriers, accelerator, progress, joined)

    with progress.wait():
        if form.rank not in form.nccl:
            return by_host()
        everybody = len(form.nccl) == form.size
        if everybody and form.size <= 2 * REACH + 1:
            return _by_nccl(form, store, accelerator, progress)
        whole = by_host()
        try:
            near = _by_nccl(form, store, accelerator, progress)
        except BaseException:
            whole.close()
            raise
        return HybridGroup(near, whole, near if everybody else whole)


def _by_nccl(form: FormGroup, store: ChannelStore, accelerator: Accelerator, progress: WorkerProgress) -> NcclGroup:
    bind_nccl(form.address)
    if form.backend == "tcp":  # its GPUs may be of several hosts
        try:
            address = listening_address(form.address)
        except NoAddress:  # NCCL needs none on one host
            address = ""
        require_reachable(form.rank, form.nccl, address, store, "nccl-reach")
    try:
        return NcclGroup(form, store, accelerator, progress)
    except RuntimeError as error:
        raise RankLost(f"the group could not be formed: {str(error).splitlines()[0]}") from error
