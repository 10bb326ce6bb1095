"""``python -m onebox.worker.process.zygote``: a process that has imported everything a worker needs, and forks workers.

Importing torch is nearly the whole cost of a worker's start; here it is done once. A fork is an ordinary worker: it
takes a session, and a user of its own where the zygote's forks have one, receives its configuration and keys through
its own pipe, and confines itself. What it shares is memory from before the fork, which holds no secrets: imported
modules, with their addresses, and the random numbers that Python and libraries draw when they start, such as the seed
of hashes.

The zygote reads nothing but the requests of the process that started it, has one thread, and refuses requests if a
library has started others (see :mod:`onebox.forking`). It computes nothing and uses no driver, so that each fork
initialises CUDA and libraries' threads itself. Libraries read the environment when they are loaded, at the start of the
zygote, which is why there is one for each environment; see :mod:`onebox.pool.launch.zygotes`. It ends with the process
that started it; what its workers leave behind is ended here.

A zygote that root has started, for users of leases, keeps of root's capabilities only those to change its user and
groups. Its user is still root until a fork changes it: it may do what root may as the owner of files, and a program
that it started would have all capabilities. It reads nothing of clients, and starts none.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # as in __main__.py; objects at a fork stay, and each worker enables it

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from onebox.forking import ForkServer, SpawnRequest, adopt_orphans, set_dumpable
from onebox.worker.process.config import STAYS, WITH_USERS
from onebox.worker.process.main import ignore_end_signals, load_programs, name_process, wake_with_owner
from onebox.worker.process.main import main as serve_worker
from onebox.worker.sandbox.confine import limit_capabilities, prepare

load_programs()

DESCRIPTORS = 4
"""Standard input, output and error of the new worker, and a pipe for its exit status."""

IDLE_S = 60.0
"""Idle time without a worker after which it ends, unless it stays: its imports take memory, and its client can start
another one."""

_SET_GROUP, _SET_USER = 6, 7  # CAP_SETGID and CAP_SETUID of capabilities(7)


def main(*, users: bool, stays: bool) -> None:
    """Run a zygote; standard input is the socket to its client, which is this process's parent.

    Args:
        users: Whether its workers take users of their own.
        stays: Whether it stays without workers.
    """
    ignore_end_signals()
    client = os.getppid()
    watched = os.pidfd_open(client)
    wake_with_owner()
    if os.getppid() != client:
        return  # it ended before it could be watched
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    name_process("onebox-zygote")
    adopt_orphans()
    set_dumpable(False)  # its next forks may be workers of another lease
    with contextlib.suppress(OSError):  # the worker reports unsupported confinement itself
        prepare()
    if users:
        limit_capabilities((_SET_GROUP, _SET_USER))
    gc.freeze()
    server = ForkServer(channel, watched, DESCRIPTORS, idle_s=None if stays else IDLE_S, users=users)
    given = server.serve()
    if given is None:
        server.outlast_children()
        return
    try:
        _become_worker(*given)
        serve_worker(client, (watched,))
    except BaseException as error:
        if isinstance(error, SystemExit):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        os._exit(1)  # nothing of the zygote is to be cleaned up in a fork


def _become_worker(request: SpawnRequest, streams: Sequence[int]) -> None:
    """Take a session, standard streams and a user for good, and keep of the zygote only the imports.

    Raises:
        OSError: The system refuses.
    """
    os.setsid()
    for standard, given in enumerate(streams):
        os.dup2(given, standard)
        os.close(given)
    if request.user is not None:
        os.setgroups(request.groups)
        os.setresgid(request.group, request.group, request.group)
        os.setresuid(request.user, request.user, request.user)
        limit_capabilities(())
    set_dumpable(True)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


if __name__ == "__main__":
    main(users=WITH_USERS in sys.argv[1:], stays=STAYS in sys.argv[1:])
    os._exit(0)  # the client may wait for the end, and to unload PyTorch takes a fifth of a second
