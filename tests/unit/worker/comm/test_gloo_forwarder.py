"""Connections of Gloo that a forwarder carries, and those of others on the same machine, which it refuses."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from onebox.worker.comm import tls_mesh
from onebox.worker.comm.gloo_forwarder import GlooForwarder, loopback_address
from onebox.worker.comm.tls_mesh import connect_mesh
from tests.unit.worker.comm.test_tls_mesh import HERE, WITHIN_S, Store

_STRANGER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 30) as made:
    print("connected", flush=True)
    try:
        print(made.recv(1))
    except ConnectionResetError:
        print(b"")
"""


def acknowledged_bytes(connection: socket.socket) -> int:
    """Return how many bytes the other end of a connection has acknowledged, by ``struct tcp_info``."""
    (found,) = struct.unpack_from("=Q", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 120)
    return int(found)


def endpoint(rank: int, port: int) -> bytes:
    """Return an address as Gloo puts it into the store, between other bytes."""
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(loopback_address(rank))
    return b"\x09host name" + address + bytes(120)


@pytest.fixture(params=[1, tls_mesh.MOST_CONNECTIONS])
def forwarders(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[GlooForwarder, GlooForwarder]]:
    """Those of ranks 0 and 1, with so many connections in each direction, all of which are used."""
    store = Store()
    if request.param > 1:
        monkeypatch.setattr(tls_mesh, "WINDOW_BYTES", 1)  # which the shortest way is too long for
    with ThreadPoolExecutor(2) as threads:
        meshes = list(threads.map(lambda rank: connect_mesh(rank, 2, HERE, store), range(2)))
    assert all(len(way) == request.param for mesh in meshes for link in mesh.values() for way in link)
    made = tuple(GlooForwarder(rank, mesh, dist.HashStore()) for rank, mesh in enumerate(meshes))
    for each in made:
        each._channels[0]._meter._used.count = request.param  # as if windows had held back those before
    yield made[0], made[1]
    for each in made:
        each.close()


@pytest.fixture
def gloo(forwarders: tuple[GlooForwarder, GlooForwarder]) -> Iterator[socket.socket]:
    """Stands for the listener of rank 0's Gloo."""
    with socket.create_server((loopback_address(0), 0)) as listener:
        listener.settimeout(WITHIN_S)
        forwarders[0].store.set("0", endpoint(0, listener.getsockname()[1]))
        yield listener


def in_place(forwarder: GlooForwarder, rank: int) -> int:
    """Return the port at which a forwarder listens in the place of a rank."""
    value = forwarder.redirected(endpoint(rank, 7))
    (port,) = struct.unpack_from("!H", value, value.index(socket.inet_aton(loopback_address(rank))) - 2)
    return int(port)


@contextlib.contextmanager
def stranger(rank: int, port: int) -> Iterator[subprocess.Popen[str]]:
    """Let another process connect; it tells what it receives."""
    command = [sys.executable, "-c", _STRANGER, loopback_address(rank), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "connected\n"
        yield process


def told(process: subprocess.Popen[str]) -> str:
    """Return what a stranger received."""
    assert process.stdout is not None
    process.wait(WITHIN_S)
    return process.stdout.read().strip()  # with what reading a line has already buffered


def test_only_the_addresses_of_lower_ranks_are_replaced(forwarders: tuple[GlooForwarder, GlooForwarder]) -> None:
    one, other = forwarders
    for value in (endpoint(1, 5), endpoint(0, 5), b"", b"\x02\x00\x00\x05\x7f\x4d", endpoint(0, 5)[:14]):
        assert one.redirected(value) == value
    assert other.redirected(endpoint(1, 5)) == endpoint(1, 5)
    assert other.redirected(endpoint(0, 5)) == endpoint(0, in_place(other, 0)) != endpoint(0, 5)


def test_bytes_arrive_in_both_directions_and_before_the_end(
    forwarders: tuple[GlooForwarder, GlooForwarder], gloo: socket.socket
) -> None:
    data = bytes(range(256)) * 40_000
    with socket.create_connection((loopback_address(0), in_place(forwarders[1], 0)), WITHIN_S) as one:
        one.sendall(b"sequence")
        other, _ = gloo.accept()
        with other, ThreadPoolExecutor(1) as threads:
            other.settimeout(WITHIN_S)
            assert other.recv(8) == b"sequence"
            other.sendall(b"back")
            assert one.recv(4) == b"back"

            (channel,) = forwarders[1]._channels

            def carried() -> bool:
                return all(acknowledged_bytes(each) > 1 << 16 for each in channel._link.outgoing)

            def send() -> int:
                one.sendall(data)
                times = 1
                while not carried() and times < 20:  # a part goes where there is room
                    one.sendall(data)
                    times += 1
                assert carried(), "each carried a part"
                one.close()
                return times

            sending = threads.submit(send)
            found = bytearray()
            while part := other.recv(1 << 16):
                found += part
            times = sending.result(WITHIN_S)
    assert found == data * times


def test_the_end_of_one_connection_is_that_of_the_link(
    forwarders: tuple[GlooForwarder, GlooForwarder], gloo: socket.socket
) -> None:
    with socket.create_connection((loopback_address(0), in_place(forwarders[1], 0)), WITHIN_S) as one:
        one.sendall(b"sequence")
        other, _ = gloo.accept()
        with other:
            other.settimeout(WITHIN_S)
            assert other.recv(8) == b"sequence"
            (channel,) = forwarders[1]._channels
            socket.socket.shutdown(channel._link.outgoing[-1], socket.SHUT_RDWR)
            with ThreadPoolExecutor(1) as threads:
                sending = threads.submit(
                    one.sendall, bytes(1 << 28)
                )  # others are full before, and that one is to be used
                with contextlib.suppress(ConnectionError):
                    assert not one.recv(1)
                with contextlib.suppress(OSError):
                    one.shutdown(
                        socket.SHUT_RDWR
                    )  # nobody may read any more, which the kernel says only if it can send
                with pytest.raises(ConnectionError):
                    sending.result(WITHIN_S)
            with contextlib.suppress(ConnectionError):
                while other.recv(1 << 20):
                    pass


def test_another_process_cannot_pass_for_gloo(
    forwarders: tuple[GlooForwarder, GlooForwarder], gloo: socket.socket
) -> None:
    port = in_place(forwarders[1], 0)
    with stranger(0, port) as process:
        assert told(process) == "b''"
    with socket.create_connection((loopback_address(0), port), WITHIN_S) as one:
        one.sendall(b"x")
        other, _ = gloo.accept()
        with other:
            assert other.recv(1) == b"x"


def test_connections_of_other_processes_to_gloo_end_when_the_group_has_formed(
    forwarders: tuple[GlooForwarder, GlooForwarder], gloo: socket.socket
) -> None:
    with (
        stranger(0, gloo.getsockname()[1]) as process,
        gloo.accept()[0],
        socket.create_connection((loopback_address(0), in_place(forwarders[1], 0)), WITHIN_S) as one,
    ):
        one.sendall(b"x")
        other, _ = gloo.accept()
        forwarders[0].formed()
        assert told(process) == "b''"
        with other:
            one.sendall(b"y")
            assert other.recv(1) + other.recv(1) == b"xy"
