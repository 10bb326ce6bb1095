"""A bad network: stands between a client and its workers; cuts, stalls and refuses connections when it is told to."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import threading
from collections.abc import Iterator

BLOCK_BYTES = 1 << 16
AT_ONCE = struct.pack("ii", 1, 0)
"""For ``SO_LINGER``: closing throws away what is under way, as a network does."""

LONGEST_S = 30.0
"""Bound of a stall, should a test forget to end it."""


class Network:
    """What all connections through it have in common.

    Args:
        seed: Of the lengths of their lives.
        cuts: How many connections are cut by themselves; from then on they hold.
        most_bytes: The most bytes that go over a connection that will be cut; evenly drawn.
    """

    def __init__(self, seed: int = 0, cuts: int = 0, most_bytes: int = 0) -> None:
        self._chance = random.Random(seed)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._doors: list[Door] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self.cuts_left = cuts
        self.up = True

    def door(self, endpoint: str, *, wears: bool) -> str:
        """Return an endpoint that leads to another one, through this network.

        Args:
            endpoint: Such as ``tcp://127.0.0.1:1234``.
            wears: Whether its connections are cut by themselves.
        """
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._doors.append(Door(self, (host, int(port)), wears=wears))
        return self._doors[-1].endpoint

    def lead(self, door: int, endpoint: str) -> None:
        """Let a door's next connections lead somewhere else."""
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._doors[door].target = host, int(port)

    def life_bytes(self) -> float:
        """Return after how many bytes the next connection is cut."""
        with self._lock:
            if not self.cuts_left:
                return math.inf
            self.cuts_left -= 1
            return self._chance.randrange(self._most_bytes)

    def cut(self) -> None:
        """Cut every connection there is."""
        for door in self._doors:
            door.cut()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Let there be no connection meanwhile."""
        self.up = False
        self.cut()
        try:
            yield
        finally:
            self.up = True

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Let nothing get through meanwhile, although connections stay."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def wait(self) -> None:
        """Wait while it is stalled."""
        self._flowing.wait(LONGEST_S)

    def close(self) -> None:
        """End all threads and close all sockets."""
        self._flowing.set()
        for door in self._doors:
            door.close()


class Door:
    """One port, and the connections through it."""

    def __init__(self, network: Network, target: tuple[str, int], *, wears: bool) -> None:
        self.target = target
        self._network = network
        self._wears = wears
        self._pairs: list[Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        for pair in list(self._pairs):
            pair.cut()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(30)
        self._listener.close()
        for pair in self._pairs:
            pair.cut()
            pair.join()

    def _serve(self) -> None:
        while True:
            try:
                came, _ = self._listener.accept()
            except OSError:
                return
            came.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            if not self._network.up:
                came.close()
                continue
            try:
                went = socket.create_connection(self.target)
            except OSError:
                came.close()
                continue
            went.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self._pairs.append(Pair(self._network, came, went, self._network.life_bytes() if self._wears else math.inf))


class Pair:
    """One connection through the network: two, with a thread for each direction."""

    def __init__(self, network: Network, came: socket.socket, went: socket.socket, life_bytes: float) -> None:
        self._network = network
        self._sockets = came, went
        self._left_bytes = life_bytes
        self._lock = threading.Lock()
        ways = (came, went), (went, came)
        self._threads = [threading.Thread(target=self._carry, args=way, name="way", daemon=True) for way in ways]
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # which wakes the threads, of which the last closes them

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30)
        for each in self._sockets:
            each.close()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(BLOCK_BYTES):
                self._network.wait()
                with self._lock:
                    allowed = min(len(block), self._left_bytes)
                    self._left_bytes -= len(block)
                sink.sendall(block[: max(0, int(allowed))])
                if self._left_bytes < 0:
                    break
        self.cut()
