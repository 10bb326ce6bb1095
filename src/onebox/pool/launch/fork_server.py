"""A fork server as its client sees it: a process that has imported what workers need, and forks on request.

Importing torch is most of the time of a worker's start. The server's side is in
:mod:`onebox.worker.process.fork_server`; it ends with its client, and a minute after its last worker.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import SubprocessError
from typing import IO, Protocol

import msgspec

from onebox.pool.launch.worker_user import WorkerUser
from onebox.worker.process.fork_messages import (
    LONGEST,
    STATUS_BYTES,
    ForkServerReady,
    ForkServerReply,
    Spawned,
    SpawnRefused,
    SpawnRequest,
    decode_fork_reply,
    encode,
    read_status,
)

COMMAND = (sys.executable, "-P", "-m", "onebox.worker.process.fork_server")
"""Command line; with -P nothing is imported from the current folder."""

READY_S = 60.0
"""Bound of a fork server's imports; after it, workers are started without one."""

SPAWN_S = 20.0
"""Bound of a fork: usually a hundredth of a second, more on a loaded machine."""

_STATUS_S = 2.0
_END_S = 2.0


class SpawnFailed(Exception):
    """The fork server does not fork a worker; carries the reason."""


class ForkServerEnded(Exception):
    """The fork server has ended."""


class WorkerSpawner(Protocol):
    """Interface of fork servers that may provide a worker."""

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedProcess | None:
        """Start a worker whose standard error goes to ``stderr``; ``None`` where it has to be started from scratch."""


class ForkedProcess:
    """A forked worker; the counterpart of ``subprocess.Popen`` for one started from scratch.

    Args:
        pid: The process id.
        descriptor: A pidfd, which stays with the process even if its id is reused; the owner of this object closes it.
        stdin: Its standard input.
        stdout: Its standard output.
        status: Pipe on which the fork server sends the exit status; closed without data where the server has ended
            before.
    """

    def __init__(self, pid: int, descriptor: int, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.pid = pid
        self.descriptor = descriptor
        self.stdin = stdin
        self.stdout = stdout
        self._status = status
        self._found: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the process to end.

        Returns:
            The exit status, below 0 the number of a signal; ``None`` where it is unknown because the server has ended.

        Raises:
            subprocess.TimeoutExpired: It takes longer.
        """
        if not _readable(self.descriptor, timeout):
            raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
        with self._lock:
            if self._status >= 0:
                if _readable(self._status, _STATUS_S):
                    self._found = read_status(os.read(self._status, STATUS_BYTES))
                os.close(self._status)
                self._status = -1
            return self._found

    def kill(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)


class ForkServerProcess:
    """A fork server, with the environment and the rights that it was started with. Thread-safe.

    Args:
        environment: Environment of the server and its workers.
        account: User that it runs as; this process's own user where ``None``.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], account: WorkerUser | None = None) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._ready = False
        self._words: IO[bytes] = tempfile.TemporaryFile(prefix="onebox-")  # noqa: SIM115 (closed by close)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    list(COMMAND),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._words,
                    env=dict(environment),
                    **({} if account is None else account.options()),
                    start_new_session=True,  # Ctrl-C is for the client
                )
            except BaseException:
                self._channel.close()
                self._words.close()
                raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def channel(self) -> int:
        """A descriptor that is readable when it has sent a message, or has ended."""
        return self._channel.fileno()

    @property
    def ended(self) -> bool:
        """True when it has ended."""
        return self._process.poll() is not None

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until its imports are done; return whether they were in that time.

        Raises:
            Ended: It has ended instead.
            SpawnFailed: It sent something else.
        """
        with self._lock:
            return self._await_ready(time.monotonic() + timeout_s)

    def spawn_worker(self, stderr: IO[bytes], *, within_s: float = SPAWN_S) -> ForkedProcess:
        """Fork a worker.

        Args:
            stderr: File for the worker's standard error.
            within_s: Bound of the fork once the server is ready.

        Raises:
            Ended: The fork server has ended.
            SpawnFailed: It does not fork, or takes too long.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            (heard, stdin), (stdout, says), (status, tells) = (os.pipe() for _ in range(3))
            for end in (heard, says, tells):
                theirs.callback(os.close, end)
            for end in (stdin, stdout, status):
                ours.callback(os.close, end)
            with self._lock:
                if not self._await_ready(time.monotonic() + READY_S):
                    raise SpawnFailed(f"it is not ready after {READY_S:.0f} s{self._last_words()}")
                pid, descriptor = self._ask((heard, says, stderr.fileno(), tells), within_s)
            ours.pop_all()
        return ForkedProcess(pid, descriptor, open(stdin, "wb"), open(stdout, "rb", buffering=0), status)

    def close(self, *, grace_s: float = _END_S) -> None:
        """End it and its workers: wait a while for it to end by itself, then kill it. Idempotent."""
        with self._lock:
            self._channel.close()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._words.close()

    def disown(self) -> None:
        """Forget it in a fork of its client, which alone owns it."""
        self._channel.close()
        self._words.close()
        self._process.returncode = 0  # not a child of this process, which must not wait for it

    def _ask(self, descriptors: Sequence[int], within_s: float) -> tuple[int, int]:
        """Request a worker; return its process id and a pidfd."""
        self._number += 1
        birth = SpawnRequest(self._number, tuple(sorted(os.sched_getaffinity(0))))
        try:
            socket.send_fds(self._channel, [encode(birth)], descriptors)
        except OSError as error:
            raise ForkServerEnded(str(error)) from None
        end_s = time.monotonic() + within_s
        while True:
            answer, given = self._hear(end_s)
            if answer is None:
                raise SpawnFailed(f"no worker was forked within {within_s:g} s")
            if isinstance(answer, Spawned) and answer.number == self._number and len(given) == 1:
                return answer.process, given[0]
            for descriptor in given:  # the reply to a request that was interrupted
                os.close(descriptor)
            if isinstance(answer, SpawnRefused) and answer.number == self._number:
                raise SpawnFailed(answer.why)

    def _await_ready(self, end_s: float) -> bool:
        while not self._ready:
            answer, _ = self._hear(end_s)
            if answer is None:
                return False
            self._ready = isinstance(answer, ForkServerReady)
        return True

    def _hear(self, end_s: float) -> tuple[ForkServerReply | None, list[int]]:
        """Wait for its next message; ``None`` after the deadline."""
        if not _readable(self._channel.fileno(), max(0.0, end_s - time.monotonic())):
            return None, []
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._channel, LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            raise ForkServerEnded(f"it has ended{self._last_words()}")
        try:
            return decode_fork_reply(packet), descriptors
        except msgspec.DecodeError:
            raise SpawnFailed(f"it said {packet[:200]!r}") from None

    def _last_words(self) -> str:
        text = os.pread(self._words.fileno(), LONGEST, 0).decode(errors="replace").strip()
        return f"; its last words:\n{text}" if text else ""


