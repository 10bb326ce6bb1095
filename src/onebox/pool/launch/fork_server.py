"""A nursery as its client sees it: a process that has imported what workers need, and forks them when they are wanted.

To import torch is nearly all of what it takes to start a worker. What the nursery does is in
:mod:`onebox.worker.process.fork_server`; it ends with its client, and a minute after its last worker.
"""

from __future__ import annotations

import contextlib
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
"""What is run; with -P nothing is imported from the current folder."""

READY_S = 60.0
"""How long a nursery may take until it has imported all; then workers are started without it."""

SPAWN_S = 20.0
"""How long it may take to fork a worker: a hundredth of a second, and more on a loaded machine."""

_STATUS_S = 2.0
_END_S = 2.0


class SpawnFailed(Exception):
    """A nursery forks no worker; why."""


class ForkServerEnded(Exception):
    """A nursery has ended."""


class WorkerSpawner(Protocol):
    """Who may have a worker at hand that need not be started from nothing."""

    def spawn_worker(
        self, environment: Mapping[str, str], stderr: IO[bytes], account: WorkerUser | None
    ) -> ForkedProcess | None:
        """Start a worker that writes its last words there; ``None`` where it has to be started otherwise."""


class ForkedProcess:
    """A worker that a nursery has forked; what ``subprocess.Popen`` is for one that was started from nothing.

    Args:
        pid: The process.
        descriptor: Of that process, whichever other may get its number later; the owner of this object closes it.
        stdin: What it reads.
        stdout: What it says.
        status: Where the nursery says how it ended; closed without a word where the nursery has ended before.
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
        """Wait for the end.

        Returns:
            The exit status, below 0 the number of a signal; ``None`` where nobody is left who knows.

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
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)


class ForkServerProcess:
    """A nursery, with the environment and the rights that it was started with. Its methods may be called by any thread.

    Args:
        environment: Of it and of its workers.
        account: Whom it runs as; this process's own user where ``None``.

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
        """A descriptor that is readable when it has something to say, or has ended."""
        return self._channel.fileno()

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it has imported all; return whether it has in that time.

        Raises:
            Ended: It has ended instead.
            SpawnFailed: It said something else.
        """
        with self._lock:
            return self._await_ready(time.monotonic() + timeout_s)

    def spawn_worker(self, stderr: IO[bytes], *, within_s: float = SPAWN_S) -> ForkedProcess:
        """Fork a worker.

        Args:
            stderr: Where it writes its last words.
            within_s: How long the nursery may take for it once it is ready.

        Raises:
            Ended: The nursery has ended.
            SpawnFailed: It does not, or takes too long.
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
        """End it, and with it its workers: wait for its own end for a while, then kill it. Idempotent."""
        with self._lock:
            self._channel.close()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._words.close()

    def disown(self) -> None:
        """Let go of it in a fork of its client: it is the client's."""
        self._channel.close()
        self._words.close()
        self._process.returncode = 0  # it is no child of this process, which is not to look for it

    def _ask(self, descriptors: Sequence[int], within_s: float) -> tuple[int, int]:
        """Wish for a worker; return its process, and a descriptor of that."""
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
            for descriptor in given:  # the answer to a question that was interrupted
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
        """Wait for what it says, until a time; ``None`` where that passes first."""
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


__all__ = ["ForkServerEnded", "ForkServerProcess", "ForkedProcess", "SpawnFailed", "WorkerSpawner"]
