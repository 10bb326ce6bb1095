"""Interface of what carries messages from this rank to some others of a group, and theirs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from onebox.wire import TensorSpec
from onebox.worker.comm.api import RowRange
from onebox.worker.comm.collectives import MessageInfo

FEW_RANKS = 8
"""Ranks up to which all exchange with all: they connect when the group is formed, so that a firewall is told of before
work begins, and a small sum takes one step. In a larger group two connect when they first exchange something."""


class Expected(Protocol):
    """A message that was asked for. Where this object is dropped, the message is given back when it comes."""

    lasting: bool
    """Whether the elements are the reader's own, to keep and to overwrite."""

    def wait(self, *, aside: bool = False) -> MessageInfo:
        """Wait for it.

        Args:
            aside: Whether this is not the thread that owns the channel to the client.

        Raises:
            RankLost: It does not come.
        """

    def part(self) -> Tensor:
        """Return its elements in the host's memory, flat or in its shape; valid until it is given back.

        Raises:
            WireError: It has none.
        """

    def take(self) -> Tensor:
        """Return a tensor of the device with its elements, and give it back when they are not needed any more.

        Raises:
            WireError: It has none.
        """

    def give_back(self) -> None:
        """Say that its elements are not needed any more. Idempotent."""


class Posted:
    """A message that was posted to several ranks, which this one reads, too, until it is given back or dropped.

    Args:
        part: The elements, flat; not to be overwritten.
        at_ns: The time at which all readers have it.
        release: Called when it is given back.
    """

    __slots__ = ("_release", "at_ns", "part")

    def __init__(self, part: Tensor, at_ns: int, release: Callable[[], None] | None = None) -> None:
        self.part = part
        self.at_ns = at_ns
        self._release = release

    def give_back(self) -> None:
        """Say that this rank does not read it any more. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self.give_back()


class Carrier(Protocol):
    """Carries messages to some ranks, and theirs; those of one channel arrive in order.

    :meth:`post` and the waits of what is expected may be called from two threads, all else from that of the group.
    """

    peers: tuple[int, ...]
    """Those ranks."""

    shares_sums: bool
    """Whether each byte, and each connection, costs so much that not all ranks add up the whole of a sum."""

    def send(self, tensor: Tensor, peer: int, channel: int, within: RowRange | None = None) -> int:
        """Send a tensor; see :meth:`onebox.worker.comm.api.WorkerGroup.send`."""

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
        """Send tensors of one type in the host's memory, concatenated, to some ranks without waiting.

        Args:
            tensors: The tensors.
            spec: What their readers are to make of them.
            peers: The ranks.
            channel: The channel.
            code: Purpose code.
            kept: Whether nobody overwrites the tensors, so that they need not be copied.
        """

    def expect(self, peer: int, channel: int) -> Expected:
        """Ask for the next message of a channel that has not been asked for."""

    def attend(self, *, waiting: bool = False) -> bool:
        """Ask the client what other threads need of it; return whether they may need more.

        Args:
            waiting: Whether this rank waits for others in another thread.

        Raises:
            RankLost: A peer cannot be reached; or this rank waits, and the group is dissolved.
        """

    def interrupt(self) -> None:
        """End all waits; callable from any thread."""

    def close(self) -> None:
        """Leave the group. What was sent can still be received; peers that wait for more fail at once. Idempotent."""
