"""What workers say of their listeners, and the greeting of a client there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import WireError
from onebox.wire.group_listener import SECRET_BYTES, Greeting, GroupListener, decode_greeting, decode_listener

LISTENER = GroupListener("10.0.0.7", 50_000, b"s" * SECRET_BYTES, b"certificate")


def test_what_is_said_of_a_listener_is_understood() -> None:
    assert decode_listener(1, LISTENER.encode().encode(), encrypted=True) == LISTENER


@pytest.mark.parametrize(
    "listener",
    [
        LISTENER._replace(host="0.0.0.0"),
        LISTENER._replace(host="lab1"),
        LISTENER._replace(port=0),
        LISTENER._replace(port=1 << 16),
        LISTENER._replace(secret=bytes(SECRET_BYTES - 1)),
        LISTENER._replace(certificate=b""),
        LISTENER._replace(certificate=bytes(1 << 14)),
    ],
)
def test_a_listener_that_none_can_be_is_refused(listener: GroupListener) -> None:
    with pytest.raises(WireError, match="rank 1 of a group does not say where it listens"):
        decode_listener(1, listener.encode().encode(), encrypted=True)


def test_a_secret_is_not_shown() -> None:
    assert LISTENER.secret.hex() not in repr(LISTENER) and str(LISTENER.secret) not in repr(LISTENER)


@given(data=st.binary(max_size=100), secret=st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES))
def test_no_bytes_but_those_of_the_secret_are_a_greeting(data: bytes, secret: bytes) -> None:
    greeting = Greeting(True, 5)
    genuine = greeting.encode(secret)
    assert decode_greeting(secret, genuine) == greeting
    assert data == genuine or decode_greeting(secret, data) is None
    for place in range(len(genuine)):
        changed = genuine[:place] + bytes([genuine[place] ^ 1]) + genuine[place + 1 :]
        assert decode_greeting(secret, changed) is None
    assert decode_greeting(bytes(SECRET_BYTES), genuine) is None or secret == bytes(SECRET_BYTES)
