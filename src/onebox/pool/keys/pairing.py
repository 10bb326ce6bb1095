"""Pairing: a client and an agent learn each other's lasting keys, with a code that a person carries between them.

Both sides have the keys that the code gives them, so that each proves to the other that it has the code, and nobody in
between can pass for either or read what they say. Over that channel they tell each other their lasting keys. A code is
good for one pairing, for ten minutes, and for ten failed handshakes of whoever tries without it.
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
"""How long a code is good for."""

ATTEMPTS = 10
"""Failed handshakes after which a code is given up. Guessing is hopeless at any number: this is for who should know."""

CONNECT_S = 10.0
"""How long a client tries: a handshake takes milliseconds, a host that drops what it does not want answers nothing."""

FIND_S = 3.0
"""How long it may take to see whether anybody waits for a pairing at all."""

_MOST_BYTES = 4096
"""Of a message: two names and keys."""

_HEARD_S = 2.0
"""How long to wait for a sign that the answer was heard: to hang up earlier could cut it off."""

_AWAY_MS = 200
"""How long that sign may take to leave; it may be lost."""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


# ---- the agent's side


class PairingListener:
    """The agent's side of a pairing: a socket that only the holder of the code gets to speak on. A context manager.

    Args:
        code: The code.
        paired: What to tell the client.
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
        """Where it listens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def wait(
        self, take: Callable[[PairRequest], None], *, good_for_s: float = GOOD_FOR_S, attempts: int = ATTEMPTS
    ) -> PairRequest:
        """Wait for the client, and tell it what it came for.

        Args:
            take: Keeps what the client says; what it raises ends the pairing, and the client is told nothing.
            good_for_s: How long to wait.
            attempts: The most handshakes that may fail.

        Returns:
            What the client said.

        Raises:
            PoolError: Nobody came in time, too many came without the code, or whoever came speaks another language.
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
    """Lets in one public key; the interface that :mod:`zmq.auth` asks for."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell whether a client's key is the one."""
        return hmac.compare_digest(key, self._key)


def _is_attempt(event: Any) -> bool:
    """Tell whether a handshake failed for its keys; one that was left unfinished, as by a scan of ports, is none."""
    return event["event"] in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)


# ---- the client's side


def pair_with(host: str, port: int, code: PairingCode, pair: PairRequest, *, within_s: float = CONNECT_S) -> PairReply:
    """Tell an agent this client's key, and return the agent's.

    Args:
        host: The agent's host: a name or an IP address, without brackets.
        port: The port of the pairing.
        code: What its person has typed.
        pair: What to tell the agent.
        within_s: How long to try.

    Raises:
        PoolError: Nobody waits for a pairing there, the code is another one's, or the answer is none.
    """
    end_s = time.monotonic() + within_s
    addresses = _addresses(host, port)
    answer: PairReply | str = ""
    for number, address in enumerate(addresses):
        now_s = time.monotonic()
        share_s = (end_s - now_s) / (len(addresses) - number)  # one that is mute leaves time for the others
        with _connected(address, port, code) as (channel, events):
            with contextlib.suppress(zmq.Again):  # refused already, which the events tell
                channel.send(encode_agent(pair), zmq.NOBLOCK)
            answer = _heard(channel, events, f"{host}:{port}", now_s + share_s)
        if isinstance(answer, PairReply):
            return answer
    raise PoolError(answer)


def find_listener(host: str, port: int, *, within_s: float = FIND_S) -> None:
    """Find out whether somebody waits for a pairing, before a person types a long code.

    Args:
        host: The agent's host: a name or an IP address, without brackets.
        port: The port of the pairing.
        within_s: How long to try; where nothing answers, only the pairing itself tells why.

    Raises:
        PoolError: There is no such host, or nobody waits there.
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
    return f"nobody waits for a pairing at {where}: run onebox pair --accept there, and let its port through"


def _addresses(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a host, each once, in the order of the system's preference."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PoolError(f"there is no host {host}: {error.strerror}; give its name or IP address") from None
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


@contextlib.contextmanager
def _connected(address: str, port: int, code: PairingCode) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Connect once, and close everything afterwards; yields the channel and the events of its connection."""
    context = zmq.Context()
    channel = context.socket(zmq.DEALER)
    events = channel.get_monitor_socket(zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | _FAILED)
    try:
        configure(channel, code.client_keys, server_key=code.agent_keys.public, queue=4)
        channel.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        channel.setsockopt(zmq.RECONNECT_IVL, -1)  # a wrong code does not get right, and costs the other side patience
        channel.setsockopt(zmq.IPV6, ":" in address)
        channel.connect(f"tcp://{f'[{address}]' if ':' in address else address}:{port}")
        yield channel, events
    finally:
        channel.disable_monitor()
        events.close(linger=0)
        channel.close()
        context.term()


def _heard(channel: zmq.Socket[bytes], events: zmq.Socket[bytes], where: str, end_s: float) -> PairReply | str:
    """Return the agent's answer, or why there is nobody to give one.

    Raises:
        PoolError: There is somebody who does not take the code, or answers otherwise.
    """
    poller = zmq.Poller()
    poller.register(channel, zmq.POLLIN)
    poller.register(events, zmq.POLLIN)
    ready = dict(poller.poll(_milliseconds(end_s)))
    if channel in ready:
        answer = channel.recv()
        with contextlib.suppress(zmq.Again):
            channel.send(b"", zmq.NOBLOCK)  # a sign that it was heard
        channel.setsockopt(zmq.LINGER, _AWAY_MS)
        return _checked(answer, where)
    if events not in ready:
        return f"{where} does not answer: is it the right host, and is its port {where.rpartition(':')[2]} open?"
    if parse_monitor_message(events.recv_multipart())["event"] == zmq.EVENT_CLOSED:
        return _nobody(where)
    raise PoolError(
        f"{where} did not take the code: it is that of another host, was used already, or its time is over; begin "
        "again with onebox pair --accept there"
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
