"""Interface of a worker's communication group, independent of its transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec
from onebox.wire.protocol.groups import Reduced, Rendezvous
from onebox.wire.protocol.responses import Contribution, Joined, Left, Lookup, RelayRequest


class RankLost(Exception):
    """Another worker of a group has ended."""


class ReceivedTensor(NamedTuple):
    """Data received from other ranks.

    Args:
        tensor: The tensor.
        at_ns: Time since which it is known to be present, on the monotonic clock.
    """

    tensor: Tensor
    at_ns: int


Finish = Callable[[], ReceivedTensor]
"""Waits for a started operation, once. Dropping it without a call abandons the result.

It raises ``RankLost`` if another rank cannot do its part, and ``WireError`` if another rank called a different
operation.
"""


Begun = Finish | int
"""A started operation: waits for this rank's result; or, for a rank that only sends, the time at which the data is
available, in monotonic nanoseconds."""


class RowRange(NamedTuple):
    """Location of a chunk of rows in a tensor.

    Args:
        whole: Spec of the whole tensor.
        first: Index of the first row, in the first dimension.
    """

    whole: TensorSpec
    first: int


class WorkerGroup(Protocol):
    """A group that this worker belongs to.

    All ranks must start reductions, gathers and broadcasts in the same order.
    """

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def joined(self) -> Joined:
        """Return the ranks that share memory with this one."""

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Begin to sum tensors of one type over the ranks; the result is the flat sum."""

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to sum tensors of one type for one rank, which receives the flat sum; the others only send."""

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Begin to broadcast tensors of one type from one rank to the others; the result is flat."""

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int, sizes: Sequence[int]) -> Finish:
        """Begin to gather the ranks' tensors along a dimension, where they have some sizes; ``spec`` is the result's.

        Raises:
            WireError: The tensor is no such part.
        """

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a tensor to a rank without waiting; return the time at which it is available there, in monotonic
        nanoseconds.

        Args:
            tensor: The tensor.
            peer: The rank.
            channel: Tensors of one channel are received in the order in which they are sent.
            within: The whole that it is a part of, if any; all parts of one tensor are sent in order.
        """

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Begin to receive a tensor from a rank: the next one of a channel that has not been requested.

        Args:
            spec: Its spec.
            peer: The rank.
            channel: The channel.
            rows: Number of rows of each chunk; empty if it is sent whole.
        """

    def check(self) -> int:
        """Return this worker's progress when the oldest operation began that goes on without the host; 0 for none.

        Waits for such operations do not fail with them.

        Raises:
            RankLost: Such an operation has failed, or has been interrupted, so that its result is undefined.
        """

    def attend(self) -> bool:
        """Ask the client what other threads need of it; return whether they may need more. Called now and then by the
        thread that owns the channel, when it has nothing else to do.

        Raises:
            RankLost: The group has failed in another thread.
        """

    def interrupt(self) -> None:
        """End waits for other ranks; callable from any thread."""

    def close(self) -> None:
        """Leave the group. Data sent before can still be received; ranks that wait for more get an error at once."""


def parts_of(own: TensorSpec, spec: TensorSpec, dim: int, sizes: Sequence[int], rank: int) -> list[TensorSpec]:
    """Return the specs of the parts of a gather.

    Args:
        own: This rank's part.
        spec: The whole.
        dim: The dimension along which it is divided.
        sizes: The size of each rank's part.
        rank: This rank.

    Raises:
        WireError: The parts are not the whole's, or this rank's is not among them.
    """
    if not 0 <= dim < len(own.shape):
        raise WireError(f"{own} has no dimension {dim} to be gathered along")
    specs = [TensorSpec(own.dtype, (*own.shape[:dim], size, *own.shape[dim + 1 :])) for size in sizes]
    whole = TensorSpec(own.dtype, (*own.shape[:dim], sum(sizes), *own.shape[dim + 1 :]))
    if whole != spec or min(sizes, default=0) < 0:
        raise WireError(f"{whole} comes of a gather along dimension {dim} where {spec} was to come")
    if not rank < len(specs) or specs[rank] != own:
        raise WireError(f"{own} is not part {rank} of a gather along dimension {dim} of sizes {list(sizes)}")
    return specs


def check_rows(spec: TensorSpec, rows: Sequence[int]) -> None:
    """Require that chunks with the given numbers of rows form a whole tensor.

    Raises:
        WireError: They do not.
    """
    if rows and (not spec.shape or min(rows) < 1 or sum(rows) != spec.shape[0]):
        raise WireError(f"parts of {', '.join(map(str, rows))} rows are not {spec}: they are its first dimension's")


class ClientChannel(Protocol):
    """The part of the client's channel that a group uses."""

    def send_to_client(self, message: Lookup | Contribution | Left | RelayRequest, frames: Sequence[Any] = ()) -> None:
        """Send a message to the client."""

    def await_ticket(self, ticket: int, timeout_s: float) -> tuple[Rendezvous | Reduced, Sequence[Any]]:
        """Wait for the client's reply to a ticket; other messages are queued meanwhile.

        Raises:
            RankLost: It will not arrive, or did not arrive in time.
        """

    def new_ticket(self) -> int:
        """Return a ticket number that is unique on this worker."""


class KeyValueStore(Protocol):
    """The part of a group's key-value store that a rendezvous uses."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, each of which is named once, waiting for them."""


class MembershipStore(KeyValueStore, Protocol):
    """A group's key-value store that fails once the group is dissolved."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set.

        Raises:
            RankLost: The group is dissolved.
        """
