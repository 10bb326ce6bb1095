"""A slow channel between this process and the workers that it starts: what either side sends is carried by threads."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

_CHUNK_BYTES = 1 << 18
_JOIN_S = 30.0


class SlowChannel:
    """What carries the messages of this process's sockets, as late as asked for.

    Args:
        latency_s: Seconds of each message, each way; it may be changed.
        bandwidth_bps: Most bytes per second from this process to all workers.
    """

    def __init__(self, latency_s: float = 0.0, bandwidth_bps: float = math.inf) -> None:
        self.latency_s = latency_s
        self._bandwidth_bps = bandwidth_bps
        self._free_s = -math.inf
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="onebox-")
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def through(self, path: str) -> str:
        """Return a path whose only connection is carried to that of a socket."""
        inlet = str(Path(self._folder.name) / str(len(self._threads)))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(inlet)
        listener.listen()
        self._sockets.append(listener)
        self._start(self._join, listener, path)
        return inlet

    def close(self) -> None:
        """End all connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
            assert not thread.is_alive()
        self._folder.cleanup()

    def _start(self, run: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _join(self, listener: socket.socket, path: str) -> None:
        with contextlib.suppress(OSError):
            here, _ = listener.accept()
            self._sockets.append(here)
            there = socket.socket(socket.AF_UNIX)
            self._sockets.append(there)
            there.connect(path)
            for source, target, bandwidth_bps in ((here, there, self._bandwidth_bps), (there, here, math.inf)):
                waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                self._start(self._take, source, waiting, bandwidth_bps)
                self._start(self._give, target, waiting)

    def _take(self, source: socket.socket, waiting: queue.SimpleQueue[Any], bandwidth_bps: float) -> None:
        data = b"first"
        while data:
            try:
                data = source.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            due_s = time.monotonic()
            if bandwidth_bps < math.inf:
                with self._lock:
                    due_s = self._free_s = max(self._free_s, due_s) + len(data) / bandwidth_bps
            waiting.put((due_s + self.latency_s, data))

    def _give(self, target: socket.socket, waiting: queue.SimpleQueue[Any]) -> None:
        while True:
            due_s, data = waiting.get()
            if data:
                time.sleep(max(0.0, due_s - time.monotonic()))
            with contextlib.suppress(OSError):
                if data:
                    target.sendall(data)
                else:
                    target.shutdown(socket.SHUT_WR)
            if not data:
                return


@contextlib.contextmanager
def slow_channel(latency_s: float = 0.0, bandwidth_bps: float = math.inf) -> Iterator[SlowChannel]:
    """Let pools of this machine that are opened in the context have a slow channel; close them before it ends."""
    made, plain = SlowChannel(latency_s, bandwidth_bps), zmq.Socket.connect

    def connect(self: Any, address: str) -> Any:
        kind, _, path = address.partition("://")
        return plain(self, f"ipc://{made.through(path)}" if kind == "ipc" else address)

    zmq.Socket.connect = connect  # type: ignore[assignment, method-assign]
    try:
        yield made
    finally:
        zmq.Socket.connect = plain  # type: ignore[method-assign]
        made.close()
