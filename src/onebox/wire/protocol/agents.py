"""Protocol between a client and an agent, which leases the devices of its host and starts workers on them.

One message is one frame, strictly decoded, with its texts cleaned, and bounded by :data:`MESSAGE_BYTES`; no tensors are
sent here. A client precedes each message by a frame with a token of :data:`TOKEN_BYTES` that identifies its session; it
numbers its requests, and the reply repeats the number; an agent's other messages concern a lease. The agent is the
CURVE server, and accepts keys that were paired with it. Workers have separate channels, with separate keys, which are
part of the lease.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from onebox.errors import WireError
from onebox.wire.clean_text import clean

AGENT_PROTOCOL = 5
"""Version of everything in this file; both sides must agree."""

AGENT_PORT = 7171
"""Default port of an agent."""

PAIRING_PORT = 7172
"""Default port of ``onebox pair accept``."""

GRACE_S = 30.0
"""Default time that a client may be silent before its leases end: a laptop that sleeps for a moment and a script that
is stopped and continued keep their devices, and those of an ended client soon become free. (etcd's sessions last 60 s
and Kubernetes' nodes 40 to 50 s by default, ZooKeeper's and Consul's mostly 10 to 40 s.)"""

TOKEN_BYTES = 16
"""Length of the random token of a client's session, which survives reconnections."""

RENEW_S = 1.0
"""Interval at which a client renews its leases, as its heartbeat; the agent replies to each, as its own heartbeat."""

MESSAGE_BYTES = 1 << 20
"""Most bytes of a message."""


class AgentMessage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base: immutable, encoded as arrays, extra fields forbidden."""


class GreetingMessage(AgentMessage, frozen=True, forbid_unknown_fields=False):
    """Base of what sides of different versions read of each other, to name both: a later version may append fields, but
    keeps these."""


class SoftwareVersions(GreetingMessage, frozen=True):
    """Versions of one side; both must have the same protocols, and the same torch except for a suffix after ``+``."""

    agent_protocol: int
    protocol: int
    onebox: str
    torch: str
    python: str


class Want(AgentMessage, frozen=True):
    """A requested device.

    Args:
        device: ``cuda:K`` for a specific one, ``cuda`` for any, ``cpu`` for a share of the cores.
        threads: Threads of its CPU operators; 0 for the agent's choice.
        memory_bytes: Most bytes of its buffers. For a GPU, 0 requests exclusive use, else others may use the rest of
            its memory; for ``cpu`` 0 leaves the amount to the agent. Its limit for a client bounds both.
    """

    device: str
    threads: int = 0
    memory_bytes: int = 0


class Holder(AgentMessage, frozen=True):
    """Holder of a lease on a device, or on part of it.

    Args:
        client: Its name.
        lease: Number of the lease.
        memory_bytes: Leased memory.
        since_s: Age of the lease in seconds.
        threads: Leased cores.
        silent_s: Seconds since the client was heard; its heartbeats come every :data:`RENEW_S`.
    """

    client: str
    lease: int
    memory_bytes: int
    since_s: float
    threads: int = 0
    silent_s: float = 0.0


class Offer(AgentMessage, frozen=True):
    """A device that an agent offers.

    Args:
        device: ``cuda:K``, or ``cpu``, which stands for all offered cores.
        name: Product name.
        memory_bytes: Offered memory.
        threads: Offered cores; for a GPU, those beside it.
        free_bytes: Memory that is not leased.
        holders: Holders of leases on it.
        load: Fraction of recent time that it was busy, 0 to 1; -1 if unknown.
        free_threads: Cores that are not leased; those beside a GPU are not leased with it.
    """

    device: str
    name: str
    memory_bytes: int
    threads: int
    free_bytes: int
    holders: tuple[Holder, ...] = ()
    load: float = -1.0
    free_threads: int = 0


class Started(AgentMessage, frozen=True):
    """A worker that an agent has started for a lease.

    Args:
        device: Its device: ``cpu`` or ``cuda:K``.
        process: Its process id on that host.
        key: Its public CURVE key.
        commands: Endpoint of its commands, ``tcp://ADDRESS:PORT``.
        heartbeats: Endpoint of its heartbeats.
    """

    device: str
    process: int
    key: str
    commands: str
    heartbeats: str


# ---- from a client


class Introduce(GreetingMessage, frozen=True, tag="introduce"):
    """First message; the reply is :class:`Introduced` or :class:`Refused`."""

    number: int
    versions: SoftwareVersions
    client: str
    """Displayed name of the client: ``user@host``."""


class Inspect(AgentMessage, frozen=True, tag="inspect"):
    """Query of offers, holders and queue; the reply is :class:`Stock`."""

    number: int


class Lease(AgentMessage, frozen=True, tag="lease"):
    """Request for devices, all or none; the reply is :class:`Queued` after every change of place, and finally
    :class:`Leased` or :class:`Refused`.

    Args:
        number: Number of the request.
        wants: The devices.
        key: The public CURVE key that the workers accept.
        grace_s: Time that the client may be silent before the lease ends.
        wait: Whether to queue if devices are leased by others; otherwise the request is refused.
        speed: For tests: fraction of full speed of CPU workers.
    """

    number: int
    wants: tuple[Want, ...]
    key: str
    grace_s: float = GRACE_S
    wait: bool = True
    speed: float = 1.0


class Renew(AgentMessage, frozen=True, tag="renew"):
    """Heartbeat and renewal of all leases of this client; the reply is :class:`Renewed`."""

    number: int


class Release(AgentMessage, frozen=True, tag="release"):
    """Release of a lease, or of one of its workers, by index; or withdrawal of the queued request with that number. The
    reply is :class:`Done`, when the workers have ended.
    """

    number: int
    lease: int = 0
    request: int = 0
    worker: int | None = None


class ReadLog(AgentMessage, frozen=True, tag="log"):
    """Query of the last lines of the agent's log; the reply is :class:`LogLines`."""

    number: int
    lines: int


Request = Introduce | Inspect | Lease | Renew | Release | ReadLog


# ---- from an agent


class Introduced(GreetingMessage, frozen=True, tag="introduced"):
    """The agent's first message.

    Args:
        number: Number of the request.
        versions: The agent's versions.
        host: Its host's name.
        address: The address that it advertises for this host.
    """

    number: int
    versions: SoftwareVersions
    host: str
    address: str


class Stock(AgentMessage, frozen=True, tag="stock"):
    """Offers of an agent.

    Args:
        number: Number of the request.
        offers: Its devices.
        queue: Waiting clients in order.
        load: Runnable processes per core: the load average of a minute.
        uptime_s: Age of the agent in seconds.
    """

    number: int
    offers: tuple[Offer, ...]
    queue: tuple[str, ...] = ()
    load: float = 0.0
    uptime_s: float = 0.0


class Queued(AgentMessage, frozen=True, tag="queued"):
    """A request for a lease is queued.

    Args:
        number: Number of the request.
        place: Its place in the queue, from 1.
        behind: Names of the holders of the devices that it could use, and of those who wait for them before it, for a
            message.
        lacking: Description of what it lacks; empty where it waits for its turn only.
    """

    number: int
    place: int
    behind: str
    lacking: str


class Leased(AgentMessage, frozen=True, tag="leased"):
    """A lease, with a worker for each requested device, in order."""

    number: int
    lease: int
    workers: tuple[Started, ...]


class Renewed(AgentMessage, frozen=True, tag="renewed"):
    """Known leases of this client."""

    number: int
    leases: tuple[int, ...]


class Done(AgentMessage, frozen=True, tag="done"):
    """A request was carried out."""

    number: int


class LogLines(AgentMessage, frozen=True, tag="lines"):
    """Lines of the agent's log: JSON objects."""

    number: int
    lines: tuple[str, ...]


class Refused(GreetingMessage, frozen=True, tag="refused"):
    """A request was refused; the reason states the request, the allowed values, and a remedy.

    Args:
        number: Number of the request; 0 if the agent could not read even that.
        kind: ``versions``, ``usage`` (not offered, or over this client's limits), ``busy`` (and waiting was not
            requested), ``failed`` (a worker did not start), ``ended`` (the lease does not exist, or has ended),
            ``removed`` (the agent no longer accepts this client, whatever the request).
        reason: Readable text.
    """

    number: int
    kind: Literal["versions", "usage", "busy", "failed", "ended", "removed"]
    reason: str


class WorkerEnded(AgentMessage, frozen=True, tag="worker-ended"):
    """A worker of a lease ended by itself; the others of the lease continue.

    Args:
        lease: The lease.
        worker: Its index in the lease.
        exit_status: Exit status; negative for the signal that ended it.
        last_words: The end of its standard error.
    """

    lease: int
    worker: int
    exit_status: int | None
    last_words: str


class LeaseEnded(AgentMessage, frozen=True, tag="lease-ended"):
    """A lease and its workers have ended for another reason than a release by the client."""

    lease: int
    why: str


AgentResponse = Introduced | Stock | Queued | Leased | Renewed | Done | LogLines | Refused | WorkerEnded | LeaseEnded


# ---- pairing: with keys that both sides derive from a code that a person transfers


class PairRequest(AgentMessage, frozen=True, tag="pair"):
    """A client's name and its permanent public key."""

    client: str
    key: str


class PairReply(AgentMessage, frozen=True, tag="paired"):
    """The agent's host and its permanent public key: the agent accepts the client from now on."""

    host: str
    key: str


class _Envelope(Struct, frozen=True, array_like=True):
    """The beginning of each request, and of each response to one."""

    tag: str
    number: int


_requests = msgspec.msgpack.Decoder(Request)
_envelopes = msgspec.msgpack.Decoder(_Envelope)
_responses = msgspec.msgpack.Decoder(AgentResponse)
_pairs = msgspec.msgpack.Decoder(PairRequest)
_paired = msgspec.msgpack.Decoder(PairReply)
_encoder = msgspec.msgpack.Encoder()

_NUMBERED = frozenset(
    kind.__struct_config__.tag for kind in get_args(AgentResponse) if "number" in kind.__struct_fields__
)
"""Tags of the responses that begin with the number of a request."""


def encode_agent(message: Request | AgentResponse | PairRequest | PairReply) -> bytes:
    """Encode a message as one frame.

    Raises:
        WireError: It is too large, or contains unsupported values.
    """
    try:
        frame = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise WireError(f"a message that cannot be encoded: {error}") from None
    if len(frame) > MESSAGE_BYTES:
        raise WireError(f"a message of {len(frame)} bytes is over the limit of {MESSAGE_BYTES}")
    return frame


def decode_request(frame: bytes) -> Request:
    """Decode a client's request to an agent.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: Request = _decode(_requests, frame, "a request")
    return found


def request_number(frame: bytes) -> int:
    """Return the number of a request that breaks the protocol, for its refusal; 0 if that cannot be read either."""
    with contextlib.suppress(WireError):
        number: int = _decode(_envelopes, frame, "a request").number
        return number if 0 < number < 1 << 63 else 0
    return 0


def response_number(frame: bytes) -> int:
    """Return the number of the request that a response which breaks the protocol is for; 0 if that cannot be read, or
    if it is for none."""
    with contextlib.suppress(WireError):
        envelope: _Envelope = _decode(_envelopes, frame, "a response")
        return envelope.number if envelope.tag in _NUMBERED and envelope.number > 0 else 0
    return 0


def decode_agent_response(frame: bytes) -> AgentResponse:
    """Decode an agent's message to a client.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: AgentResponse = _decode(_responses, frame, "an agent's message")
    return found


def decode_pair(frame: bytes) -> PairRequest:
    """Decode a client's pairing message.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: PairRequest = _decode(_pairs, frame, "a pairing")
    return found


def decode_paired(frame: bytes) -> PairReply:
    """Decode an agent's pairing reply.

    Raises:
        WireError: It breaks the protocol or its limits.
    """
    found: PairReply = _decode(_paired, frame, "the answer to a pairing")
    return found


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes, what: str) -> Any:
    if len(frame) > MESSAGE_BYTES:
        raise WireError(f"{what} of {len(frame)} bytes; allowed are {MESSAGE_BYTES}")
    try:
        return clean(decoder.decode(frame))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what} that is not of this protocol: {error}") from None
