"""The channel: keys, security, limits. Two sockets in one process; a stranger is turned away."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from onebox.wire import KeyPair, channel, configure, new_keys


class Socket:
    """Takes down the options that it is given."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}

    def setsockopt(self, option: int, value: int) -> None:
        self.options[option] = value


def test_keys_are_new_each_time_and_fit_together() -> None:
    one, other = new_keys(), new_keys()
    assert one != other
    assert zmq.curve_public(one.secret.encode()).decode() == one.public


def test_a_key_pair_does_not_show_its_secret() -> None:
    keys = new_keys()
    for text in (repr(keys), str(keys), f"{keys}", f"{[keys]}"):
        assert keys.secret not in text
        assert keys.public in text


@pytest.mark.parametrize("server_key", [None, new_keys().public], ids=["server", "client"])
def test_both_sides_are_encrypted_and_limited(server_key: str | None) -> None:
    socket: Any = Socket()
    keys = new_keys()
    configure(socket, keys, server_key=server_key, queue=5)
    assert socket.curve_secretkey == keys.secret.encode()
    assert socket.curve_publickey == keys.public.encode()
    if server_key is None:
        assert socket.curve_server is True
        assert socket.zap_domain, "without a domain libzmq asks nobody whom to let in"
    else:
        assert socket.curve_serverkey == server_key.encode()
    assert socket.options[zmq.MAXMSGSIZE] == channel.FRAME_BYTES
    assert socket.options[zmq.HANDSHAKE_IVL] > 0
    assert socket.options[zmq.LINGER] == 0, "a closing process does not wait for a peer"
    assert (socket.options[zmq.SNDHWM], socket.options[zmq.RCVHWM]) == (5, 5)


def test_a_pair_of_keys_is_immutable() -> None:
    with pytest.raises(AttributeError):
        KeyPair("a", "b").secret = "c"  # type: ignore[misc]
