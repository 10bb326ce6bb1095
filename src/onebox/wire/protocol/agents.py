"""What a client and an agent say to each other; an agent leases the devices of its host and starts workers on them.

One message is one frame, strictly decoded and bounded by :data:`MESSAGE_BYTES`; no tensor travels here. A client puts
another frame before each of its own, a token of :data:`TOKEN_BYTES` that tells its sessions apart; it numbers its
requests, and the answer bears the number; what an agent says by itself is about a lease. The agent is the
CURVE server, and lets in the keys that were paired with it. Workers are reached over channels of their own, with keys
of their own, which the agent hands out with the lease.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from onebox.errors import WireError

AGENT_PROTOCOL = 3
"""Version of everything in this file; both sides must agree."""

AGENT_PORT = 7171
"""Where an agent listens unless it is told otherwise."""

PAIRING_PORT = 7172
"""Where ``onebox pair accept`` listens unless it is told otherwise."""

GRACE_S = 30.0
"""How long a client may be silent before its leases end, unless it asks for something else: a laptop that sleeps for a
moment and a script that is stopped and continued keep what they have, and nobody waits long for what a dead one had.
(etcd's sessions last 60 s and Kubernetes' nodes 40 to 50 s by default, ZooKeeper's and Consul's mostly 10 to 40 s.)"""

TOKEN_BYTES = 16
"""Bytes of the token of a client's session, which it draws by lot and keeps while its connection is made again."""

RENEW_S = 0.5
"""How often a client renews its leases, which is its sign of life; the agent answers each, which is its own."""

MESSAGE_BYTES = 1 << 20
"""The most bytes of a message."""


class AgentMessage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base: immutable, encoded as arrays, with no field too many."""


class SoftwareVersions(AgentMessage, frozen=True):
    """What one side runs; both must have the same protocols, and the same torch but for what follows a ``+``."""

    agent_protocol: int
    protocol: int
    onebox: str
    torch: str
    python: str


class Want(AgentMessage, frozen=True):
    """A device that a client wants.

    Args:
        device: ``cuda:K`` for that one, ``cuda`` for any, ``cpu`` for a share of the cores.
        threads: Threads of its CPU operators; 0 for the agent's choice.
        memory_bytes: The most bytes of its buffers. For a GPU, 0 asks for the device alone, else others may have the
            rest of its memory; for ``cpu`` 0 asks for as much as the agent gives.
    """

    device: str
    threads: int = 0
    memory_bytes: int = 0


class Holder(AgentMessage, frozen=True):
    """Who has leased a device, or part of it."""

    client: str
    lease: int
    memory_bytes: int
    since_s: float
    """For how many seconds."""


class Offer(AgentMessage, frozen=True):
    """A device that an agent offers.

    Args:
        device: ``cuda:K``, or ``cpu``, which stands for all cores that are offered.
        name: Product name.
        memory_bytes: Memory that is offered.
        threads: Cores that are offered; of a GPU those beside it.
        free_bytes: Memory that is not leased.
        holders: Who has leased what of it.
        load: Share of the time that it was busy of late, 0 to 1; -1 where that is not known.
    """

    device: str
    name: str
    memory_bytes: int
    threads: int
    free_bytes: int
    holders: tuple[Holder, ...] = ()
    load: float = -1.0


class Started(AgentMessage, frozen=True):
    """A worker that an agent has started for a lease.

    Args:
        device: Its device: ``cpu`` or ``cuda:K``.
        process: Its process id on that host.
        key: Its public CURVE key.
        commands: Endpoint of its commands, ``tcp://ADDRESS:PORT``.
        beats: Endpoint of its signs of life.
    """

    device: str
    process: int
    key: str
    commands: str
    beats: str


# ---- from a client


class Introduce(AgentMessage, frozen=True, tag="introduce"):
    """The first words; the answer is :class:`Introduced` or :class:`Refused`."""

    number: int
    versions: SoftwareVersions
    client: str
    """How others see it: ``user@host``."""


class Inspect(AgentMessage, frozen=True, tag="inspect"):
    """What is offered, who has it, and who waits; the answer is :class:`Stock`."""

    number: int


class Lease(AgentMessage, frozen=True, tag="lease"):
    """Ask for devices, all or none; the answer is :class:`Queued`, once for every change of place, and in the end
    :class:`Leased` or :class:`Refused`.

    Args:
        number: Of the request.
        wants: The devices.
        key: The public CURVE key that the workers are to let in.
        grace_s: How long the client may be silent before the lease ends.
        wait: Whether to queue where devices are leased by others; else that is refused.
        speed: For tests: fraction of their full speed that CPU workers work at.
    """

    number: int
    wants: tuple[Want, ...]
    key: str
    grace_s: float = GRACE_S
    wait: bool = True
    speed: float = 1.0


class Renew(AgentMessage, frozen=True, tag="renew"):
    """A sign of life, for all leases of this client; the answer is :class:`Renewed`."""

    number: int


class Release(AgentMessage, frozen=True, tag="release"):
    """Give a lease back, or of it one worker, by its place in the lease; or leave the queue with the request of that
    number. The answer is :class:`Done`, when the workers are gone."""

    number: int
    lease: int = 0
    request: int = 0
    worker: int | None = None


class ReadLog(AgentMessage, frozen=True, tag="log"):
    """The last lines of the agent's log; the answer is :class:`LogLines`."""

    number: int
    lines: int


