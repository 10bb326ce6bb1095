"""``python -m onebox.worker.process.zygote``: a process that has imported everything a worker needs, and forks fork
servers.

Each fork is an ordinary fork server (:mod:`onebox.worker.process.fork_server`) with a session, a socket to the client
and a user of its own. What is shared is memory from before the fork, which holds no secrets: imported modules, with
their addresses, and the random numbers that Python and libraries draw when they start, such as the seed of hashes. The
zygote reads nothing but the requests of the process that started it, has one thread, and uses no driver. It ends with
that process.

A zygote that root has started, for users of leases, keeps of root's capabilities only those to change its user and
groups. Its user is still root until a fork changes it: it may do what root may as the owner of files, and a program
that it started would have all capabilities. It reads nothing of clients, and starts none.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # as in fork_server.py

import contextlib
import os
import select
import socket
import sys
import traceback
from collections.abc import Sequence

import msgspec

from onebox.forking import LONGEST, ForkServer, set_dumpable
from onebox.worker.process.config import WITH_USERS, ForkSettings
from onebox.worker.process.fork_server import connect_client, serve_client
from onebox.worker.process.main import ignore_end_signals, name_process, wake_with_owner
from onebox.worker.sandbox.confine import limit_capabilities, prepare

DESCRIPTORS = 3
"""The socket of a new fork server, its standard error, and a pipe for its exit status."""

_SETTINGS_S = 5.0
_STANDARD_ERROR = 2
_SET_GROUP, _SET_USER = 6, 7  # CAP_SETGID and CAP_SETUID of capabilities(7)


def main(*, users: bool) -> None:
    """Run a zygote; standard input is the socket to its client.

    Args:
        users: Whether its forks take users of their own.
    """
    ignore_end_signals()
    found = connect_client()
    if found is None:
        return
    channel, client, watched = found
    name_process("onebox-zygote")
    set_dumpable(False)
    with contextlib.suppress(OSError):  # the worker reports unsupported confinement itself
        prepare()
    if users:
        limit_capabilities((_SET_GROUP, _SET_USER))
    gc.freeze()
    me = os.getpid()
    given = ForkServer(channel, watched, DESCRIPTORS).serve()
    if given is not None:
        try:
            _serve_fork(given, me, client, watched, users=users)
        except BaseException as error:
            if isinstance(error, SystemExit):
                print(error, file=sys.stderr)
            else:
                traceback.print_exc()
            os._exit(1)  # nothing of the zygote is to be cleaned up in a fork


def _serve_fork(given: Sequence[int], zygote: int, client: int, watched: int, *, users: bool) -> None:
    """Run a fork server, which keeps only the imports and the descriptor of its client.

    Args:
        given: Its socket to the client, and its standard error.
        zygote: The zygote's process id.
        client: The client's process id.
        watched: A descriptor of the client.
        users: Whether it takes a user of its own.
    """
    own, stderr = given
    os.setsid()
    os.dup2(stderr, _STANDARD_ERROR)
    os.close(stderr)
    os.set_inheritable(own, False)
    ignore_end_signals()
    channel = socket.socket(fileno=own)
    _take_user(_receive_settings(channel), users=users)
    wake_with_owner()  # once the user is changed, which would undo it
    if os.getppid() == zygote:  # else it has ended before it could be watched
        serve_client(channel, client, watched)


def _receive_settings(channel: socket.socket) -> ForkSettings:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    if not poll.poll(_SETTINGS_S * 1000):
        raise SystemExit(f"onebox zygote: no settings within {_SETTINGS_S:.0f} s")
    return msgspec.json.decode(channel.recv(LONGEST), type=ForkSettings)


def _take_user(settings: ForkSettings, *, users: bool) -> None:
    """Become another user for good, without any right of this one.

    Raises:
        SystemExit: The settings name root, no user although the zygote has rights to change it, or one without.
        OSError: The system refuses.
    """
    if users != (settings.user is not None) or settings.user == 0:
        raise SystemExit(f"onebox zygote: {settings.user} is no user for a fork of this zygote")
    if settings.user is None:
        return
    os.setgroups(settings.groups)
    os.setresgid(settings.group, settings.group, settings.group)
    os.setresuid(settings.user, settings.user, settings.user)
    limit_capabilities(())
    os.chdir("/")


if __name__ == "__main__":
    main(users=WITH_USERS in sys.argv[1:])
    os._exit(0)  # as in fork_server.py
