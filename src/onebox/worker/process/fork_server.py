"""``python -m onebox.worker.process.fork_server``: a fork server that has imported everything a worker needs, and forks
workers.

Importing torch is nearly the whole cost of a worker's start; here it is done once. A fork is an ordinary worker: it
receives its configuration and keys through its own pipe, and confines itself. It shares only unmodified memory pages
with its siblings, which hold no secrets.

The fork server has one thread, since a fork would inherit locks of other threads that are never released: it refuses
requests if a library has started threads. It computes nothing and uses no driver, so that each fork initialises CUDA
and libraries' threads itself. Libraries read the environment when they are loaded, at the start of the fork server,
which is why a client has one for each environment; see :mod:`onebox.pool.launch.fork_server`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # as in __main__.py; objects at a fork stay, and each worker enables it

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass

import msgspec

from onebox.worker.process.fork_messages import (
    DESCRIPTORS,
    LONGEST,
    ForkServerReady,
    Spawned,
    SpawnRefused,
    SpawnRequest,
    decode_spawn_request,
    encode,
    pack_status,
)
from onebox.worker.process.main import main as serve_worker
from onebox.worker.process.main import name_process, wake_with_owner
from onebox.worker.sandbox.confine import prepare

IDLE_S = 60.0
"""Idle time without a worker after which it ends: its imports take memory, and its client can start another one."""


@dataclass(frozen=True)
class _Child:
    """A running worker: its process, and the pipe for its exit status."""

    process: int
    status: int


class ForkServer:
    """The fork server's loop: handles requests, forks workers, and reports their exit status.

    Args:
        channel: The socket to the client; each packet is a message.
        client: A descriptor of the client's process.
        idle_s: Idle time without a worker after which it ends.
    """

    def __init__(self, channel: socket.socket, client: int, *, idle_s: float = IDLE_S) -> None:
        self._channel = channel
        self._client = client
        self._idle_s = idle_s
        self._children: dict[int, _Child] = {}  # by process descriptor
        self._poll = select.poll()
        for each in (channel.fileno(), client):
            self._poll.register(each, select.POLLIN)

    def serve(self) -> bool:
        """Serve until the client has ended or there has been no worker for a while.

        Returns:
            Whether this process is now a forked worker.
        """
        self._channel.send(encode(ForkServerReady()))
        while True:
            ready = self._poll.poll(None if self._children else self._idle_s * 1000)
            if not ready:
                return False
            for descriptor, _ in ready:
                if descriptor == self._client:
                    return False
                if descriptor in self._children:
                    self._bury(descriptor)
                    continue
                packet, descriptors, _, _ = socket.recv_fds(
                    self._channel, LONGEST, DESCRIPTORS + 1, socket.MSG_CMSG_CLOEXEC
                )
                if not packet:
                    return False
                if self._take(packet, descriptors):
                    return True

    def _take(self, packet: bytes, descriptors: list[int]) -> bool:
        """Handle a request; return whether this process is the worker."""
        try:
            birth = decode_spawn_request(packet)
        except msgspec.DecodeError as error:
            _close(descriptors)
            self._say(SpawnRefused(0, f"this is no wish for a worker: {error}"))
            return False
        why = _obstacle(descriptors)
        if why:
            _close(descriptors)
            self._say(SpawnRefused(birth.number, why))
            return False
        try:
            process = os.fork()
        except OSError as error:
            _close(descriptors)
            self._say(SpawnRefused(birth.number, f"fork: {error.strerror}"))
            return False
        if not process:
            self._leave(birth, descriptors)
            return True
        descriptor = os.pidfd_open(process)
        self._children[descriptor] = _Child(process, descriptors[-1])
        self._poll.register(descriptor, select.POLLIN)
        _close(descriptors[:-1])
        self._say(Spawned(birth.number, process), descriptor)
        return False

    def _leave(self, birth: SpawnRequest, descriptors: list[int]) -> None:
        """Detach from the fork server and its workers, keeping only the imports."""
        os.setsid()
        for standard, given in enumerate(descriptors[:-1]):
            os.dup2(given, standard)
        _close(descriptors)
        for descriptor, child in self._children.items():
            _close([descriptor, child.status])
        self._channel.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        with contextlib.suppress(OSError):  # such as a core that has been disabled since
            os.sched_setaffinity(0, birth.cores)

    def _bury(self, descriptor: int) -> None:
        """Report a worker's exit status."""
        child = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        _, status = os.waitpid(child.process, 0)
        with contextlib.suppress(OSError):  # the reader has gone
            os.write(child.status, pack_status(os.waitstatus_to_exitcode(status)))
        _close([descriptor, child.status])

    def _say(self, answer: Spawned | SpawnRefused, *descriptors: int) -> None:
        with contextlib.suppress(OSError):  # the client has ended, which the next read reports
            socket.send_fds(self._channel, [encode(answer)], descriptors)


def _obstacle(descriptors: list[int]) -> str:
    """Return the reason that no worker can be forked; empty if there is none."""
    if len(descriptors) != DESCRIPTORS:
        return f"{len(descriptors)} descriptors came with the wish for a worker, which takes {DESCRIPTORS}"
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"a library has started threads, so that there are {threads}: a fork would have their locks"
    return ""


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def main() -> None:
    """Run a fork server; standard input is the socket to its client."""
    parent = os.getppid()
    client = os.pidfd_open(parent)
    wake_with_owner()
    if os.getppid() != parent:
        return  # it ended before it could be watched
    me = os.pidfd_open(os.getpid())
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    name_process("onebox-nursery")
    with contextlib.suppress(OSError):  # the worker reports unsupported confinement itself
        prepare()
    gc.freeze()
    if ForkServer(channel, client).serve():
        serve_worker(parent, (client, me))


if __name__ == "__main__":
    main()
