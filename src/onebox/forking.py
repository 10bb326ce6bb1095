"""Fork servers: processes with one thread that fork others on request; zygotes, and those of a feed's stages.

A process that runs other threads cannot be forked safely: the fork has only the forking thread, and locks that others
held stay locked in it. So a fork server is started, by whatever means, before there are threads, or from scratch; it
runs :class:`ForkServer`, and the process that uses it has a :class:`ForkServerClient` at the other end of a private
socket. A request brings file descriptors for the fork, the last of them a pipe for its exit status; the reply brings a
process descriptor (``pidfd_open(2)``), so that nobody ever signals or awaits another process of the same number.

A fork server ends with its client: when the client closes its end of the socket, or ends in any way.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from onebox.reaping import KILLED_S, has_ended

LONGEST = 1 << 16
"""Longest message in bytes, mostly the core numbers of a big host."""

READY_S = 60.0
"""Bound of the time until a fork server accepts requests, such as for its imports."""

SPAWN_S = 20.0
"""Bound of a fork: usually a hundredth of a second, more on a loaded machine."""

_STATUS_S = 5.0
"""Bound of the time in which a fork server reports an exit status after the end of the process."""

_ORPHANS_S = 0.2
"""Bound of the time in which a fork server ends what one of its processes has left."""

_ORPHANS_POLL_S = 1e-3
_STATUS_BYTES = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


class SpawnFailed(Exception):
    """The fork server does not fork a process; carries the reason."""


class ForkServerEnded(Exception):
    """The fork server has ended."""


# ---- messages


class SpawnRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="spawn"):
    """Request for a process.

    Args:
        number: Number of the request, repeated in the reply.
        cores: Cores that it may use; empty for those of the fork server.
        user: Id of the user that it takes; ``None`` for that of the fork server.
        group: Id of its group, where it takes a user.
        groups: Ids of its further groups.
    """

    number: int
    cores: tuple[int, ...] = ()
    user: int | None = None
    group: int = 0
    groups: tuple[int, ...] = ()


class ForkServerReady(Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The fork server accepts requests."""


class Spawned(Struct, frozen=True, forbid_unknown_fields=True, tag="spawned"):
    """Reply: a process has been started, with this id; comes with its process descriptor."""

    number: int
    process: int


