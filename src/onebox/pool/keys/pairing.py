"""Pairing: a client and an agent learn each other's lasting keys, with a code that a person transfers.

Both sides derive keys from the code. So each proves to the other that it has the code, and a man in the middle can
neither impersonate one nor read the channel, over which they exchange their lasting keys. A code is valid for one
pairing, for ten minutes, and for ten failed handshakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import socket
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.auth
from zmq.utils.monitor import parse_monitor_message

from onebox.errors import PoolError, UsageError, WireError
from onebox.pool.keys.keyring import is_key, is_name
from onebox.pool.keys.pairing_code import PairingCode
from onebox.wire import configure
from onebox.wire.protocol.agents import PAIRING_PORT, PairReply, PairRequest, decode_pair, decode_paired, encode_agent

GOOD_FOR_S = 600.0
"""How long a code is valid."""

ATTEMPTS = 10
"""Failed handshakes after which a code is invalidated. Guessing is hopeless at any number: the limit makes attacks
visible."""

CONNECT_S = 10.0
"""How long a client tries: a handshake takes milliseconds, a host that drops packets never answers."""

FIND_S = 3.0
"""Bound of the check that a pairing is open at all."""

_MOST_BYTES = 4096
"""Size limit of a message: two names and keys."""

_HEARD_S = 2.0
"""How long to wait for the acknowledgement of the answer: closing earlier could cut the answer off."""

_AWAY_MS = 200
"""How long the acknowledgement may take to leave; it may be lost."""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


# ---- the agent's side


class PairingListener:
    """The agent's side of a pairing: a socket that accepts only the holder of the code. A context manager.

    Args:
        code: The code.
        paired: The answer for the client.
        bind: The IP address to listen on.
        port: The port; 0 for any.

    Raises:
        UsageError: It cannot listen there.
    """

    def __init__(self, code: PairingCode, paired: PairReply, *, bind: str, port: int = PAIRING_PORT) -> None:
        self._paired = paired
        self._context = zmq.Context()
        self._authenticator = zmq.auth.Authenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("onebox", _OneKey(code.client_keys.public))
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, code.agent_keys, server_key=None, queue=4)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._socket.setsockopt(zmq.IPV6, ":" in bind)
        self._events = self._socket.get_monitor_socket(_FAILED)
        host = f"[{bind}]" if ":" in bind else bind
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot listen on {host}:{port} for a pairing: {error.strerror}") from None
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        """Port of the listening socket."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait(
        self, take: Callable[[PairRequest], None], *, good_for_s: float = GOOD_FOR_S, attempts: int = ATTEMPTS
    ) -> PairRequest:
        """Wait for the client, and send it the answer.

        Args:
            take: Stores the client's keys; an error from it ends the pairing without an answer.
            good_for_s: How long to wait.
            attempts: The most handshakes that may fail.

        Returns:
            The client's name and key.

        Raises:
            PoolError: No client came in time, too many handshakes failed, or the client uses another protocol.
        """
        end_s = time.monotonic() + good_for_s
        failed = 0
        while failed < attempts:
            ready = self._ready(end_s)
            if self._authenticator.zap_socket in ready:
                self._admit()
            if self._events in ready:
                failed += _is_attempt(parse_monitor_message(self._events.recv_multipart()))
            if self._socket in ready:
                return self._answer(self._socket.recv_multipart(), take)
            if time.monotonic() >= end_s:
                raise PoolError(f"nobody came within {good_for_s:.0f} s, for which the code was good; begin again")
        raise PoolError(
            f"{failed} attempts to pair with a wrong code: somebody may be guessing, or has the code of another "
            "pairing; begin again for a new one"
        )

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._authenticator.stop()
        self._socket.close(linger=0)
        self._context.term()

    def _ready(self, end_s: float) -> dict[Any, int]:
        poller = zmq.Poller()
        for each in (self._authenticator.zap_socket, self._events, self._socket):
            poller.register(each, zmq.POLLIN)
        return dict(poller.poll(_milliseconds(end_s)))

    def _admit(self) -> None:
        zap = self._authenticator.zap_socket
        assert zap is not None
        asyncio.run(self._authenticator.handle_zap_message(zap.recv_multipart()))

    def _answer(self, frames: list[bytes], take: Callable[[PairRequest], None]) -> PairRequest:
        try:
            pair = decode_pair(frames[-1])
        except WireError:
            pair = PairRequest("", "")
        if len(frames) != 2 or not is_key(pair.key) or not is_name(pair.client):
            raise PoolError("who came has the code, but speaks otherwise: install the same onebox on both sides")
        take(pair)
        self._socket.send_multipart([frames[0], encode_agent(self._paired)])
        self._socket.poll(int(_HEARD_S * 1000))
        return pair


class _OneKey:
    """Accepts one public key; the interface that :mod:`zmq.auth` requires."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's key is the accepted one."""
        return hmac.compare_digest(key, self._key)


