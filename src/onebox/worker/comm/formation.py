"""Groups of workers: exchange by shared memory or torch.distributed, or reduction at the client.

A group's rendezvous goes over the authenticated channel: :class:`ChannelStore` is a ``torch.distributed.Store`` whose
keys are stored at the client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, dtype_name, from_frame, spec_of, to_frame
from onebox.wire.protocol.groups import FormGroup, Rendezvous
from onebox.wire.protocol.responses import Contribution, Joined, Lookup
from onebox.worker.comm.api import Begun, ClientChannel, Finish, RankLost, ReceivedTensor, RowRange, WorkerGroup
from onebox.worker.comm.emulated_links import EmulatedLinks
from onebox.worker.comm.hybrid import HybridGroup
from onebox.worker.comm.shm.gpu_copy import shm_copier_for
from onebox.worker.comm.shm.group import ShmGroup
from onebox.worker.comm.shm.rendezvous import find_shm_peers
from onebox.worker.comm.shm.segment import supported
from onebox.worker.comm.torch_dist import TorchDistGroup
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.network_interfaces import NoAddress, is_foreign


class ChannelStore(dist.Store):
    """A key-value store at the client, for the rendezvous of one group."""

    def __init__(self, channel: ClientChannel, group: int, timeout_s: float) -> None:
        super().__init__()
        self._channel = channel
        self._group = group
        self._timeout_s = timeout_s

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._ask("set", [key], value if isinstance(value, bytes) else bytes(value, "utf8"))

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
        return self._ask("get", [key])

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return the result."""
        return int(self._ask("add", [key], str(value).encode()))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return self._ask("check", keys) == b"1"

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return self._ask("delete", [key]) == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        for key in keys:
            self._ask("get", [key])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waiting for a key."""
        self._timeout_s = timeout.total_seconds()

    def _ask(self, action: Any, keys: list[str], value: bytes = b"") -> bytes:
        ticket = self._channel.new_ticket()
        self._channel.send_to_client(Lookup(ticket, self._group, action, tuple(keys), value))
        if action == "set":
            return b""
        answer, _ = self._channel.await_ticket(ticket, self._timeout_s)
        assert isinstance(answer, Rendezvous)
        return answer.value


class ClientGroup:
    """A group that reduces at the client."""

    def __init__(self, form: FormGroup, channel: ClientChannel, device: torch.device) -> None:
        self.rank = form.rank
        self._number = form.group
        self._timeout_s = form.timeout_s
        self._channel = channel
        self._device = device
        self._order = 0

    @property
    def joined(self) -> Joined:
        """Return that no memory is shared."""
        return Joined()

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Refuse: the client reduces for all ranks only."""
        raise WireError("a group at the client sums for all of its ranks, not for one")

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Refuse: the client does not forward tensors."""
        raise WireError("a group at the client only sums")

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Send tensors of one type to the client for reduction, as one flat tensor."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        ticket = self._channel.new_ticket()
        spec = spec_of(flat)
        self._channel.send_to_client(Contribution(ticket, self._number, self._order, spec), [to_frame(flat)])
        self._order += 1

        def finish() -> ReceivedTensor:
            _, frames = self._channel.await_ticket(ticket, self._timeout_s)
            total = from_frame(TensorSpec(dtype_name(flat.dtype), tuple(flat.shape)), frames[0])
            return ReceivedTensor(total.to(self._device), time.monotonic_ns())

        return finish

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int) -> Finish:
        """Refuse: the client does not forward tensors."""
        raise WireError("a group at the client only sums")

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Refuse: the client does not forward tensors."""
        raise WireError("a group at the client has no way from worker to worker")

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Refuse: the client does not forward tensors."""
        raise WireError("a group at the client has no way from worker to worker")

    def interrupt(self) -> None:
        """Do nothing: the client replies, with an error if nothing will arrive."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def form_group(
    form: FormGroup,
    channel: ClientChannel,
    device: torch.device,
    progress: WorkerProgress,
    emulated_links: EmulatedLinks,
) -> WorkerGroup:
    """Join a group.

    Args:
        form: The group, with this worker's rank.
        channel: The channel to the client, for the rendezvous.
        device: Device of the tensors.
        progress: Marked during waits.
        emulated_links: State of this worker's emulated links.

    Raises:
        RankLost: The others did not join in time.
        NoAddress: This host does not have the address under which others reach it, where Gloo would have to listen.
    """
    if form.backend == "client":
        return ClientGroup(form, channel, device)
    store = ChannelStore(channel, form.group, form.timeout_s)
    with progress.wait():
        met = find_shm_peers(form, store, device.type) if form.shared and supported() else None
        near = None if met is None else ShmGroup(form, met, device, progress, emulated_links, shm_copier_for(device))
        if near is not None and met is not None and len(met.memories) == form.size:
            return near
        try:
            whole = _by_sockets(form, store, device, progress)
        except BaseException:
            if near is not None:
                near.close()
            raise
        if near is None or met is None:
            return whole
        if len(met.memories) == 1 and not met.apart:
            near.close()
            return whole
        return HybridGroup(near, whole)


def _by_sockets(form: FormGroup, store: ChannelStore, device: torch.device, progress: WorkerProgress) -> TorchDistGroup:
    if form.links:
        raise WireError("links can be emulated in groups of one Linux host with x86-64 only")
    if form.backend == "gloo" and is_foreign(form.address):
        raise NoAddress(f"this host has no address {form.address} of its own, where other workers would connect to")
    try:
        return TorchDistGroup(form, store, device, progress)
    except RuntimeError as error:
        raise RankLost(f"the group could not be formed: {str(error).splitlines()[0]}") from error
