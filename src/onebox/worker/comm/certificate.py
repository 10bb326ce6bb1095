"""A certificate for one group of workers: an Ed25519 key (RFC 8032) that signs itself (RFC 5280, RFC 8410).

Python's ``ssl`` takes certificates, but makes none. The arithmetic here serves to make them, once for a group, and is
not hardened against measurements of its time; OpenSSL does all that strangers can provoke. Peers know a certificate
itself, from the rendezvous, so that it names nobody and is valid for ever.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from typing import NamedTuple

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE_Y = 4 * pow(5, -1, _P) % _P

_Point = tuple[int, int, int, int]
"""Extended coordinates: (X, Y, Z, T) with x = X / Z, y = Y / Z, x y = T / Z."""

_BASE: _Point = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _P)

_INTEGER, _BITS, _OCTETS, _OID, _TEXT, _SEQUENCE, _SET = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x30, 0x31
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_COMMON_NAME = b"\x55\x04\x03"
_ED25519 = b"\x2b\x65\x70"


class Certificate(NamedTuple):
    """A certificate and its key.

    Args:
        der: The certificate, for peers.
        secret_pem: The secret key and the certificate, as OpenSSL reads them from one file.
    """

    der: bytes
    secret_pem: bytes

    def __repr__(self) -> str:  # without the secret
        return f"Certificate({hashlib.sha256(self.der).hexdigest()[:16]})"


def new_certificate() -> Certificate:
    """Make a key and its certificate, in a few milliseconds."""
    seed = os.urandom(32)
    public = public_key(seed)
    algorithm = _der(_SEQUENCE, _der(_OID, _ED25519))
    name = _der(_TEXT, f"onebox {secrets.token_hex(16)}".encode())
    subject = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _der(_OID, _COMMON_NAME), name)))
    content = _der(
        _SEQUENCE,
        _der(_INTEGER, b"\x01" + os.urandom(15)),
        algorithm,
        subject,  # its issuer
        _der(_SEQUENCE, _der(_UTC_TIME, b"000101000000Z"), _der(_GENERALIZED_TIME, b"99991231235959Z")),
        subject,
        _der(_SEQUENCE, algorithm, _der(_BITS, b"\0", public)),
    )
    certificate = _der(_SEQUENCE, content, algorithm, _der(_BITS, b"\0", sign(seed, content)))
    secret = _der(_SEQUENCE, _der(_INTEGER, b"\0"), algorithm, _der(_OCTETS, _der(_OCTETS, seed)))
    return Certificate(certificate, _pem("PRIVATE KEY", secret) + _pem("CERTIFICATE", certificate))


def public_key(seed: bytes) -> bytes:
    """Return the Ed25519 public key of a secret of 32 bytes.

    Example:
        >>> seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"  # RFC 8032, 7.1
        >>> public_key(bytes.fromhex(seed)).hex()
        'd75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a'
    """
    return _encoded(_multiple(_secret_scalar(seed)))


def sign(seed: bytes, message: bytes) -> bytes:
    """Return the Ed25519 signature of a message."""
    scalar, public = _secret_scalar(seed), public_key(seed)
    nonce = _number(hashlib.sha512(hashlib.sha512(seed).digest()[32:] + message).digest()) % _ORDER
    commitment = _encoded(_multiple(nonce))
    challenge = _number(hashlib.sha512(commitment + public + message).digest()) % _ORDER
    return commitment + ((nonce + challenge * scalar) % _ORDER).to_bytes(32, "little")


def _secret_scalar(seed: bytes) -> int:
    return _number(hashlib.sha512(seed).digest()[:32]) & ((1 << 254) - 8) | (1 << 254)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _multiple(scalar: int) -> _Point:
    """Return a multiple of the base point."""
    total: _Point = (0, 1, 1, 0)
    power = _BASE
    while scalar:
        if scalar & 1:
            total = _sum(total, power)
        power = _sum(power, power)
        scalar >>= 1
    return total


def _sum(one: _Point, other: _Point) -> _Point:
    """Return the sum of two points (RFC 8032, 5.1.4)."""
    a = (one[1] - one[0]) * (other[1] - other[0]) % _P
    b = (one[1] + one[0]) * (other[1] + other[0]) % _P
    c = 2 * one[3] * other[3] * _D % _P
    d = 2 * one[2] * other[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _encoded(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _der(tag: int, *parts: bytes) -> bytes:
    """Return a value in the encoding of ASN.1 (X.690, DER)."""
    content = b"".join(parts)
    length = len(content)
    if length < 0x80:
        return bytes([tag, length]) + content
    size = (length.bit_length() + 7) // 8
    return bytes([tag, 0x80 | size]) + length.to_bytes(size, "big") + content


def _pem(what: str, der: bytes) -> bytes:
    return f"-----BEGIN {what}-----\n".encode() + base64.encodebytes(der) + f"-----END {what}-----\n".encode()
