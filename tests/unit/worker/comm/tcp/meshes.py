"""Meshes whose ranks are threads of a test, each of which connects to all others."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from onebox.worker.comm.certificate import Certificate, new_certificate
from onebox.worker.comm.tcp.connection import TcpConnection
from onebox.worker.comm.tcp.mesh import CONNECT_S, Mesh
from tests.kit.waiting import until
from tests.unit.ranks import Keys

WITHIN_S = 30.0
HERE = "127.0.0.1"
SECRET = b"s" * 32


class Ends(NamedTuple):
    """The connections with one peer: those to write to it, and those to read from it."""

    outgoing: tuple[TcpConnection, ...]
    incoming: tuple[TcpConnection, ...]

    def close(self) -> None:
        """Close all."""
        for each in self.outgoing + self.incoming:
            each.close()


def connect_mesh(
    rank: int, size: int, address: str, store: Keys, *, connect_s: float = CONNECT_S, **options: Any
) -> dict[int, Ends]:
    """Connect to all other ranks, and wait for them; nothing listens any more then."""
    incoming: dict[int, tuple[TcpConnection, ...]] = {}
    mesh = Mesh(rank, size, address, store, came=incoming.__setitem__, **{"encrypted": True, **options})
    others = [other for other in range(size) if other != rank]
    with contextlib.ExitStack() as stack:
        stack.callback(mesh.close)
        threads = stack.enter_context(ThreadPoolExecutor(size))
        made = {other: threads.submit(mesh.connect, other, connect_s) for other in others}

        def complete() -> bool:
            mesh.attend(missing=True)
            for future in made.values():
                if future.done():
                    future.result()
            return all(future.done() for future in made.values()) and len(incoming) == len(others)

        try:
            until(complete, WITHIN_S)
        except BaseException:
            mesh.close()  # so that nobody else comes
            for future in made.values():
                with contextlib.suppress(Exception):
                    Ends(future.result(), ()).close()
            for found in incoming.values():
                Ends((), found).close()
            raise
    return {other: Ends(made[other].result(), incoming[other]) for other in others}


def announced(host: str, port: int, certificate: Certificate | None = None, secret: bytes = SECRET) -> str:
    """Return what a rank says of itself in the rendezvous."""
    return f"{host} {port} {secret.hex()} {(certificate or new_certificate()).der.hex()}"


def call(store: Keys, rank: int, caller: int) -> bytes:
    """Return the bytes with which a rank calls another one, by its first and only connection."""
    secret = bytes.fromhex(store.get(f"tcp/{rank}").decode().split(" ")[2])
    said = struct.pack("<4sIBB", b"call", caller, 0, 1)
    return said + hmac.digest(secret, b"calls" + said, "sha256")


def where(store: Keys, rank: int) -> tuple[str, int]:
    """Return where a rank listens."""
    host, port, *_ = store.get(f"tcp/{rank}").decode().split(" ")
    return host, int(port)


def reach(store: Keys, rank: int) -> socket.socket:
    """Connect to a rank as soon as it listens."""

    def connected() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(where(store, rank), WITHIN_S)
        return None

    found = until(connected)
    assert found is not None
    return found


def read(connection: TcpConnection, count: int) -> bytes:
    """Read so many bytes, or fewer at the end."""
    data = memoryview(bytearray(count))
    done = 0
    while done < count and (came := connection.receive(data[done:])):
        done += came
    return bytes(data[:done])


def works(one: Ends, other: Ends) -> bool:
    """Return whether both directions carry data."""
    one.outgoing[0].send(b"there")
    other.outgoing[0].send(b"back")
    return read(other.incoming[0], 5) == b"there" and read(one.incoming[0], 4) == b"back"


@contextlib.contextmanager
def closing(*meshes: dict[int, Ends]) -> Iterator[None]:
    """Close the connections of meshes at the end."""
    try:
        yield
    finally:
        for mesh in meshes:
            for ends in mesh.values():
                ends.close()
