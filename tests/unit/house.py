"""The whole house in one process: the workers of a pool are threads here, with the same sockets and keys."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from onebox.emulator.server import EmulatorServer
from onebox.errors import WorkerDied
from onebox.pool import Pool, open_pool
from onebox.pool.backends import local as local_module
from onebox.pool.errors import WorkerLocation
from onebox.wire import send
from onebox.wire.protocol.requests import Envelope, Shutdown
from onebox.worker import Ports, WorkerConfig
from onebox.worker.process.main import WorkerServer


class _Endable(WorkerServer):
    """A server that ends when it is told to from outside, as a process would that is killed."""

    ended = False

    def _receive(self, end_s: float = math.inf) -> bool:
        while not super()._receive(min(end_s, time.monotonic() + 0.05)):
            if self.ended:
                self._deferred.append((Envelope(0, False, (Shutdown(),)), (), 0))
                return True
            if time.monotonic() >= end_s:
                return False
        return True

    def say(self, parts: list[bytes]) -> None:
        """Send the client a message as it is."""
        self._socket.send_multipart(parts)

    def _transmit(self, frames: list[Any]) -> None:
        while True:
            try:
                send(self._socket, frames, zmq.NOBLOCK)
                return
            except zmq.Again:  # the client has gone: sending would wait for ever
                if self.ended:
                    raise SystemExit from None
                time.sleep(0.01)


class EndableServer(_Endable):
    """That of a device that computes."""


class EndableEmulator(_Endable, EmulatorServer):
    """That of an emulated device."""


class ThreadWorker:
    """Stands in for a worker's process.

    Args:
        place: Where the worker is.
        config: What it is to be.
        spawner: What would fork its process.
    """

    address = "127.0.0.1"

    def __init__(self, place: WorkerLocation, config: WorkerConfig, *, spawner: object) -> None:
        self.place = place
        self.pid = os.getpid()
        self.error: BaseException | None = None
        self._lifeline, self._owner = os.pipe()
        self.descriptor, self._alive = os.pipe()
        server_class = EndableEmulator if config.device == "sim" else EndableServer
        self.server = server_class(config, (self._lifeline,))
        self.thread = threading.Thread(target=self._run, name=f"worker {place.worker}", daemon=True)

    def ports(self) -> Ports:
        self.thread.start()
        return self.server.ports

    def death(self) -> WorkerDied:
        return WorkerDied(f"{self.place} ended: {self.error!r}", exit_status=1, worker=self.place.worker)

    def close(self, *, grace_s: float) -> None:
        self.thread.join(grace_s)
        self.server.ended = True
        self.thread.join(30)
        if self.thread.is_alive():
            where = sys._current_frames()[self.thread.ident or 0]
            raise AssertionError("a worker does not end:\n" + "".join(traceback.format_stack(where)))
        for descriptor in (self._lifeline, self._owner, self.descriptor):
            os.close(descriptor)

    def _run(self) -> None:
        try:
            self.server.serve()
        except BaseException as error:
            self.error = error
            self.server._watcher.stop()
            self.server._context.destroy(linger=0)
        finally:
            os.close(self._alive)


class OpenPool:
    """A function that opens pools of so many workers, CPUs by default."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.servers: list[_Endable] = []
        """Those of all workers, in the order of their start."""

    def __call__(self, workers: int, *, kind: str = "cpu", **options: Any) -> Pool:
        self.pools.append(open_pool(f"{kind}*{workers}", threads=1, **options))
        return self.pools[-1]

    def start(self, place: WorkerLocation, config: WorkerConfig, *, spawner: object) -> ThreadWorker:
        """Start a worker as a thread."""
        worker = ThreadWorker(place, config, spawner=spawner)
        self.servers.append(worker.server)
        return worker


@contextlib.contextmanager
def threads_for_processes() -> Iterator[OpenPool]:
    """Give a function that opens pools, all of which are closed afterwards."""

    def exit_instead(status: int) -> None:
        raise AssertionError("a worker's thread would have ended this process")

    opening = OpenPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_module, "WorkerProcess", opening.start)
        patch.setattr(os, "_exit", exit_instead)
        try:
            yield opening
        finally:
            for each in opening.pools:
                each.close()