def _readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


MOST = 4
"""The most environments with a fork server at the same time; workers of others are started from scratch."""

_LOG = logging.getLogger("onebox")


class ForkServers:
    """A set of fork servers, one for each environment, each started when the first worker of its kind is requested.

    A fork inherits the state of its server. After this process drops rights, enters another network namespace, or sets
    a variable that a library reads when it is loaded, its workers come from another fork server. The number of threads
    is such a variable: threads that a library starts use OpenMP's setting of that time, whatever PyTorch is set to
    later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[object, ForkServerProcess] = {}
        self._broken: set[object] = set()

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None = None
    ) -> ForkedProcess | None:
        """Start a worker, and first a fork server if there is none; see :class:`WorkerSpawner`."""
        key = (account, inheritance(environment))
        for _ in range(2):  # the fork server found may be about to end
            server = self._server(key, environment, account)
            if server is None:
                return None
            try:
                return server.spawn_worker(stderr)
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
        for server in found:
            server.close()

    def disown(self) -> None:
        """Forget all servers, in a fork of the process that owns them."""
        for server in self._found.values():
            server.disown()

    def _server(
        self, key: object, environment: Mapping[str, str], account: WorkerUser | None
    ) -> ForkServerProcess | None:
        with self._lock:
            for each, server in list(self._found.items()):
                if server.ended:
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
            server = self._found.pop(key, None)
        if server is not None:
            server.close()


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
        """Start a worker; see :class:`WorkerSpawner`."""
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


__all__ = [
    "OWN",
    "ForkServerEnded",
    "ForkServerProcess",
    "ForkServers",
    "ForkedProcess",
    "SpawnFailed",
    "WorkerSpawner",
    "inheritance",
]
