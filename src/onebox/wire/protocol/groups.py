"""Messages about process groups: who forms one, who leaves, and what the client says in their rendezvous and sums."""

from __future__ import annotations

from typing import Literal

from onebox.wire.program import Message


class EmulatedLink(Message, frozen=True):
    """How slow transfers to a rank are made to be, for experiments on one host.

    Args:
        peer: The rank.
        link: A number of the way from this worker to that one; transfers of all groups that share it queue up on it.
        latency_s: Seconds that everything takes in addition.
        bandwidth_bps: Bytes per second at most; infinite for no cap.
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
        size: How many workers.
        backend: ``gloo`` or ``nccl``; or ``client``: sums are made at the client, nothing goes worker to worker.
        address: The address of this host that the group's sockets bind.
        timeout_s: Bound of every wait inside the group.
        shared: Whether what goes between members that are on one host is to go through memory that they share, as far
            as they find that they can.
        links: This worker's emulated links to other ranks; only where all share memory.
        aside: Whether it is for what travels in the background, from memory of the host to memory of the host.
    """

    group: int
    rank: int
    size: int
    backend: Literal["gloo", "nccl", "client"]
    address: str
    timeout_s: float
    shared: bool = False
    links: tuple[EmulatedLink, ...] = ()
    aside: bool = False


class LeaveGroup(Message, frozen=True, tag="leave"):
    """Leave a process group and close its sockets; passed over where this worker is not in it."""

    group: int


class Rendezvous(Message, frozen=True, tag="rendezvous"):
    """Client to worker: the answer to a :class:`Lookup`."""

    ticket: int
    value: bytes


class Reduced(Message, frozen=True, tag="reduced"):
    """Client to worker: the sum of a bucket that was reduced at the client, in one frame."""

    ticket: int


class TicketCancelled(Message, frozen=True, tag="gone"):
    """Client to worker: what a ticket waits for will not come, because a member has left the group."""

    ticket: int


class Retime(Message, frozen=True, tag="retime"):
    """Change what is emulated, for experiments: only a ``sim`` device, and only groups with emulated links, obey.

    Args:
        speed: What the costs of this ``sim`` device are divided by from now on; 0 for no change.
        links: New values of this worker's emulated links, by the numbers of the ways; their peers do not count.
    """

    speed: float = 0.0
    links: tuple[EmulatedLink, ...] = ()