def _is_attempt(event: Any) -> bool:
    """Return whether a handshake failed because of its keys; an unfinished one, as of a port scan, does not count."""
    return event["event"] in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)


# ---- the client's side


def pair_with(host: str, port: int, code: PairingCode, pair: PairRequest, *, within_s: float = CONNECT_S) -> PairReply:
    """Send this client's key to an agent, and return the agent's.

    Args:
        host: The agent's host: a name or an IP address, without brackets.
        port: The port of the pairing.
        code: The code that the user has typed.
        pair: The client's name and key.
        within_s: How long to try.

    Raises:
        PoolError: No pairing is open there, the code is wrong, or the answer is invalid.
    """
    end_s = time.monotonic() + within_s
    addresses = _addresses(host, port)
    answer: PairReply | str = ""
    for number, address in enumerate(addresses):
        now_s = time.monotonic()
        share_s = (end_s - now_s) / (len(addresses) - number)  # a silent one leaves time for the others
        with _connected(address, port, code) as (channel, events):
            with contextlib.suppress(zmq.Again):  # refused already, which the events show
                channel.send(encode_agent(pair), zmq.NOBLOCK)
            answer = _heard(channel, events, f"{host}:{port}", now_s + share_s)
        if isinstance(answer, PairReply):
            return answer
    raise PoolError(answer)


def find_listener(host: str, port: int, *, within_s: float = FIND_S) -> None:
    """Check that a pairing is open, before the user types a long code.

    Args:
        host: The agent's host: a name or an IP address, without brackets.
        port: The port of the pairing.
        within_s: How long to try; where nothing answers, the pairing itself reports the cause.

    Raises:
        PoolError: There is no such host, or no pairing is open there.
    """
    addresses = _addresses(host, port)
    refused = 0
    for address in addresses:
        try:
            socket.create_connection((address, port), within_s / len(addresses)).close()
        except ConnectionRefusedError:
            refused += 1
        except OSError:
            continue
        else:
            return
    if refused == len(addresses):
        raise PoolError(_nobody(f"{host}:{port}"))


def _nobody(where: str) -> str:
    return f"nobody waits for a pairing at {where}: run onebox pair accept there, and let its port through"


def _addresses(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a host, each once, in the order of the system's preference."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PoolError(f"there is no host {host}: {error.strerror}; give its name or IP address") from None
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


@contextlib.contextmanager
def _connected(address: str, port: int, code: PairingCode) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Connect once, and close everything afterwards; yields the channel and its connection events."""
    context = zmq.Context()
    channel = context.socket(zmq.DEALER)
    events = channel.get_monitor_socket(zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | _FAILED)
    try:
        configure(channel, code.client_keys, server_key=code.agent_keys.public, queue=4)
        channel.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        channel.setsockopt(zmq.RECONNECT_IVL, -1)  # a wrong code stays wrong, and uses up the agent's attempts
        channel.setsockopt(zmq.IPV6, ":" in address)
        channel.connect(f"tcp://{f'[{address}]' if ':' in address else address}:{port}")
        yield channel, events
    finally:
        channel.disable_monitor()
        events.close(linger=0)
        channel.close()
        context.term()


def _heard(channel: zmq.Socket[bytes], events: zmq.Socket[bytes], where: str, end_s: float) -> PairReply | str:
    """Return the agent's answer, or a text about why there is none.

    Raises:
        PoolError: The agent refuses the code, or its answer is invalid.
    """
    poller = zmq.Poller()
    poller.register(channel, zmq.POLLIN)
    poller.register(events, zmq.POLLIN)
    ready = dict(poller.poll(_milliseconds(end_s)))
    if channel in ready:
        answer = channel.recv()
        with contextlib.suppress(zmq.Again):
            channel.send(b"", zmq.NOBLOCK)  # acknowledge the answer
        channel.setsockopt(zmq.LINGER, _AWAY_MS)
        return _checked(answer, where)
    if events not in ready:
        return f"{where} does not answer: is it the right host, and is its port {where.rpartition(':')[2]} open?"
    if parse_monitor_message(events.recv_multipart())["event"] == zmq.EVENT_CLOSED:
        return _nobody(where)
    raise PoolError(
        f"{where} did not take the code: it is that of another host, was used already, or its time is over; begin "
        "again with onebox pair accept there"
    )


def _checked(frame: bytes, where: str) -> PairReply:
    try:
        paired = decode_paired(frame)
    except WireError:
        paired = PairReply("", "")
    if not is_key(paired.key) or not is_name(paired.host):
        raise PoolError(f"{where} has the code, but speaks otherwise: install the same onebox on both sides")
    return paired


def _milliseconds(end_s: float) -> int:
    return max(0, math.ceil((end_s - time.monotonic()) * 1000))
