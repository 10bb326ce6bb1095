"""Who has not the keys gets nothing, and harms nothing."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

import onebox
from onebox.pool import open_pool
from onebox.pool import pool as pool_module
from onebox.wire import KeyPair, configure, encode, new_keys
from onebox.wire.messages import Ask, Bye, Envelope
from onebox.worker import WorkerConfig
from tests.process.faults.training import Tensors, batch, steps, train, trainer_on

ZMTP_GREETING_BYTES = 64
"""What ZeroMQ says to everybody: its version and the name of its mechanism (RFC 37)."""

SILENCE_MS = 1000
"""A stranger that has heard nothing for so long will hear nothing."""

JUNK_BYTES = 1 << 20

Stranger = Callable[["zmq.Socket[bytes]", WorkerConfig], None]


@dataclass(frozen=True)
class Open:
    """A pool, and what its workers were told when they were started."""

    pool: onebox.Pool
    configs: list[WorkerConfig]

    def ports(self, worker: int) -> set[int]:
        """Return the ports on which a worker listens, whoever in its process opened them."""
        return {address.port for address in self.listening(worker)}

    def listening(self, worker: int) -> list[Any]:
        """Return the addresses on which a worker listens."""
        connections = psutil.Process(self.pool.process_ids[worker]).net_connections(kind="inet")
        return [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    """A pool of two workers."""
    configs: list[WorkerConfig] = []

    def start(place: Any, config: WorkerConfig) -> Any:
        configs.append(config)
        return process(place, config)

    process = pool_module.WorkerProcess
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "WorkerProcess", start)
        pool = open_pool("cpu*2", threads=1)
    with pool:
        yield Open(pool, configs)


@pytest.fixture(scope="module")
def before(opened: Open) -> Tensors:
    """Weights after a training run on it, before any stranger came."""
    return train(opened.pool, "workers")


@pytest.fixture(scope="module")
def working(opened: Open, before: Tensors) -> Iterator[onebox.Trainer]:
    """A trainer on it, with a group of its workers."""
    with trainer_on(opened.pool, "workers") as trainer:
        steps(trainer, 2)
        yield trainer


def without_keys(socket: zmq.Socket[bytes], config: WorkerConfig) -> None:
    """Speak the mechanism NULL."""


def with_password(socket: zmq.Socket[bytes], config: WorkerConfig) -> None:
    """Speak the mechanism PLAIN."""
    socket.plain_username = b"client"
    socket.plain_password = config.public.encode()


def with_wrong_server_key(socket: zmq.Socket[bytes], config: WorkerConfig) -> None:
    """Take the worker for another."""
    configure(socket, new_keys(), server_key=new_keys().public)


def with_unknown_key(socket: zmq.Socket[bytes], config: WorkerConfig) -> None:
    """Know the worker's key, but have an own key that it does not know."""
    configure(socket, new_keys(), server_key=config.public)


def with_stolen_public_key(socket: zmq.Socket[bytes], config: WorkerConfig) -> None:
    """Know both public keys, but not the secret of the client's."""
    configure(socket, KeyPair(config.client, new_keys().secret), server_key=config.public)


STRANGERS: list[Stranger] = [
    without_keys,
    with_password,
    with_wrong_server_key,
    with_unknown_key,
    with_stolen_public_key,
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__.replace("_", " "))
def test_a_stranger_gets_no_answer_and_has_no_say(opened: Open, working: onebox.Trainer, stranger: Stranger) -> None:
    question = encode(Envelope(1, True, (Ask("memory"), Bye())))
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        poller = zmq.Poller()
        for worker, config in enumerate(opened.configs):
            for port in opened.ports(worker):
                client = stack.enter_context(context.socket(zmq.DEALER))
                client.linger = 0
                stranger(client, config)
                client.connect(f"tcp://127.0.0.1:{port}")
                client.send(question)
                poller.register(client, zmq.POLLIN)
        assert poller.poll(SILENCE_MS) == []
    steps(working, working.steps_done + 2)


def test_junk_gets_no_answer_and_does_no_harm(opened: Open, working: onebox.Trainer) -> None:
    junk = torch.randint(256, (JUNK_BYTES,), dtype=torch.uint8).numpy().tobytes()
    for start in (b"", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"):  # the second goes on as ZMTP 3 does
        for port in opened.ports(0) | opened.ports(1):
            heard = shout(port, start + junk)
            assert len(heard) <= ZMTP_GREETING_BYTES
            assert not any(config.public.encode() in heard for config in opened.configs)
    steps(working, working.steps_done + 2)


def shout(port: int, junk: bytes) -> bytes:
    """Send junk to a port and return what comes back before it is closed or falls silent."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.3)
        try:
            connection.sendall(junk)
            while part := connection.recv(4096):
                heard += part
        except OSError:  # closed, or silent
            pass
    return heard


def test_workers_listen_on_loopback_only(opened: Open, working: onebox.Trainer) -> None:
    for worker in range(len(opened.pool)):
        addresses = opened.listening(worker)
        assert len(addresses) >= 3  # commands, beats, and the group's
        assert {address.ip for address in addresses} <= {"127.0.0.1", "::1"}


def test_no_key_is_in_a_command_line_an_environment_or_a_file(opened: Open) -> None:
    keys = [key.encode() for config in opened.configs for key in (config.secret, config.public, config.client)]
    keys.append(opened.pool._switchboard._keys.secret.encode())
    assert all(len(key) == 40 for key in keys)
    for process in (os.getpid(), *opened.pool.process_ids):
        proc = Path(f"/proc/{process}")
        texts = [(proc / "cmdline").read_bytes(), (proc / "environ").read_bytes()]
        texts += [path.read_bytes() for path in (proc / "fd").iterdir() if is_file(path)]
        assert not any(key in text for key in keys for text in texts)


def is_file(path: Path) -> bool:
    """Tell whether a descriptor is that of a file, which may have no name any more."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def test_after_all_that_the_result_is_the_same(opened: Open, before: Tensors, working: onebox.Trainer) -> None:
    after = train(opened.pool, "workers")
    assert all(torch.equal(after[name], before[name]) for name in before)
    working.step(*batch(0)).item()


def test_who_has_the_keys_would_have_been_let_in(opened: Open) -> None:
    keys = opened.pool._switchboard._keys
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        poller = zmq.Poller()
        for port in opened.ports(0):
            client = stack.enter_context(context.socket(zmq.DEALER))
            configure(client, keys, server_key=opened.configs[0].public)
            client.connect(f"tcp://127.0.0.1:{port}")
            poller.register(client, zmq.POLLIN)
        assert poller.poll(4 * SILENCE_MS), "no sign of life of the worker"
