"""What a group of workers is to the machine that is in it, whatever carries its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import TensorSpec
from onebox.wire.protocol.groups import Reduced, Rendezvous
from onebox.wire.protocol.responses import Contribution, Joined, Left, Lookup


class RankLost(Exception):
    """Another worker of a group went away."""


class ReceivedTensor(NamedTuple):
    """What came from other ranks.

    Args:
        tensor: It.
        at_ns: Since when it is known to be there, on the monotonic clock.
    """

    tensor: Tensor
    at_ns: int


Finish = Callable[[], ReceivedTensor]
"""Waits for what was started, once. Whoever forgets it without a call gives up what would have come.

It raises ``PeerLost`` when another rank cannot do its part, and ``WireError`` when another rank did something else.
"""


Begun = Finish | int
"""What was started: waits for what comes to this rank; or, for a rank that only hands over, when that can be had, in
monotonic nanoseconds."""


class RowRange(NamedTuple):
    """Where some rows of a tensor belong that is sent in parts.

    Args:
        whole: What all parts are together.
        first: The first row, an index of the first dimension.
    """

    whole: TensorSpec
    first: int


class WorkerGroup(Protocol):
    """A group that this worker is in.

    Sums, gathers and broadcasts are started in the same order by all ranks.
    """

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def joined(self) -> Joined:
        """With whom memory is shared."""

    def reduce(self, tensors: Sequence[Tensor]) -> Finish:
        """Start to sum tensors of one type over the ranks; what comes is the flat sum."""

    def collect(self, tensors: Sequence[Tensor], root: int) -> Begun:
        """Start to sum tensors of one type for one rank; what comes there is the flat sum, the others hand over."""

    def broadcast(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], root: int) -> Begun:
        """Start to hand tensors of one type from one rank, which has them, to the others; what comes is flat."""

    def gather(self, tensor: Tensor, spec: TensorSpec, dim: int) -> Finish:
        """Start to put the ranks' tensors together along a dimension; what comes is specified."""

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a tensor to a rank without waiting for it; return when it can be had there, in monotonic nanoseconds.

        Args:
            tensor: The tensor.
            peer: The rank.
            channel: What is sent on one is received in the same order.
            within: What it is a part of; all parts of one tensor are sent in order.
        """

    def receive(self, spec: TensorSpec, peer: int, channel: int, rows: Sequence[int] = ()) -> Finish:
        """Start to receive a tensor from a rank: the next of a channel that nobody has asked for.

        Args:
            spec: What it is.
            peer: The rank.
            channel: The channel.
            rows: The rows of each part that it is sent in; empty where it is sent whole.
        """

    def interrupt(self) -> None:
        """Let nobody wait here for other ranks any longer, as far as shutting down sockets does not do it.

        Callable from any thread.
        """

    def close(self) -> None:
        """Leave the group. What was sent can still be received; who waits for more hears of it at once."""


def check_rows(spec: TensorSpec, rows: Sequence[int]) -> None:
    """Require that parts of so many rows are a whole tensor.

    Raises:
        WireError: They are not.
    """
    if rows and (not spec.shape or min(rows) < 1 or sum(rows) != spec.shape[0]):
        raise WireError(f"parts of {', '.join(map(str, rows))} rows are not {spec}: they are its first dimension's")


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


class KeyValueStore(Protocol):
    """What is needed of a group's key-value store."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting for it."""
