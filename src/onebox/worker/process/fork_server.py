"""``python -m onebox.worker.process.fork_server``: a fork server that has imported everything a worker needs, and forks
workers.

Importing torch is nearly the whole cost of a worker's start; here it is done once. A fork is an ordinary worker: it
receives its configuration and keys through its own pipe, and confines itself. It shares only unmodified memory pages
with its siblings, which hold no secrets. The fork servers of an agent's leases are themselves forks of a process that
has imported all (:mod:`onebox.worker.process.zygote`).

The fork server has one thread, and refuses requests if a library has started others (see :mod:`onebox.forking`). It
computes nothing and uses no driver, so that each fork initialises CUDA and libraries' threads itself. Libraries read
the environment when they are loaded, at the start of the fork server, which is why a client has one for each
environment; see :mod:`onebox.pool.launch.fork_server`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # as in __main__.py; objects at a fork stay, and each worker enables it

import contextlib
import os
import signal
import socket

from onebox.forking import ForkServer, adopt_orphans, set_dumpable
from onebox.worker.process.main import ignore_end_signals, load_programs, name_process, wake_with_owner
from onebox.worker.process.main import main as serve_worker
from onebox.worker.sandbox.confine import prepare

load_programs()

DESCRIPTORS = 4
"""Standard input, output and error of the new worker, and a pipe for its exit status."""

IDLE_S = 60.0
"""Idle time without a worker after which it ends: its imports take memory, and its client can start another one."""


def main() -> None:
    """Run a fork server; standard input is the socket to its client."""
    ignore_end_signals()
    found = connect_client()
    if found is not None:
        serve_client(*found)


def connect_client() -> tuple[socket.socket, int, int] | None:
    """Take the socket to the client from standard input, and watch the client, which is this process's parent.

    Returns:
        The socket, the client's process id, and a descriptor of the client; ``None`` if the client has ended.
    """
    client = os.getppid()
    watched = os.pidfd_open(client)
    wake_with_owner()
    if os.getppid() != client:
        return None  # it ended before it could be watched
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return channel, client, watched


def serve_client(channel: socket.socket, client: int, watched: int) -> None:
    """Fork workers until the client has ended; in a fork, run the worker.

    Args:
        channel: The socket to the client.
        client: The client's process id.
        watched: A descriptor of the client.
    """
    me = os.pidfd_open(os.getpid())
    name_process("onebox-fork-srv")
    adopt_orphans()
    set_dumpable(False)  # its next forks may be workers of another lease
    with contextlib.suppress(OSError):  # the worker reports unsupported confinement itself
        prepare()
    gc.freeze()
    streams = ForkServer(channel, watched, DESCRIPTORS, idle_s=IDLE_S).serve()
    if streams is not None:  # this is a worker, which keeps only the imports
        os.setsid()
        set_dumpable(True)
        for standard, given in enumerate(streams):
            os.dup2(given, standard)
            os.close(given)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        serve_worker(client, (watched, me))


if __name__ == "__main__":
    main()
    os._exit(0)  # the client waits for the end, and to unload PyTorch takes a fifth of a second