class SpawnRefused(Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """Reply: no process has been started, with the reason."""

    number: int
    why: str


ForkServerReply = ForkServerReady | Spawned | SpawnRefused

encode = msgspec.json.encode
_requests = msgspec.json.Decoder(SpawnRequest)
_replies = msgspec.json.Decoder(ForkServerReply)


def decode_fork_reply(packet: bytes) -> ForkServerReply:
    """Return the reply in a packet.

    Raises:
        msgspec.DecodeError: It contains no reply.
    """
    return _replies.decode(packet)


def pack_status(status: int) -> bytes:
    """Return an exit status as bytes; negative numbers are signals.

    Example:
        >>> read_status(pack_status(-9))
        -9
    """
    return status.to_bytes(_STATUS_BYTES, "little", signed=True)


def read_status(packed: bytes) -> int | None:
    """Return the status packed by :func:`pack_status`; ``None`` for empty input, which means that the fork server has
    ended.
    """
    return int.from_bytes(packed, "little", signed=True) if len(packed) == _STATUS_BYTES else None


# ---- the fork server


def fork() -> int:
    """Fork this process as ``os.fork`` does, with its standard streams flushed, and without Python's warning of
    threads.

    The child ignores Ctrl-C, SIGTERM and SIGHUP, which may be sent to all processes of a program and which this process
    handles; its own subprocesses do not inherit that for the latter two. It never collects objects from before the
    fork, so that none of them releases its resources.
    """
    flush_streams()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _begin_child()
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _begin_child() -> None:
    try:
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # unlike SIG_IGN not inherited by programs
        signal.set_wakeup_fd(-1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the child must not return into the parent's code


def flush_streams() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it has ended; see ``prctl(2)``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def set_dumpable(dumpable: bool) -> None:
    """Set whether other processes of this user may inspect and change this one, which takes a privilege otherwise; see
    ``PR_SET_DUMPABLE`` in ``prctl(2)`` and ``ptrace(2)``. A fork inherits it."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(dumpable), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of all processes that descend from this one and whose parents end, so that they can be found;
    see ``PR_SET_CHILD_SUBREAPER`` in ``prctl(2)``."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def _own_children() -> set[int]:
    """Return the ids of this process's children; none where the kernel does not list them."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", "rb") as found:
            return set(map(int, found.read().split()))
    except OSError:
        return set()


@dataclass(frozen=True)
class _Child:
    """A running process, and the pipe for its exit status."""

    process: int
    status: int


class ForkServer:
    """The fork server's loop: handles requests, forks processes, and reports their exit status.

    Args:
        channel: The socket to the client; each packet is a message.
        client: A descriptor of the client's process.
        descriptors: Number of descriptors that come with a request, with the pipe for the exit status.
        idle_s: Idle time without a process after which it ends; ``None`` for no end.
        users: Whether each process takes a user of its own, which is not root; none does otherwise.
    """

    def __init__(
        self,
        channel: socket.socket,
        client: int,
        descriptors: int,
        *,
        idle_s: float | None = None,
        users: bool = False,
    ) -> None:
        self._channel = channel
        self._client = client
        self._descriptors = descriptors
        self._users = users
        self._idle_s = idle_s
        self._children: dict[int, _Child] = {}  # by process descriptor
        self._poll = select.poll()
        for each in (channel.fileno(), client):
            self._poll.register(each, select.POLLIN)

    def serve(self) -> tuple[SpawnRequest, list[int]] | None:
        """Serve until the client has closed its end or has ended, or there has been no process for a while.

        Returns:
            In a forked process its request, and the descriptors that came with it, which it owns; ``None`` otherwise.
        """
        with contextlib.suppress(OSError):  # the client has ended, which the first read reports
            self._channel.send(encode(ForkServerReady()))
        while True:
            ready = self._poll.poll(None if self._children or self._idle_s is None else self._idle_s * 1000)
            if not ready:
                return None
            for descriptor, _ in ready:
                if descriptor == self._client:
                    return None
                if descriptor in self._children:
                    self._report_exit(descriptor)
                    continue
                packet, descriptors, _, _ = socket.recv_fds(
                    self._channel, LONGEST, self._descriptors + 1, socket.MSG_CMSG_CLOEXEC
                )
                if not packet:
                    return None
                request = self._spawn(packet, descriptors)
                if request is not None:
                    return request, descriptors[:-1]

    def outlast_children(self) -> None:
        """Report the ends of the processes, once the client has closed its end of the socket, until there is none or
        the client has ended."""
        self._poll.unregister(self._channel)
        while self._children:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._client:
                    return
                self._report_exit(descriptor)

    def kill_children(self) -> None:
        """Kill all processes, and wait for their end; one that does not end in time is left to the system."""
        for descriptor in self._children:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        end_s = time.monotonic() + KILLED_S
        for descriptor in list(self._children):
            if has_ended(descriptor, max(0.0, end_s - time.monotonic())):
                self._report_exit(descriptor)

    def _spawn(self, packet: bytes, descriptors: list[int]) -> SpawnRequest | None:
        """Handle a request; return it if this process is the fork."""
        try:
            request = _requests.decode(packet)
        except msgspec.DecodeError as error:
            _close(descriptors)
            self._reply(SpawnRefused(0, f"this is no request for a process: {error}"))
            return None
        why = self._obstacle(request, descriptors)
        process = -1
        if not why:
            try:
                process = fork()
            except OSError as error:
                why = f"fork: {error.strerror}"
        if why:
            _close(descriptors)
            self._reply(SpawnRefused(request.number, why))
            return None
        if not process:
            self._leave(request, descriptors[-1])
            return request
        descriptor = os.pidfd_open(process)
        self._children[descriptor] = _Child(process, descriptors[-1])
        self._poll.register(descriptor, select.POLLIN)
        _close(descriptors[:-1])
        self._reply(Spawned(request.number, process), descriptor)
        return None

    def _obstacle(self, request: SpawnRequest, descriptors: list[int]) -> str:
        """Return the reason that no process can be forked; empty if there is none."""
        if self._users != (request.user is not None) or request.user == 0:
            return f"{request.user} is no user for a process of this fork server"
        if len(descriptors) != self._descriptors:
            return f"{len(descriptors)} descriptors came with the request, which takes {self._descriptors}"
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            return f"a library has started threads, so that there are {threads}: a fork would have their locks"
        return ""

    def _leave(self, request: SpawnRequest, status: int) -> None:
        """Detach a fork from the fork server and its other processes."""
        os.close(status)
        for descriptor, child in self._children.items():
            _close([descriptor, child.status])
        self._channel.close()
        if request.cores:
            with contextlib.suppress(OSError):  # such as a core that has been disabled since
                os.sched_setaffinity(0, request.cores)

    def _report_exit(self, descriptor: int) -> None:
        """Report the exit status of a process that has ended, once nothing is left of what it has started."""
        child = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        _, status = os.waitpid(child.process, 0)
        self._end_orphans()
        with contextlib.suppress(OSError):  # the reader has gone
            os.write(child.status, pack_status(os.waitstatus_to_exitcode(status)))
        _close([descriptor, child.status])

    def _end_orphans(self) -> None:
        """Kill and reap the children of this process that it has not forked itself: it has adopted them from processes
        that have ended, if it does (:func:`adopt_orphans`). Those of other users are left to whoever may end them."""
        known = {child.process for child in self._children.values()}
        end_s = time.monotonic() + _ORPHANS_S
        while (orphans := _own_children() - known) and time.monotonic() < end_s:
            for orphan in orphans:
                with contextlib.suppress(PermissionError):
                    os.kill(orphan, signal.SIGKILL)  # its number stays its own until it is reaped here
                os.waitpid(orphan, os.WNOHANG)
            time.sleep(_ORPHANS_POLL_S)

    def _reply(self, reply: Spawned | SpawnRefused, *descriptors: int) -> None:
        with contextlib.suppress(OSError):  # the client has ended, which the next read reports
            socket.send_fds(self._channel, [encode(reply)], descriptors)


# ---- its client


class ForkedProcess:
    """A process that a fork server has forked.

    Args:
        pid: The process id.
        descriptor: A pidfd, which stays with the process even if its id is reused; the owner of this object closes it.
        status: Pipe on which the fork server sends the exit status; closed without data where the server has ended
            before.
    """

    def __init__(self, pid: int, descriptor: int, status: int) -> None:
        self.pid = pid
        self.descriptor = descriptor
        self._status = status
        self._found: int | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the process to end; reap it if it is a child of this process by now.

        Returns:
            The exit status, below 0 the number of a signal; ``None`` where it is unknown because the server has ended.

        Raises:
            subprocess.TimeoutExpired: It takes longer.
        """
        if self.descriptor < 0:  # closed: its owner has left it behind
            return self._found
        if not _readable(self.descriptor, timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._lock:
            if self.descriptor >= 0:
                with contextlib.suppress(ChildProcessError):  # else this process is an init, and has adopted it
                    os.waitid(os.P_PIDFD, self.descriptor, os.WEXITED | os.WNOHANG)
            if self._status >= 0:
                if _readable(self._status, _STATUS_S):
                    self._found = read_status(os.read(self._status, _STATUS_BYTES))
                os.close(self._status)
                self._status = -1
            return self._found

    def kill(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def release(self) -> tuple[int, int, int]:
        """Return the arguments of this object, which then owns no descriptors."""
        found = self.pid, self.descriptor, self._status
        self.descriptor = self._status = -1
        return found

    def close(self) -> None:
        """Close its descriptors, without waiting for its end. Idempotent."""
        with self._lock:
            if self._status >= 0:
                os.close(self._status)
                self._status = -1
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


class ForkServerClient:
    """The socket to a fork server. Thread-safe.

    Args:
        channel: This process's end; closed by :meth:`close`.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._number = 0
        self._ready = False

    @property
    def channel(self) -> int:
        """A descriptor that is readable when the fork server has sent a message, or has ended."""
        return self._channel.fileno()

    @property
    def ready(self) -> bool:
        """True once it has been found to accept requests."""
        return self._ready

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the fork server accepts requests; return whether it did in that time.

        Raises:
            ForkServerEnded: It has ended instead.
            SpawnFailed: It sent something else.
        """
        with self._lock:
            return self._await_ready(time.monotonic() + timeout_s)

    def spawn(
        self,
        descriptors: Sequence[int],
        *,
        cores: Sequence[int] = (),
        user: tuple[int, int, tuple[int, ...]] | None = None,
        within_s: float = SPAWN_S,
    ) -> ForkedProcess:
        """Fork a process.

        Args:
            descriptors: Descriptors for it, which stay open here.
            cores: Cores that it may use; empty for those of the fork server.
            user: Ids of the user, group and further groups that it takes; those of the fork server where ``None``.
            within_s: Bound of the fork once the server is ready.

        Raises:
            ForkServerEnded: The fork server has ended.
            SpawnFailed: It does not fork, or takes too long.
        """
        status, reported = os.pipe()
        try:
            with self._lock:
                if not self._await_ready(time.monotonic() + READY_S):
                    raise SpawnFailed(f"it is not ready after {READY_S:.0f} s{self.last_words()}")
                self._number += 1
                request = SpawnRequest(self._number, tuple(cores), *(user or ()))
                return ForkedProcess(*self._request(request, (*descriptors, reported), within_s), status)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(reported)

    def stop(self) -> None:
        """Let the fork server end, and threads that wait for it; without closing anything yet."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, once no thread waits for a reply. Idempotent."""
        with self._lock:
            self._channel.close()

    def last_words(self) -> str:
        """Return the output of a fork server that fails, for a message."""
        return ""

    def _request(self, request: SpawnRequest, descriptors: Sequence[int], within_s: float) -> tuple[int, int]:
        """Request a process; return its id and a pidfd."""
        try:
            socket.send_fds(self._channel, [encode(request)], descriptors)
        except OSError as error:
            raise ForkServerEnded(str(error)) from None
        end_s = time.monotonic() + within_s
        while True:
            reply, given = self._receive(end_s)
            if reply is None:
                raise SpawnFailed(f"nothing was forked within {within_s:g} s")
            if isinstance(reply, Spawned) and reply.number == request.number and len(given) == 1:
                return reply.process, given[0]
            _close(given)  # of the reply to a request that was interrupted
            if isinstance(reply, SpawnRefused) and reply.number == request.number:
                raise SpawnFailed(reply.why)

    def _await_ready(self, end_s: float) -> bool:
        while not self._ready:
            reply, _ = self._receive(end_s)
            if reply is None:
                return False
            self._ready = isinstance(reply, ForkServerReady)
        return True

    def _receive(self, end_s: float) -> tuple[ForkServerReply | None, list[int]]:
        """Wait for the next message; ``None`` after the deadline."""
        if self._channel.fileno() < 0:
            raise ForkServerEnded("it has been closed")
        if not _readable(self._channel.fileno(), max(0.0, end_s - time.monotonic())):
            return None, []
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._channel, LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            raise ForkServerEnded(f"it has ended{self.last_words()}")
        try:
            return decode_fork_reply(packet), descriptors
        except msgspec.DecodeError:
            _close(descriptors)
            raise SpawnFailed(f"it sent {packet[:200]!r}") from None


def _readable(descriptor: int, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
