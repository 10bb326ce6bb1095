"""Greeting of a connection by which a client relays the data of two workers that cannot connect to each other.

The client opens a connection to the listener of each and says for whom it is, and both prove that they know the
listener's token, which the worker has told the client over its channel. So a listener takes nobody else for the client,
and a client hands no byte to another program that listens at a port that a worker has named. What follows on the
connection is the workers' own TLS, with their own keys: the token decides nothing but who may connect them.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

TOKEN_BYTES = 32
REPLY_BYTES = 32

_HEAD = struct.Struct("!4s?I")
_MAGIC = b"1box"  # no record of TLS begins so (RFC 8446, 5.1)

GREETING_BYTES = _HEAD.size + REPLY_BYTES
FIRST_BYTE = _MAGIC[:1]


class Greeting(NamedTuple):
    """First bytes of a relayed connection, from the client to a worker's listener.

    Args:
        outgoing: Whether the worker is to write to it, as the client of TLS; else it is a peer's connection to it.
        peer: The rank at the other end.
    """

    outgoing: bool
    peer: int

    def encode(self, token: bytes) -> bytes:
        """Return its bytes.

        Args:
            token: The listener's token.

        Example:
            >>> token = b"t" * TOKEN_BYTES
            >>> decode_greeting(token, Greeting(True, 3).encode(token))
            Greeting(outgoing=True, peer=3)
            >>> decode_greeting(b"x" * TOKEN_BYTES, Greeting(True, 3).encode(token)) is None
            True
        """
        head = _HEAD.pack(_MAGIC, self.outgoing, self.peer)
        return head + _code(token, b"client", head)


def decode_greeting(token: bytes, received: bytes) -> Greeting | None:
    """Return a greeting; ``None`` if it is none, or of somebody who does not know the token."""
    head, code = received[: _HEAD.size], received[_HEAD.size :]
    if len(received) != GREETING_BYTES or not hmac.compare_digest(code, _code(token, b"client", head)):
        return None
    magic, outgoing, peer = _HEAD.unpack(head)
    return Greeting(outgoing, peer) if magic == _MAGIC else None


def greeting_reply(token: bytes, greeting: bytes) -> bytes:
    """Return the listener's reply to the bytes of a greeting."""
    return _code(token, b"worker", greeting)


def _code(token: bytes, who: bytes, data: bytes) -> bytes:
    return hmac.digest(token, who + data, "sha256")