Request = Introduce | Inspect | Lease | Renew | Release | ReadLog


# ---- from an agent


class Introduced(AgentMessage, frozen=True, tag="introduced"):
    """The agent's first words.

    Args:
        number: Of the request.
        versions: What it runs.
        host: Its host's name.
        address: The address that it advertises for this host.
    """

    number: int
    versions: SoftwareVersions
    host: str
    address: str


class Stock(AgentMessage, frozen=True, tag="stock"):
    """What an agent offers.

    Args:
        number: Of the request.
        offers: Its devices.
        queue: Who waits, first come first.
        load: Processes that want a core, by the number of cores: the load average of a minute.
        uptime_s: Since when the agent runs.
    """

    number: int
    offers: tuple[Offer, ...]
    queue: tuple[str, ...] = ()
    load: float = 0.0
    uptime_s: float = 0.0


class Queued(AgentMessage, frozen=True, tag="queued"):
    """A request for a lease waits.

    Args:
        number: Of the request.
        place: Its place in the queue, from 1.
        behind: Who has what it waits for, for a person.
    """

    number: int
    place: int
    behind: str


class Leased(AgentMessage, frozen=True, tag="leased"):
    """A lease, with a worker for each device that was wanted, in that order."""

    number: int
    lease: int
    workers: tuple[Started, ...]


class Renewed(AgentMessage, frozen=True, tag="renewed"):
    """The leases of this client that the agent knows of."""

    number: int
    leases: tuple[int, ...]


class Done(AgentMessage, frozen=True, tag="done"):
    """A request was carried out."""

    number: int


class LogLines(AgentMessage, frozen=True, tag="lines"):
    """Lines of the agent's log: JSON objects."""

    number: int
    lines: tuple[str, ...]


class Refused(AgentMessage, frozen=True, tag="refused"):
    """A request was refused, for a reason that a person can read: what came, what is allowed, what to do.

    Args:
        number: Of the request.
        kind: ``versions``, ``usage`` (nothing like it is offered, or over this client's limits), ``busy`` (and it was
            not to wait), ``failed`` (a worker did not start), ``ended`` (no such lease, or no longer).
        reason: For a person.
    """

    number: int
    kind: Literal["versions", "usage", "busy", "failed", "ended"]
    reason: str


class WorkerEnded(AgentMessage, frozen=True, tag="worker-ended"):
    """A worker of a lease ended by itself; the others of the lease go on.

    Args:
        lease: The lease.
        worker: Its position in the lease.
        exit_status: Negative for the signal that ended it.
        last_words: The end of what it wrote to standard error.
    """

    lease: int
    worker: int
    exit_status: int | None
    last_words: str


class LeaseEnded(AgentMessage, frozen=True, tag="lease-ended"):
    """A lease has ended, and its workers with it; not because the client released it."""

    lease: int
    why: str


AgentResponse = Introduced | Stock | Queued | Leased | Renewed | Done | LogLines | Refused | WorkerEnded | LeaseEnded


# ---- pairing: with keys that both sides derive from a code that a person carries from one to the other


class PairRequest(AgentMessage, frozen=True, tag="pair"):
    """A client's name and its lasting public key."""

    client: str
    key: str


class PairReply(AgentMessage, frozen=True, tag="paired"):
    """The agent's host and its lasting public key: from now on it lets the client in."""

    host: str
    key: str


_requests = msgspec.msgpack.Decoder(Request)
_sayings = msgspec.msgpack.Decoder(AgentResponse)
_pairs = msgspec.msgpack.Decoder(PairRequest)
_paired = msgspec.msgpack.Decoder(PairReply)
_encoder = msgspec.msgpack.Encoder()


def encode_agent(message: Request | AgentResponse | PairRequest | PairReply) -> bytes:
    """Return the one frame of a message.

    Raises:
        WireError: It is too large, or holds what does not travel.
    """
    try:
        frame = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"a message that cannot be encoded: {error}") from None
    if len(frame) > MESSAGE_BYTES:
        raise WireError(f"a message of {len(frame)} bytes is over the limit of {MESSAGE_BYTES}")
    return frame


def decode_request(frame: bytes) -> Request:
    """Return what a client asks of an agent.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: Request = _decode(_requests, frame, "a request")
    return found


def decode_agent_response(frame: bytes) -> AgentResponse:
    """Return what an agent says to a client.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: AgentResponse = _decode(_sayings, frame, "an agent's message")
    return found


def decode_pair(frame: bytes) -> PairRequest:
    """Return what a client says when it is paired.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: PairRequest = _decode(_pairs, frame, "a pairing")
    return found


def decode_paired(frame: bytes) -> PairReply:
    """Return what an agent answers when it is paired.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: PairReply = _decode(_paired, frame, "the answer to a pairing")
    return found


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes, what: str) -> Any:
    if len(frame) > MESSAGE_BYTES:
        raise WireError(f"{what} of {len(frame)} bytes; allowed are {MESSAGE_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what} that is not of this protocol: {error}") from None
