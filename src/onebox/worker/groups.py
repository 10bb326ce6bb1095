"""Groups of workers: tensors go worker to worker by torch.distributed, or are summed at the client.

A group's rendezvous goes over the authenticated channel: :class:`ChannelStore` is a ``torch.distributed.Store`` whose
keys live at the client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onebox.wire import DTYPES, TensorSpec, dtype_name, from_frame, spec_of, to_frame
from onebox.wire.messages import Contribution, FormGroup, Left, Lookup, Reduced, Rendezvous
from onebox.worker.shared import SharedReducer, supported
from onebox.worker.tape import Progress


class PeerLost(Exception):
    """Another worker of a group went away."""


class ClientChannel(Protocol):
    """What a group needs of the channel to the client."""

    def say(self, saying: Lookup | Contribution | Left, frames: Sequence[Any] = ()) -> None:
        """Send something to the client."""

    def await_ticket(self, ticket: int, timeout_s: float) -> tuple[Rendezvous | Reduced, Sequence[Any]]:
        """Wait for the client's answer to a ticket; other messages wait meanwhile.

        Raises:
            PeerLost: It will not come, or did not come in time.
        """

    def new_ticket(self) -> int:
        """Return a number that no other ticket of this worker has."""


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
        """Add to a counter and return it."""
        return int(self._ask("add", [key], str(value).encode()))

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are set."""
        return self._ask("check", keys) == b"1"

    def delete_key(self, key: str) -> bool:
        """Delete a key and tell whether it was there."""
        return self._ask("delete", [key]) == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        for key in keys:
            self._ask("get", [key])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for a key."""
        self._timeout_s = timeout.total_seconds()

    def _ask(self, action: Any, keys: list[str], value: bytes = b"") -> bytes:
        ticket = self._channel.new_ticket()
        self._channel.say(Lookup(ticket, self._group, action, tuple(keys), value))
        if action == "set":
            return b""
        answer, _ = self._channel.await_ticket(ticket, self._timeout_s)
        assert isinstance(answer, Rendezvous)
        return answer.value


class Bucket:
    """Buffers that are being reduced as one flat tensor; fulfils :class:`~onebox.worker.store.Pending`.

    Args:
        numbers: Their numbers.
        shapes: Their shapes.
        size_bytes: Bytes of them all.
        finish: Waits for the flat sum and returns it.
        done: Called once when it is there.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        shapes: Sequence[torch.Size],
        size_bytes: int,
        finish: Callable[[], Tensor],
        done: Callable[[], None],
    ) -> None:
        self.size_bytes = size_bytes
        self._numbers = numbers
        self._shapes = shapes
        self._finish = finish
        self._done = done

    def wait(self) -> dict[int, Tensor]:
        """Wait for the sum and return each buffer's part of it."""
        flat = self._finish()
        self._done()
        parts = flat.split([shape.numel() for shape in self._shapes])
        return {
            number: part.view(shape) for number, part, shape in zip(self._numbers, parts, self._shapes, strict=True)
        }


