"""Fork servers of workers: processes that have imported what workers need, and fork on request.

Importing torch is most of the time of a worker's start. The server's side is in
:mod:`onebox.worker.process.fork_server`; it ends with its client, and a minute after its last worker. It imports all
itself, or is the fork of a process that has (:mod:`onebox.worker.process.zygote`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from typing import IO, Any, Protocol

import msgspec

from onebox.forking import LONGEST, SPAWN_S, ForkedProcess, ForkServerClient, ForkServerEnded, SpawnFailed
from onebox.pool.launch.worker_user import WorkerUser
from onebox.reaping import end_process, has_ended
from onebox.worker.process.config import WITH_USERS, ForkSettings

COMMAND = (sys.executable, "-P", "-m", "onebox.worker.process.fork_server")
ZYGOTE_COMMAND = (sys.executable, "-P", "-m", "onebox.worker.process.zygote")
"""Command lines; with -P nothing is imported from the current folder."""

ZYGOTE_FORK_S = 2.0
"""Bound of the fork of a fork server, of a hundredth of a second: an agent, which has a single thread, waits for it."""

_END_S = 2.0


class WorkerSpawner(Protocol):
    """Interface of fork servers that may provide a worker."""

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedWorker | None:
        """Start a worker whose standard error goes to ``stderr``; ``None`` where it has to be started from scratch."""


class ForkedWorker(ForkedProcess):
    """A forked worker; the counterpart of ``subprocess.Popen`` for one started from scratch.

    Args:
        forked: The process, which this object takes over.
        stdin: Its standard input.
        stdout: Its standard output.
    """

    def __init__(self, forked: ForkedProcess, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(*forked.release())
        self.stdin = stdin
        self.stdout = stdout


class _LaunchedServer(ForkServerClient):
    """A process that forks others, with a socket to this one and a file for its standard error. Thread-safe.

    Args:
        start: Starts it, with this end of the socket, its own end, and the file.

    Raises:
        OSError: It cannot be started.
    """

    _name = "a fork server of workers"

    def __init__(
        self, start: Callable[[socket.socket, socket.socket, IO[bytes]], subprocess.Popen[bytes] | ForkedProcess]
    ) -> None:
        self._asked = False
        with contextlib.ExitStack() as undo:
            self._words: IO[bytes] = undo.enter_context(tempfile.TemporaryFile(prefix="onebox-"))
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(channel.close)
            with theirs:
                super().__init__(channel)
                self._process = start(channel, theirs, self._words)
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def descriptor(self) -> int:
        """A process descriptor; -1 of a child of this process, whose id stays its own until its end is seen here."""
        return self._process.descriptor if isinstance(self._process, ForkedProcess) else -1

    @property
    def ended(self) -> bool:
        """True when it has ended."""
        if isinstance(self._process, ForkedProcess):
            return self._process.descriptor < 0 or has_ended(self._process.descriptor, 0.0)
        return self._process.poll() is not None

    def close(self, *, grace_s: float = _END_S) -> None:
        """End it and its workers: wait a while for it to end by itself, then kill it; at once if it has no workers, as
        it may still be busy with its imports. Idempotent.
        """
        with self._lock:
            self._channel.close()
            grace_s = grace_s if self._asked else 0.0
            end_process(self._process, self._name, grace_s=grace_s, descriptor=self.descriptor)
            if isinstance(self._process, ForkedProcess):
                self._process.close()
            self._words.close()

    def last_words(self) -> str:
        """Return its standard error, for a message."""
        if self._words.closed:
            return ""
        text = os.pread(self._words.fileno(), LONGEST, 0).decode(errors="replace").strip()
        return f"; its last words:\n{text}" if text else ""


def _start_program(
    command: Sequence[str],
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    theirs: socket.socket,
    words: IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start a program whose standard input is a socket."""
    return subprocess.Popen(
        list(command),
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=words,
        env=dict(environment),
        **options,
        start_new_session=True,  # Ctrl-C is for the client
    )


class ZygoteProcess(_LaunchedServer):
    """A process that has imported what workers need, and forks fork servers on request.

    Args:
        environment: Its environment, and that of all that descends from it.
        users: Whether each of its fork servers takes a user of its own, which only root can have it do.

    Raises:
        OSError: It cannot be started.
    """

    _name = "a zygote"

    def __init__(self, environment: Mapping[str, str], *, users: bool) -> None:
        command, options = (*ZYGOTE_COMMAND, WITH_USERS) if users else ZYGOTE_COMMAND, {"cwd": "/"} if users else {}
        super().__init__(lambda ours, theirs, words: _start_program(command, environment, options, theirs, words))

    def fork(
        self, account: WorkerUser | None, ours: socket.socket, theirs: socket.socket, words: IO[bytes]
    ) -> ForkedProcess:
        """Fork a fork server, as :class:`ForkServerProcess` asks for.

        Raises:
            ForkServerEnded: The zygote has ended.
            SpawnFailed: It does not fork, or takes too long.
        """
        user = ForkSettings() if account is None else ForkSettings(account.user, account.group, account.groups)
        ours.send(msgspec.json.encode(user))
        pid, descriptor, status = self.spawn((theirs.fileno(), words.fileno()), within_s=ZYGOTE_FORK_S).release()
        os.close(status)  # nobody asks for it, and so nobody waits for a zygote that would report it
        return ForkedProcess(pid, descriptor, -1)


