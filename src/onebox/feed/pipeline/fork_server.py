"""Child processes that work on items, for work that holds the interpreter's lock.

**Forked, twice.** A stage's work is any callable over any data set, and nothing is pickled here: a child has to be a
copy of this process. But a copy that is made while other threads run has only the forking thread, and locks that others
held stay locked in it. So this process forks once for each stage, before the pipeline's own threads start: that child,
the fork server, has one thread and runs no user code. Whenever another worker is needed, also in the middle of a run,
the fork server forks it, which is safe as it has no other threads.

Other threads may still run at the first fork: those of the pool's transport and of PyTorch. Python (from 3.12 on) warns
of that; the warning is suppressed here, because a child avoids the dangers: it computes on one thread (it would wait
for ever for OpenMP's threads, which do not exist in it); Python makes the locks of its own logging and streams anew;
sockets and pipes are replaced by ``/dev/null``, so that the child cannot write to this process's connections; objects
from before the fork are never collected, so that none of them releases its resources; and it ends by ``_exit``, which
runs no handlers. CUDA cannot be used in a child; PyTorch raises an error.

**Ended, always.** The fork server ends its children and itself as soon as this process closes its end of their socket,
or ends in any way: the server monitors a pidfd of this process (``pidfd_open(2)``). Children are killed by the kernel
when the server ends (``PR_SET_PDEATHSIG``). They ignore Ctrl-C, which this process handles.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from onebox import errors
from onebox.errors import DataError, OneboxError
from onebox.feed.pipeline.ipc import receive, send
from onebox.forking import (
    ForkedProcess,
    ForkServer,
    ForkServerClient,
    ForkServerEnded,
    SpawnFailed,
    flush_streams,
    fork,
    signal_at_end_of_parent,
)
from onebox.reaping import KILLED_S, end_process, has_ended

STOP_S = 5.0
"""Bound of the time in which the fork server ends its children and itself."""

REPLY_S = 60.0
"""Bound of the fork server's time for a fork."""

_SERVER_ENDED = "the process that forks its processes has ended, and they with it"
_DESCRIPTORS = 2  # the socket of a child, and the pipe for its exit status
_STANDARD = 2  # the last descriptor of the standard streams


