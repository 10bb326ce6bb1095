"""The fork servers of this process: one for each environment that its workers would inherit.

A fork inherits the state of its server. After this process drops rights, enters another network namespace, or sets a
variable that a library reads when it is loaded, its workers come from another fork server. The number of threads is
such a variable: threads that a library starts use OpenMP's setting of that time, whatever PyTorch is set to later.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from subprocess import SubprocessError
from typing import IO

from onebox.pool.launch.fork_server import ForkedProcess, ForkServerEnded, ForkServerProcess, SpawnFailed
from onebox.pool.launch.worker_user import WorkerUser

MOST = 4
"""The most environments with a fork server at the same time; workers of others are started from scratch."""

_LOG = logging.getLogger("onebox")


class ForkServers:
    """A set of fork servers, each started when the first worker of its kind is requested."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[object, ForkServerProcess] = {}
        self._broken: set[object] = set()

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None = None
    ) -> ForkedProcess | None:
        """Start a worker, and first a fork server if there is none; see :class:`Bearer`."""
        key = (account, inheritance(environment))
        for _ in range(2):  # the fork server found may be about to end
            nursery = self._nursery(key, environment, account)
            if nursery is None:
                return None
            try:
                return nursery.spawn_worker(stderr)
            except ForkServerEnded as error:
                why = f"{error}"
                self._forget(key)
            except SpawnFailed as error:
                why = f"{error}"
                break
        with self._lock:
            self._broken.add(key)
        _LOG.warning("workers are started one by one, which takes them a second longer: their fork server: %s", why)
        return None

    def close(self) -> None:
        """End all servers, and with them their workers."""
        with self._lock:
            found, self._found = list(self._found.values()), {}
        for nursery in found:
            nursery.close()

    def disown(self) -> None:
        """Forget all servers, in a fork of the process that owns them."""
        for nursery in self._found.values():
            nursery.disown()

    def _nursery(
        self, key: object, environment: Mapping[str, str], account: WorkerUser | None
    ) -> ForkServerProcess | None:
        with self._lock:
            for each, nursery in list(self._found.items()):
                if nursery.ended:
                    self._found.pop(each).close()
            if key in self._broken:
                return None
            if key not in self._found:
                if len(self._found) >= MOST:
                    return None
                try:
                    self._found[key] = ForkServerProcess(environment, account)
                except (OSError, SubprocessError):
                    return None  # a worker's own start will fail, too, and report why
            return self._found[key]

    def _forget(self, key: object) -> None:
        with self._lock:
            nursery = self._found.pop(key, None)
        if nursery is not None:
            nursery.close()


_STATUS = ("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
"""The rights that a process inherits from its parent, as ``/proc`` names them; a filter of system calls counts as
one."""


def inheritance(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return a key of everything that a process started by this thread would inherit, except its CPU affinity.

    Args:
        environment: Its environment variables.
    """
    own = Path("/proc/thread-self")
    status = [line for line in _text(own / "status").splitlines() if line.startswith(_STATUS)]
    spaces = []
    with contextlib.suppress(OSError):
        spaces = [os.readlink(each) for each in sorted((own / "ns").iterdir())]
    limits = _text(own / "limits"), _text(own / "cgroup"), os.getpriority(os.PRIO_PROCESS, 0)
    return tuple(sorted(environment.items())), tuple(status), tuple(spaces), *limits


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class _OwnForkServers:
    """The fork servers of the current process; a fork of it gets its own."""

    def __init__(self) -> None:
        self._nurseries = ForkServers()
        self._strange: list[ForkServers] = []

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None = None
    ) -> ForkedProcess | None:
        """Start a worker; see :class:`Bearer`."""
        return self._nurseries.spawn_worker(environment, stderr, account)

    def close(self) -> None:
        """End the servers; workers that are started later get new ones."""
        self._nurseries.close()

    def leave(self) -> None:
        """Forget the servers of the parent process, in a fork of it."""
        self._nurseries.disown()
        self._strange.append(self._nurseries)
        self._nurseries = ForkServers()


OWN = _OwnForkServers()
"""The fork servers of this process."""

os.register_at_fork(after_in_child=OWN.leave)
atexit.register(OWN.close)  # before any pool registers its own end, which therefore runs first


__all__ = ["OWN", "ForkServers", "inheritance"]