class ForkServerProcess(_LaunchedServer):
    """A fork server of workers, with the environment and the rights that it was started with. Thread-safe.

    Args:
        environment: Environment of the server and its workers.
        account: User that it runs as; this process's own user where ``None``.
        zygote: Process with that environment that forks it; it imports what workers need itself where ``None``.

    Raises:
        OSError: It cannot be started.
        ForkServerEnded: The zygote has ended.
        SpawnFailed: The zygote does not fork, or takes too long.
    """

    def __init__(
        self, environment: Mapping[str, str], account: WorkerUser | None = None, zygote: ZygoteProcess | None = None
    ) -> None:
        options = {} if account is None else account.options()
        super().__init__(
            (lambda ours, theirs, words: _start_program(COMMAND, environment, options, theirs, words))
            if zygote is None
            else partial(zygote.fork, account)
        )

    def spawn_worker(self, stderr: IO[bytes], *, within_s: float = SPAWN_S) -> ForkedWorker:
        """Fork a worker.

        Args:
            stderr: File for the worker's standard error.
            within_s: Bound of the fork once the server is ready.

        Raises:
            ForkServerEnded: The fork server has ended.
            SpawnFailed: It does not fork, or takes too long.
        """
        self._asked = True
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            read, stdin = os.pipe()
            theirs.callback(os.close, read)
            ours.callback(os.close, stdin)
            stdout, written = os.pipe()
            theirs.callback(os.close, written)
            ours.callback(os.close, stdout)
            cores = sorted(os.sched_getaffinity(0))
            forked = self.spawn((read, written, stderr.fileno()), cores=cores, within_s=within_s)
            ours.pop_all()
        return ForkedWorker(forked, open(stdin, "wb"), open(stdout, "rb", buffering=0))

    def disown(self) -> None:
        """Forget it in a fork of its client, which alone owns it."""
        self._channel.close()
        self._words.close()
        if isinstance(self._process, subprocess.Popen):
            self._process.returncode = 0  # not a child of this process, which must not wait for it


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
        self._foreign: list[ForkServerProcess] = []  # those of the parent process, which must not be collected

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None = None
    ) -> ForkedWorker | None:
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

    def expect(self, environment: Mapping[str, str]) -> None:
        """Start the fork server of workers that will be requested soon; its imports take their time meanwhile."""
        self._server((None, inheritance(environment)), environment, None)

    def close(self) -> None:
        """End all servers, and with them their workers."""
        with self._lock:
            found, self._found = list(self._found.values()), {}
        for server in found:
            server.close()

    def leave(self) -> None:
        """Forget the servers of the parent process, in a fork of it, which gets its own."""
        for server in self._found.values():
            server.disown()
        self._foreign += self._found.values()
        self._lock, self._found, self._broken = threading.Lock(), {}, set()

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


_HANDED_ON = ("HOME", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
_FAMILIES = (
    "ATEN_",
    "CUDA",
    "DNNL_",
    "GOMP_",
    "KMP_",
    "LC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_",
)
"""Environment variables of a worker: those of the system, and the families of Python's and PyTorch's libraries."""


def worker_environment(threads: int, account: WorkerUser | None = None) -> dict[str, str]:
    """Return the environment of a worker: variables of libraries, its share of threads, allocator settings, and nothing
    else of this process's, which may hold secrets.

    Of the folders in ``PYTHONPATH`` a worker gets those by an absolute name: it may read all of them, and an empty or a
    relative one would be that in which this process was started.

    NumPy's BLAS gets one thread: it starts its threads when it is loaded, before the worker confines itself, and
    confinement applies to later threads only; workers use no NumPy operators. Without the last four variables, glibc
    returns every large buffer to the kernel and pays for its pages again in the next operator, or the next tensor that
    a thread receives.
    """
    source = Path(__file__).resolve().parents[3]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(source), *filter(os.path.isabs, given)])
    own = {} if account is None else {"HOME": account.home}
    return {
        **{name: value for name, value in os.environ.items() if name in _HANDED_ON or name.startswith(_FAMILIES)},
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "MALLOC_ARENA_MAX": "1",
        **own,
    }


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


OWN = ForkServers()
"""The fork servers of this process."""

os.register_at_fork(after_in_child=OWN.leave)
atexit.register(OWN.close)  # before any pool registers its own end, which therefore runs first


__all__ = [
    "OWN",
    "ForkServerProcess",
    "ForkServers",
    "ForkedWorker",
    "WorkerSpawner",
    "ZygoteProcess",
    "inheritance",
    "worker_environment",
]