class Group(Protocol):
    """A group that this worker is in."""

    def reduce(self, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start to sum tensors of one type over the ranks; return what waits for the flat sum and returns it."""

    def send(self, tensor: Tensor, peer: int, channel: int) -> None:
        """Start to send a tensor to a rank."""

    def receive(self, spec: TensorSpec, peer: int, channel: int) -> Callable[[], Tensor]:
        """Start to receive a tensor from a rank; return what waits for it and returns it."""

    def close(self) -> None:
        """Leave the group and close its sockets."""


class TorchGroup:
    """A group by Gloo or NCCL, with no global state in ``torch.distributed``."""

    def __init__(self, form: FormGroup, channel: ClientChannel, device: torch.device, progress: Progress) -> None:
        timeout = timedelta(seconds=form.timeout_s)
        self._store = ChannelStore(channel, form.group, form.timeout_s)
        self._device = device
        self._progress = progress
        self._sending: list[tuple[Any, Tensor]] = []
        self._group: Any
        if form.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(self._store, form.rank, form.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=form.address)]
            options._timeout = timeout
            options._threads = 1
            self._group = dist.ProcessGroupGloo(self._store, form.rank, form.size, options)
        shareable = form.same_host and device.type == "cpu" and supported()
        self._shared = SharedReducer(self._store, form.rank, form.size, form.timeout_s) if shareable else None

    def reduce(self, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start to sum tensors of one type over the ranks, as one flat tensor."""
        if self._shared is not None:
            shared = self._shared
            wait = self._wait(lambda: shared.reduce(tensors))
            return lambda: self._wait(wait)
        flat = _flat(tensors)
        work = self._guard(lambda: self._group.allreduce([flat]))

        def finish() -> Tensor:
            self._wait(work.wait)
            return flat

        return finish

    def send(self, tensor: Tensor, peer: int, channel: int) -> None:
        """Start to send a tensor to a rank; it is kept until it has gone."""
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        dense = tensor.contiguous()
        self._sending.append((self._guard(lambda: self._group.send([dense], peer, channel)), dense))

    def receive(self, spec: TensorSpec, peer: int, channel: int) -> Callable[[], Tensor]:
        """Start to receive a tensor from a rank."""
        tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=self._device)
        work = self._guard(lambda: self._group.recv([tensor], peer, channel))

        def finish() -> Tensor:
            self._wait(work.wait)
            return tensor

        return finish

    def close(self) -> None:
        """Leave the group; peers that wait for this worker fail at once."""
        self._sending.clear()
        if self._shared is not None:
            self._shared.leave()
            self._shared = None
        self._group.abort() if hasattr(self._group, "abort") else None
        self._group = None

    def _wait(self, wait: Callable[[], Any]) -> Any:
        with self._progress.wait():
            return self._guard(wait)

    def _guard(self, call: Callable[[], Any]) -> Any:
        if self._group is None:
            raise PeerLost("the group has been left")
        try:
            return call()
        except RuntimeError as error:
            raise PeerLost(str(error).splitlines()[0]) from error


class ClientGroup:
    """A group whose sums are made at the client."""

    def __init__(self, form: FormGroup, channel: ClientChannel, device: torch.device, progress: Progress) -> None:
        self._number = form.group
        self._timeout_s = form.timeout_s
        self._channel = channel
        self._device = device
        self._order = 0

    def reduce(self, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send tensors of one type to the client to be summed, as one flat tensor."""
        flat = _flat(tensors)
        ticket = self._channel.new_ticket()
        spec = spec_of(flat)
        self._channel.say(Contribution(ticket, self._number, self._order, spec), [to_frame(flat)])
        self._order += 1

        def finish() -> Tensor:
            _, frames = self._channel.await_ticket(ticket, self._timeout_s)
            return from_frame(TensorSpec(dtype_name(flat.dtype), tuple(flat.shape)), frames[0]).to(self._device)

        return finish

    def send(self, tensor: Tensor, peer: int, channel: int) -> None:
        """Raise: the client does not hand tensors on."""
        raise PeerLost("a group at the client has no way from worker to worker")

    def receive(self, spec: TensorSpec, peer: int, channel: int) -> Callable[[], Tensor]:
        """Raise: the client does not hand tensors on."""
        raise PeerLost("a group at the client has no way from worker to worker")

    def close(self) -> None:
        """Nothing is open."""


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def form_group(form: FormGroup, channel: ClientChannel, device: torch.device, progress: Progress) -> Group:
    """Join a group.

    Raises:
        PeerLost: The others did not come in time.
    """
    kind = ClientGroup if form.backend == "client" else TorchGroup
    try:
        with progress.wait():
            return kind(form, channel, device, progress)
    except RuntimeError as error:
        raise PeerLost(f"the group could not be formed: {str(error).splitlines()[0]}") from error
