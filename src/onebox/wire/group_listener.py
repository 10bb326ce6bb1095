"""Listeners of workers for their groups: what each says of its own in the rendezvous, and how a client greets it.

A client that relays the data of two workers which cannot connect to each other opens a connection to the listener of
each and says for whom it is, and both prove that they know the listener's secret. So a listener takes no stranger for
the client, and a client hands no byte to another program that listens at a port that a worker has named. What follows
on the connection is the workers' own TLS, with their own keys: the secret decides nothing but who may connect them.
"""

from __future__ import annotations

import hmac
import struct
from ipaddress import ip_address
from typing import NamedTuple

from onebox.errors import WireError

SECRET_BYTES = 32
PROOF_BYTES = 32

MOST_BYTES = 1 << 14
"""Most of what a worker says of its listener."""

_KEY = "tcp/"
_HEAD = struct.Struct("!4s?I")
_MAGIC = b"1box"  # no record of TLS begins so (RFC 8446, 5.1)

GREETING_BYTES = _HEAD.size + PROOF_BYTES
FIRST_BYTE = _MAGIC[:1]


class GroupListener(NamedTuple):
    """The listener of one worker for the others of a group.

    Args:
        host: Its IP address.
        port: Its port.
        secret: What whoever connects to it has to know.
        certificate: The worker's certificate; empty without TLS.
    """

    host: str
    port: int
    secret: bytes
    certificate: bytes

    def __repr__(self) -> str:  # without the secret
        return f"GroupListener({self.host}, {self.port})"

    def encode(self) -> str:
        """Return what the worker says of it in the rendezvous."""
        return f"{self.host} {self.port} {self.secret.hex()} {self.certificate.hex()}"


def listener_key(rank: int) -> str:
    """Return the key of the group's store under which a rank says where it listens."""
    return f"{_KEY}{rank}"


def is_listener_key(key: str) -> bool:
    """Return whether a rank says under a key where it listens."""
    return key.startswith(_KEY)


def decode_listener(rank: int, value: bytes, *, encrypted: bool) -> GroupListener:
    """Decode what a rank says of its listener.

    Args:
        rank: The rank.
        value: What it says.
        encrypted: Whether it has a certificate.

    Raises:
        WireError: It does not say where it listens.

    Example:
        >>> said = GroupListener("10.0.0.7", 50000, bytes(SECRET_BYTES), b"").encode().encode()
        >>> decode_listener(3, said, encrypted=False)
        GroupListener(10.0.0.7, 50000)
    """
    try:
        if len(value) > MOST_BYTES:
            raise ValueError
        host, port, secret, certificate = value.decode().split(" ")
        found = GroupListener(host, int(port), bytes.fromhex(secret), bytes.fromhex(certificate))
        if ip_address(host.partition("%")[0]).is_unspecified or not 0 < found.port < 1 << 16:
            raise ValueError
        if len(found.secret) != SECRET_BYTES or bool(found.certificate) != encrypted:
            raise ValueError
        return found
    except ValueError:
        said = b" ".join(value[:MOST_BYTES].split(b" ")[:2])[:60]  # without the secret
        raise WireError(f"rank {rank} of a group does not say where it listens: {said!r}") from None


class Greeting(NamedTuple):
    """First bytes of a relayed connection, from the client to a worker's listener.

    Args:
        outgoing: Whether the worker is to write to it, as the client of TLS; else it is a peer's connection to it.
        peer: The rank at the other end.
    """

    outgoing: bool
    peer: int

    def encode(self, secret: bytes) -> bytes:
        """Return its bytes.

        Args:
            secret: The listener's secret.

        Example:
            >>> secret = b"s" * SECRET_BYTES
            >>> decode_greeting(secret, Greeting(True, 3).encode(secret))
            Greeting(outgoing=True, peer=3)
            >>> decode_greeting(b"x" * SECRET_BYTES, Greeting(True, 3).encode(secret)) is None
            True
        """
        head = _HEAD.pack(_MAGIC, self.outgoing, self.peer)
        return head + proof(secret, b"client", head)


def decode_greeting(secret: bytes, received: bytes) -> Greeting | None:
    """Return a greeting; ``None`` if it is none, or of somebody who does not know the secret."""
    head, code = received[: _HEAD.size], received[_HEAD.size :]
    if len(received) != GREETING_BYTES or not hmac.compare_digest(code, proof(secret, b"client", head)):
        return None
    magic, outgoing, peer = _HEAD.unpack(head)
    return Greeting(outgoing, peer) if magic == _MAGIC else None


def greeting_reply(secret: bytes, greeting: bytes) -> bytes:
    """Return the listener's reply to the bytes of a greeting."""
    return proof(secret, b"worker", greeting)


def proof(secret: bytes, what: bytes, data: bytes) -> bytes:
    """Return the proof of who knows a secret and says so, with some data."""
    return hmac.digest(secret, what + data, "sha256")
