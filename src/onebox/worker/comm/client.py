"""The client's services for groups, as a worker uses them: a key-value store for the rendezvous, and sums.

Both go over the authenticated channel: :class:`ChannelStore` is a ``torch.distributed.Store`` whose keys are stored at
the client.
"""

from __future__ import annotations

import threading
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
from onebox.wire.protocol.responses import LOOKUP_KEYS, Contribution, Joined, Lookup
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import Begun, ClientChannel, Finish, RankLost, ReceivedTensor, RowRange


class ChannelStore(dist.Store):
    """A key-value store at the client, for the rendezvous of one group.

    It serves the thread that forms the group, which owns the channel. Threads of ``ProcessGroupNCCL`` use its store
    besides, to announce failures to each other and to look for such announcements, at any time until they end; what
    they write is dropped, and what they look for is not there.
    """

    def __init__(self, channel: ClientChannel, group: int, timeout_s: float) -> None:
        super().__init__()
        self._owner = threading.get_ident()
        self._channel = channel
        self._group = group
        self._timeout_s = timeout_s

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._ask("set", [key], value if isinstance(value, bytes) else bytes(value, "utf8"))

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
        return self._ask("get", [key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, each of which is named once, waiting for them."""
        return [value for some in _parts(keys) for value in self._ask("get", some)]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return the result."""
        return int(self._ask("add", [key], str(value).encode())[0])

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return all(self._ask("check", some)[0] == b"1" for some in _parts(list(dict.fromkeys(keys))))

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return self._ask("delete", [key])[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self.multi_get(list(dict.fromkeys(keys)))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waiting for a key."""
        self._timeout_s = timeout.total_seconds()

    def _ask(self, action: Any, keys: list[str], value: bytes = b"") -> tuple[bytes, ...]:
        if threading.get_ident() != self._owner:
            if action in ("set", "check", "delete"):
                return (b"",)
            raise RankLost("the store of a group is asked by a thread that has not formed it")
        ticket = self._channel.new_ticket()
        self._channel.send_to_client(Lookup(ticket, self._group, action, tuple(keys), value))
        if action == "set":
            return (b"",)
        answer, _ = self._channel.await_ticket(ticket, self._timeout_s)
        assert isinstance(answer, Rendezvous)
        return answer.values


def _parts(keys: list[str]) -> list[list[str]]:
    """Return keys in parts of which each fits into a lookup."""
    return [keys[start : start + LOOKUP_KEYS] for start in range(0, len(keys), LOOKUP_KEYS)]


class ClientGroup:
    """A group that reduces at the client."""

    def __init__(self, form: FormGroup, channel: ClientChannel, accelerator: Accelerator) -> None:
        self.rank = form.rank
        self._number = form.group
        self._timeout_s = form.timeout_s
        self._channel = channel
        self._accelerator = accelerator
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
        frame = to_frame(self._accelerator.to_host(flat))
        self._channel.send_to_client(Contribution(ticket, self._number, self._order, spec), [frame])
        self._order += 1

        def finish() -> ReceivedTensor:
            _, frames = self._channel.await_ticket(ticket, self._timeout_s)
            total = from_frame(TensorSpec(dtype_name(flat.dtype), tuple(flat.shape)), frames[0])
            return ReceivedTensor(self._accelerator.to_device(total), time.monotonic_ns())

        return finish

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Refuse: the client does not forward tensors."""
        raise WireError("a group at the client only sums")

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Refuse: the client does not forward tensors."""
        raise WireError("a group at the client has no way from worker to worker")

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Refuse: the client does not forward tensors."""
        raise WireError("a group at the client has no way from worker to worker")

    def check(self) -> int:
        """Return 0: nothing goes on without the host."""
        return 0

    def attend(self) -> bool:
        """Return that nothing is needed of the client."""
        return False

    def interrupt(self) -> None:
        """Do nothing: the client replies, with an error if nothing will arrive."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
