"""Zygotes: processes that have imported what workers need, and fork workers on request.

Importing torch is most of the time of a worker's start. The server's side is in :mod:`onebox.worker.process.zygote`.
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
from collections.abc import Mapping
from pathlib import Path
from subprocess import SubprocessError
from typing import IO, Protocol

from onebox.forking import LONGEST, SPAWN_S, ForkedProcess, ForkServerClient, ForkServerEnded, SpawnFailed
from onebox.pool.launch.worker_user import WorkerUser
from onebox.reaping import end_process
from onebox.worker.process.config import STAYS, WITH_USERS

COMMAND = (sys.executable, "-P", "-m", "onebox.worker.process.zygote")
"""Command line; with -P nothing is imported from the current folder."""


class WorkerSpawner(Protocol):
    """Interface of zygotes that may provide a worker."""

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


class ZygoteProcess(ForkServerClient):
    """A zygote, with the environment and the rights that it was started with, which its workers have, too. Thread-safe.

    Its workers go on without it; once it has been stopped (:meth:`stop`), it ends with the last of them.

    Args:
        environment: Its environment.
        users: Whether each of its workers takes a user of its own, which only root can have it do.
        stays: Whether it stays while it has no workers; otherwise it ends after a minute.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], *, users: bool = False, stays: bool = False) -> None:
        options = [*([WITH_USERS] if users else []), *([STAYS] if stays else [])]
        with contextlib.ExitStack() as undo:
            self._words: IO[bytes] = undo.enter_context(tempfile.TemporaryFile(prefix="onebox-"))
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(channel.close)
            with theirs:
                super().__init__(channel)
                self._process = subprocess.Popen(
                    [*COMMAND, *options],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._words,
                    env=dict(environment),
                    cwd="/" if users else None,
                    start_new_session=True,  # Ctrl-C is for the client
                )
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True when it has ended."""
        return self._process.poll() is not None

    def fork_worker(
        self, stderr: IO[bytes], account: WorkerUser | None = None, *, within_s: float = SPAWN_S
    ) -> ForkedWorker:
        """Fork a worker.

        Args:
            stderr: File for the worker's standard error.
            account: User that it runs as, where each has one of its own.
            within_s: Bound of the fork once the zygote is ready.

        Raises:
            ForkServerEnded: The zygote has ended.
            SpawnFailed: It does not fork, or takes too long.
        """
        user = None if account is None else (account.user, account.group, account.groups)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            read, into = os.pipe()
            stdin = ours.enter_context(open(into, "wb"))  # files at once: whatever interrupts this closes them
            theirs.callback(os.close, read)
            outlet, written = os.pipe()
            stdout = ours.enter_context(open(outlet, "rb", buffering=0))
            theirs.callback(os.close, written)
            cores = sorted(os.sched_getaffinity(0))
            forked = self.spawn((read, written, stderr.fileno()), cores=cores, user=user, within_s=within_s)
            worker = ForkedWorker(forked, stdin, stdout)
            ours.pop_all()
        return worker

    def close(self) -> None:
        """Kill it: it has nothing to finish. Idempotent."""
        with self._lock:
            self._channel.close()
            end_process(self._process, "a zygote", grace_s=0.0)
            self._words.close()

    def disown(self) -> None:
        """Forget it in a fork of its client, which alone owns it."""
        self._channel.close()
        self._words.close()
        self._process.returncode = 0  # not a child of this process, which must not wait for it

    def last_words(self) -> str:
        """Return its standard error, for a message."""
        if self._words.closed:
            return ""
        text = os.pread(self._words.fileno(), LONGEST, 0).decode(errors="replace").strip()
        return f"; its last words:\n{text}" if text else ""


MOST = 4
"""The most environments with a zygote at the same time; workers of others are started from scratch."""

_LOG = logging.getLogger("onebox")


class Zygotes:
    """The zygotes of this process, one for each environment, each started when the first worker of its kind is
    requested.

    A fork inherits the state of its zygote. After this process drops rights, enters another network namespace, or sets
    a variable that a library reads when it is loaded, its workers come from another zygote. The number of threads
    is such a variable: threads that a library starts use OpenMP's setting of that time, whatever PyTorch is set to
    later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[object, ZygoteProcess] = {}
        self._broken: set[object] = set()
        self._foreign: list[ZygoteProcess] = []  # those of the parent process, which must not be collected

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None = None
    ) -> ForkedWorker | None:
        """Start a worker, and first a zygote if there is none; see :class:`WorkerSpawner`."""
        key = (account is not None, inheritance(environment))
        for _ in range(2):  # the zygote found may be about to end
            zygote = self._zygote(key, environment)
            if zygote is None:
                return None
            try:
                return zygote.fork_worker(stderr, account)
            except ForkServerEnded as error:
                why = f"{error}"
                self._forget(key)
            except SpawnFailed as error:
                why = f"{error}"
                break
        with self._lock:
            self._broken.add(key)
        _LOG.warning("workers are started one by one, which takes them a second longer: their zygote: %s", why)
        return None

    def expect(self, environment: Mapping[str, str]) -> None:
        """Start the zygote of workers that will be requested soon; its imports take their time meanwhile."""
        self._zygote((False, inheritance(environment)), environment)

    def close(self) -> None:
        """End all zygotes; their workers end with this process."""
        with self._lock:
            found, self._found = list(self._found.values()), {}
        for zygote in found:
            zygote.close()

    def leave(self) -> None:
        """Forget the zygotes of the parent process, in a fork of it, which gets its own."""
        for zygote in self._found.values():
            zygote.disown()
        self._foreign += self._found.values()
        self._lock, self._found, self._broken = threading.Lock(), {}, set()

    def _zygote(self, key: tuple[bool, object], environment: Mapping[str, str]) -> ZygoteProcess | None:
        with self._lock:
            for each, zygote in list(self._found.items()):
                if zygote.ended:
                    self._found.pop(each).close()
            if key in self._broken:
                return None
            if key not in self._found:
                if len(self._found) >= MOST:
                    return None
                try:
                    self._found[key] = ZygoteProcess(environment, users=key[0])
                except (OSError, SubprocessError):
                    return None  # a worker's own start will fail, too, and report why
            return self._found[key]

    def _forget(self, key: object) -> None:
        with self._lock:
            zygote = self._found.pop(key, None)
        if zygote is not None:
            zygote.close()


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


OWN = Zygotes()
"""The zygotes of this process."""

os.register_at_fork(after_in_child=OWN.leave)
atexit.register(OWN.close)  # before any pool registers its own end, which therefore runs first


__all__ = [
    "OWN",
    "ForkedWorker",
    "WorkerSpawner",
    "ZygoteProcess",
    "Zygotes",
    "inheritance",
    "worker_environment",
]
