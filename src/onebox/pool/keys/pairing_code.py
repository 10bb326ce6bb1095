"""The code of a pairing: 128 random bits, from which both sides derive the same two CURVE key pairs.

One pair is the agent's and one the client's: without the code, neither end of the handshake can be completed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from onebox.errors import UsageError
from onebox.wire import KeyPair

_SECRET_BYTES = 16
_CODE_BYTES = _SECRET_BYTES + 1
_GROUP = 4
_MISREAD = str.maketrans("018", "OIB")
"""Digits outside the alphabet, and the letters that they are misreadings of."""


@dataclass(frozen=True)
class PairingCode:
    """A one-time code; ``repr`` never shows it."""

    _secret: bytes

    def __repr__(self) -> str:
        return "Code()"

    @property
    def text(self) -> str:
        """The code as text: seven groups of letters and digits, the last of which is a checksum."""
        text = base64.b32encode(self._secret + _check(self._secret)).decode().rstrip("=")
        return "-".join(text[start : start + _GROUP] for start in range(0, len(text), _GROUP))

    @property
    def agent_keys(self) -> KeyPair:
        """The agent's keys for the pairing."""
        return self._derived(b"onebox pair agnt")

    @property
    def client_keys(self) -> KeyPair:
        """The client's keys for the pairing."""
        return self._derived(b"onebox pair clnt")

    def _derived(self, role: bytes) -> KeyPair:
        secret = z85.encode(hashlib.blake2b(self._secret, digest_size=32, person=role).digest())
        return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def new_code() -> PairingCode:
    """Make a code."""
    return PairingCode(secrets.token_bytes(_SECRET_BYTES))


def read_code(text: str) -> PairingCode:
    """Parse a code that a user has typed; case, spaces and hyphens do not matter.

    Raises:
        UsageError: The code or its checksum is wrong. The message does not repeat the code.
    """
    plain = "".join(character for character in text.upper() if not character.isspace() and character != "-")
    try:
        whole = base64.b32decode(plain.translate(_MISREAD) + "====")
    except (binascii.Error, ValueError):
        whole = b""
    secret, check = whole[:_SECRET_BYTES], whole[_SECRET_BYTES:]
    if len(whole) != _CODE_BYTES or check != _check(secret):
        raise UsageError(
            "that is no code, or one with a slip in it: type the seven groups that onebox pair accept has printed"
        )
    return PairingCode(secret)


def _check(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=1, person=b"onebox pair chck").digest()
