"""Who has not the keys gets nothing, and harms nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import zmq

import onebox
from onebox.errors import PoolError
from onebox.pool import devices as device_module
from onebox.pool import open_pool
from onebox.pool.backends import local as local_module
from onebox.wire import KeyPair, configure, encode, new_keys
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.requests import Envelope, Shutdown
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
    """A pool of two workers that listen on TCP ports, as workers of another host do."""
    configs: list[WorkerConfig] = []

    def start(place: Any, config: WorkerConfig, **options: Any) -> Any:
        configs.append(msgspec.structs.replace(config, address="127.0.0.1"))
        return process(place, configs[-1], **options)

    process = local_module.WorkerProcess
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_module, "WorkerProcess", start)
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


@pytest.mark.feature("Security: Keep strangers out of workers and agents")
@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__.replace("_", " "))
def test_a_stranger_gets_no_answer_and_has_no_say(opened: Open, working: onebox.Trainer, stranger: Stranger) -> None:
    question = encode(Envelope(1, True, (Ask("memory"), Shutdown())))
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        poller = zmq.Poller()
        for worker, config in enumerate(opened.configs):
            for port in opened.ports(worker):
                client = stack.enter_context(context.socket(zmq.DEALER))
                client.linger = 0
                stranger(client, config)
                client.connect(f"tcp://127.0.0.1:{port}")
                with contextlib.suppress(zmq.Again):  # it has been shown the door before it could say anything
                    client.send(question, zmq.NOBLOCK)
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


FLOOD = """
import socket, sys

GREETING = bytes([255, *bytes(8), 127, 3, 1]) + b"CURVE".ljust(20, bytes(1)) + bytes(32)
COMMAND = bytes([6]) + (8 << 30).to_bytes(8, "big")  # a long command of 8 GiB (RFC 37)
BLOCK = bytes(1 << 20)

sent = 0
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as connection:
    try:
        connection.sendall(GREETING + COMMAND)
        for _ in range(512):
            connection.sendall(BLOCK)
            sent += 1
    except OSError as error:
        print(f"closed: {error}")
print(f"sent {sent} MiB")
"""
"""A stranger that announces much and sends it, before anybody has asked for its key."""

FLOODED_BYTES = 64 << 20
"""More than what one connection of a stranger can make a worker hold: one part, and the buffers of the kernel."""


def test_a_stranger_cannot_fill_the_memory_of_a_worker(opened: Open, working: onebox.Trainer) -> None:
    for worker in range(len(opened.pool)):
        process = psutil.Process(opened.pool.process_ids[worker])
        for port in opened.ports(worker):
            before = process.memory_info().rss
            with subprocess.Popen([sys.executable, "-c", FLOOD, str(port)], stdout=subprocess.PIPE, text=True) as flood:
                grown = [0]
                while flood.poll() is None:
                    grown.append(process.memory_info().rss - before)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        flood.wait(0.01)
                said = flood.communicate()[0]
            assert max(grown) < FLOODED_BYTES, said
            assert "closed" in said, said
    steps(working, working.steps_done + 2)


def test_workers_listen_on_loopback_only(opened: Open, working: onebox.Trainer) -> None:
    for worker in range(len(opened.pool)):
        addresses = opened.listening(worker)
        assert len(addresses) >= 2  # commands and heartbeats; of a group that goes over sockets, also its own
        assert {address.ip for address in addresses} <= {"127.0.0.1", "::1"}


def test_no_key_is_in_a_command_line_an_environment_or_a_file(opened: Open) -> None:
    keys = [key.encode() for config in opened.configs for key in (config.secret, config.public, config.client)]
    keys.append(opened.pool._client_loop._keys.secret.encode())
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
    keys = opened.pool._client_loop._keys
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        poller = zmq.Poller()
        for port in opened.ports(0):
            client = stack.enter_context(context.socket(zmq.DEALER))
            configure(client, keys, server_key=opened.configs[0].public)
            client.connect(f"tcp://127.0.0.1:{port}")
            poller.register(client, zmq.POLLIN)
        assert poller.poll(4 * SILENCE_MS), "no sign of life of the worker"


# ---- between processes of one machine


@dataclass
class Seen:
    """What was there while a pool was being opened."""

    folders: set[Path]
    modes: set[int]
    owners: set[int]


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Look at the folders that workers are told to bind their sockets in."""
    seen = Seen(set(), set(), set())

    def start(place: Any, config: WorkerConfig, **options: Any) -> Any:
        folder = Path(config.address)
        seen.folders.add(folder)
        seen.modes.add(stat.S_IMODE(folder.stat().st_mode))
        seen.owners.add(folder.stat().st_uid)
        return process(place, config, **options)

    process = local_module.WorkerProcess
    monkeypatch.setattr(local_module, "WorkerProcess", start)
    return seen


def test_sockets_of_this_machine_lie_where_nobody_else_comes_and_go_when_all_have_come(opening: Seen) -> None:
    with open_pool("cpu*2", threads=1) as pool:
        (folder,) = opening.folders
        assert opening.modes == {0o700}
        assert opening.owners == {os.getuid()}
        assert not folder.exists(), "nobody can connect any more, nor is anything left should this process be killed"
        for number in pool.process_ids:
            process = psutil.Process(number)
            listening = [c for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
            assert listening == []
            paths = [Path(c.laddr) for c in process.net_connections(kind="unix") if str(c.laddr).startswith("/")]
            assert len(paths) >= 2
            assert not any(path.exists() for path in paths)
        train(pool, "workers", 2)


def test_the_folder_goes_also_when_a_pool_cannot_be_opened(opening: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "PROTOCOL", -1)
    with pytest.raises(PoolError, match="same versions"):
        open_pool("cpu", threads=1)
    (folder,) = opening.folders
    assert not folder.exists()
