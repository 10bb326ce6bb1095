"""Messages about process groups: forming, leaving, and the client's part in their rendezvous and reductions."""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Message


class EmulatedLink(Message, frozen=True):
    """Emulated link from a ``sim`` device to a rank.

    Args:
        peer: The rank.
        link: Number of the link from this worker to that one; transfers of all groups that share it queue up on it.
        latency_s: Additional seconds of every transfer.
        bandwidth_bps: Most bytes per second; infinite for no limit.
    """

    peer: int
    link: int
    latency_s: float
    bandwidth_bps: float


class FormGroup(Message, frozen=True, tag="form"):
    """Join a process group: worker to worker, its rendezvous over this channel.

    Args:
        group: Its number, from 1.
        rank: This worker's rank.
        size: Number of workers.
        backend: ``tls`` for connections with encryption, ``tcp`` for connections without; or ``client``: reductions
            are done at the client, without transfers between workers.
        address: The address of this host at which the client lets workers of other hosts connect; ignored by workers
            of an agent, which names its own.
        timeout_s: Bound of every wait inside the group.
        shared: Whether members on one host use shared memory where possible.
        links: The emulated links of a ``sim`` device to other ranks; others refuse any.
        aside: Whether it is for background transfers between host memories.
        nccl: Ranks that use NCCL among themselves, this one included: GPUs of which no two are the same.
    """

    group: int
    rank: int
    size: int
    backend: Literal["tcp", "tls", "client"]
    address: str
    timeout_s: float
    shared: bool = False
    links: tuple[EmulatedLink, ...] = ()
    aside: bool = False
    nccl: tuple[int, ...] = ()


class LeaveGroup(Message, frozen=True, tag="leave"):
    """Leave a process group and close its sockets; ignored if this worker is not in it."""

    group: int


class Rendezvous(Message, frozen=True, tag="rendezvous"):
    """Client to worker: the reply to a :class:`Lookup`, a value for each key of a ``get``, and one otherwise."""

    ticket: int
    values: tuple[bytes, ...]


class Reduced(Message, frozen=True, tag="reduced"):
    """Client to worker: the sum of a bucket that was reduced at the client, in one frame."""

    ticket: int


class TicketCancelled(Message, frozen=True, tag="gone"):
    """Client to worker: the result of a ticket will not arrive, because a member has left the group."""

    ticket: int


class Retime(Message, frozen=True, tag="retime"):
    """Change the emulation, for experiments; only ``sim`` devices do.

    Args:
        speed: The new divisor of this ``sim`` device's costs; 0 for no change.
        links: New values of its emulated links, by link number; their peers are ignored.
    """

    speed: float = 0.0
    links: tuple[EmulatedLink, ...] = ()
