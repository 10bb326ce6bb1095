"""Groups of workers: exchange by shared memory or torch.distributed, or reduction at the client.

A group's rendezvous goes over the authenticated channel: :class:`ChannelStore` is a ``torch.distributed.Store`` whose
keys are stored at the client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec, dtype_name, from_frame, spec_of, to_frame
from onebox.wire.protocol.groups import FormGroup, Rendezvous
from onebox.wire.protocol.responses import Contribution, Joined, Lookup
from onebox.worker.comm.api import Begun, ClientChannel, Finish, ReceivedTensor, RowRange, WorkerGroup
from onebox.worker.comm.emulated_links import EmulatedLinks
from onebox.worker.comm.hybrid import HybridGroup
from onebox.worker.comm.shm.gpu_copy import shm_copier_for
from onebox.worker.comm.shm.group import ShmGroup
from onebox.worker.comm.shm.rendezvous import find_shm_peers
from onebox.worker.comm.shm.segment import RankLost, supported
from onebox.worker.comm.torch_dist import TorchDistGroup
from onebox.worker.programs.interpreter import WorkerProgress
from onebox.worker.system.network_interfaces import NoAddress, is_foreign

__all__ = [
    "ChannelStore",
    "ClientChannel",
    "ClientGroup",
    "EmulatedLinks",
    "PendingBucket",
    "RankLost",
    "WorkerGroup",
    "form_group",
]


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
        self._channel.say(Lookup(ticket, self._group, action, tuple(keys), value))
        if action == "set":
            return b""
        answer, _ = self._channel.await_ticket(ticket, self._timeout_s)
        assert isinstance(answer, Rendezvous)
        return answer.value


class PendingBucket:
    """Buffers that are being received as one flat tensor; implements
    :class:`~onebox.worker.memory.buffers.PendingBuffers`.

    Args:
        numbers: Their numbers.
        shapes: Their shapes.
        size_bytes: Total bytes.
        finish: Waits for all elements.
        done: Called once when they are present, with the time since which they are known to be.
        into: Destination tensors of these shapes; empty for new ones.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        shapes: Sequence[torch.Size],
        size_bytes: int,
        finish: Finish,
        done: Callable[[int], None],
        into: Sequence[Tensor] = (),
    ) -> None:
        self.size_bytes = size_bytes
        self._into = into
        self._numbers = numbers
        self._shapes = shapes
        self._finish: Finish | None = finish
        self._done = done
        self._failure = ""

    def wait(self) -> dict[int, Tensor]:
        """Wait for the elements and return each buffer's part of them.

        Raises:
            PeerLost: They will not arrive; repeated calls raise the same error.
            WireError: Another rank sent something else.
        """
        if self._finish is None:
            raise RankLost(f"what was waited for before did not come: {self._failure}")
        finish, self._finish = self._finish, None
        try:
            flat, at_ns = finish()
        except Exception as error:
            self._failure = str(error)
            raise
        self._done(at_ns)
        made = _parts(flat, self._shapes)
        if self._into:
            made = [own.copy_(part) for own, part in zip(self._into, made, strict=True)]
        return dict(zip(self._numbers, made, strict=True))

    def end(self) -> None:
        """Do nothing: later data is ignored."""


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of a flat tensor; the tensor itself if it is a single part of its shape, as in most messages."""
    if len(shapes) == 1 and flat.shape == shapes[0]:
        return [flat]
    parts = flat.reshape(-1).split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


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
        self._channel.say(Contribution(ticket, self._number, self._order, spec), [to_frame(flat)])
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
    form: FormGroup, channel: ClientChannel, device: torch.device, progress: WorkerProgress, wires: EmulatedLinks
) -> WorkerGroup:
    """Join a group.

    Args:
        form: The group, with this worker's rank.
        channel: The channel to the client, for the rendezvous.
        device: Device of the tensors.
        progress: Marked during waits.
        wires: State of this worker's emulated links.

    Raises:
        PeerLost: The others did not join in time.
        NoAddress: This host does not have the address under which others reach it, where Gloo would have to listen.
    """
    if form.backend == "client":
        return ClientGroup(form, channel, device)
    store = ChannelStore(channel, form.group, form.timeout_s)
    with progress.wait():
        met = find_shm_peers(form, store, device.type) if form.shared and supported() else None
        near = None if met is None else ShmGroup(form, met, device, progress, wires, shm_copier_for(device))
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