class WorkError(Exception):
    """An exception in a child's work.

    Args:
        message: Its message.
        kind: The name of its type; empty if the process itself ended.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class StageForkServer:
    """Fork server of a stage's child processes.

    Args:
        work: Their work: a function from an item to a result.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._stopped = self._closed = False
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._client = ForkServerClient(control)
        with theirs:
            me = os.pidfd_open(os.getpid())
            try:
                self._pid = fork()
                if self._pid == 0:
                    _run_fork_server(theirs, me, work)
            finally:
                os.close(me)
        self._ended = os.pidfd_open(self._pid)

    def child(self) -> StageProcess:
        """Fork a child; a failure is reported by its first call."""
        return StageProcess(self)

    def fork(self, link: socket.socket) -> ForkedProcess:
        """Fork a process that works on the items from a socket.

        Raises:
            WorkError: The fork server has ended, or does not reply.
        """
        if self._stopped:
            raise WorkError("the feed has ended")
        try:
            return self._client.spawn((link.fileno(),), within_s=REPLY_S)
        except ForkServerEnded:
            raise WorkError(_SERVER_ENDED) from None
        except (SpawnFailed, OSError) as error:
            raise WorkError(f"no process can be had: {error}") from error

    def stop(self) -> None:
        """Begin to end the children, busy or not, and the fork server. Idempotent."""
        self._stopped = True
        self._client.stop()  # also wakes a thread that waits for a reply

    def close(self) -> None:
        """End the children, busy or not, and the fork server, and wait for that. Idempotent."""
        self.stop()
        if self._closed:
            return
        self._closed = True
        end_process(self, "a fork server of the feed", grace_s=STOP_S, descriptor=self._ended)
        os.close(self._ended)
        self._client.close()

    # ---- the interface of processes that are waited for (WaitableProcess)

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the fork server, and reap it.

        Raises:
            subprocess.TimeoutExpired: It takes longer.
        """
        if timeout and not has_ended(self._ended, timeout):
            raise subprocess.TimeoutExpired(f"process {self._pid}", timeout)
        with contextlib.suppress(ChildProcessError):  # other code has waited for any child
            if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                raise subprocess.TimeoutExpired(f"process {self._pid}", timeout or 0.0)
        return None

    def kill(self) -> None:
        """Kill the fork server, and with it its children."""
        signal.pidfd_send_signal(self._ended, signal.SIGKILL)


class StageProcess:
    """A child process that works on one item at a time. It ends when it is closed.

    Args:
        server: Its fork server.

    Attributes:
        cpu_s: Processor time of its work so far.
    """

    def __init__(self, server: StageForkServer) -> None:
        self.cpu_s = 0.0
        self._process: ForkedProcess | None = None
        self._failed: WorkError | None = None
        self._link, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = server.fork(theirs)
            except WorkError as error:
                self._failed = error

    def begin(self, item: Any) -> Callable[[], Any]:
        """Send an item; the work on it begins when the child has finished those before.

        Returns:
            Function that waits for the work's result and returns it; to be called once, in the order of the items. It
            raises a WorkError where the work raised an exception or the process has ended, or the work's OneboxError.

        Raises:
            WorkError: The process has ended.
            UsageError: The item cannot be sent.
        """
        if self._process is None:
            raise self._failed or WorkError(_SERVER_ENDED)
        try:
            send(self._link, item)
        except ConnectionError:
            raise WorkError(_death(self._process)) from None
        return self._result

    def _result(self) -> Any:
        assert self._process is not None
        try:
            done, value, cpu_s = receive(self._link)
        except (EOFError, ConnectionError):
            raise WorkError(_death(self._process)) from None
        self.cpu_s += cpu_s
        if done:
            return value
        raise _decoded_error(**value)

    def close(self) -> None:
        """End the child, unless it is busy: then it ends with the fork server."""
        self._link.close()
        if self._process is not None:
            self._process.close()


def _death(process: ForkedProcess) -> str:
    """Describe the end of a process that has closed its socket or was killed."""
    try:
        status = process.wait(STOP_S / 2)
    except subprocess.TimeoutExpired:  # it has closed its socket by itself, and lives on
        process.kill()
        try:
            status = process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            return "its process was killed, and does not end"
    if status is None:
        return _SERVER_ENDED
    if status >= 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name
    likely = ", as the system does where memory runs out" if -status == signal.SIGKILL else ""
    return f"its process was killed by {name}{likely}"


def _decoded_error(kind: str, message: str, trace: str, path: Any, sample: Any) -> Exception:
    """Return the exception that a child has reported."""
    known = getattr(errors, kind, None)
    error: Exception
    if known is DataError:
        error = DataError(message, path=path, sample=sample)
    elif isinstance(known, type) and issubclass(known, OneboxError):
        error = known(message)
    else:
        error = WorkError(message, kind)
    error.add_note(f"In its process:\n{trace}")
    return error


# ---- in the children


def _run_fork_server(control: socket.socket, parent: int, work: Callable[[Any], Any]) -> NoReturn:
    """Run the fork server: end with the parent, and end all children before."""
    status = 1
    try:
        torch.set_num_threads(1)
        _silence(control.fileno())
        me = os.getpid()
        server = ForkServer(control, parent, _DESCRIPTORS)
        given = server.serve()
        if given is not None:
            signal_at_end_of_parent(signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            _, (link_descriptor,) = given
            with socket.socket(fileno=link_descriptor) as link:
                _run_stage_process(link, work)
        server.kill_children()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run_stage_process(link: socket.socket, work: Callable[[Any], Any]) -> NoReturn:
    """Run a child: work on items until its socket is closed."""
    status = 1
    try:
        while True:
            item = receive(link)
            begin_s = time.process_time()
            try:
                made = work(item)
                send(link, (True, made, time.process_time() - begin_s))
                del made
            except BaseException as error:
                send(link, (False, _encoded_error(error), time.process_time() - begin_s))
            del item
            flush_streams()
    except (EOFError, BrokenPipeError):
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _encoded_error(error: BaseException) -> dict[str, Any]:
    """Return the report of an exception for the parent."""
    path, sample = getattr(error, "path", None), getattr(error, "sample", None)
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "path": None if path is None else str(path),
        "sample": sample if isinstance(sample, int | str | None) else str(sample),
    }


def _silence(kept: int) -> None:
    """Replace every inherited socket and pipe but one by ``/dev/null``."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if descriptor > _STANDARD and descriptor != kept and what.startswith(("socket:", "pipe:")):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
