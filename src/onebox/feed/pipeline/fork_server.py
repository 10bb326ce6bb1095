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
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from onebox import errors
from onebox.errors import DataError, OneboxError
from onebox.feed.pipeline.ipc import receive, send

STOP_S = 5.0
"""Bound of the time in which the fork server ends its children and itself."""

ANSWER_S = 60.0
"""Bound of the fork server's time for a fork, or for the end of a child."""

_PR_SET_PDEATHSIG = 1
_STANDARD = 2  # the last descriptor of the standard streams


class WorkError(Exception):
    """An exception in a child's work.

    Args:
        said: Its message.
        kind: The name of its type; empty if the process itself ended.
    """

    def __init__(self, said: str, kind: str = "") -> None:
        super().__init__(said)
        self.kind = kind


class StageForkServer:
    """Fork server of a stage's child processes.

    Args:
        work: Their work: a function from an item to a result.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._lock = threading.Lock()
        self._stopped = self._closed = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_S)
        with theirs:
            me = os.pidfd_open(os.getpid())
            try:
                self._pid = _fork()
                if self._pid == 0:
                    _run_fork_server(theirs, me, work)
            finally:
                os.close(me)
        self._ended = os.pidfd_open(self._pid)

    def child(self) -> StageProcess:
        """Fork a child; a failure is reported by its first call."""
        return StageProcess(self)

    def stop(self) -> None:
        """Begin to end the children, busy or not, and the fork server. Idempotent."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # also wakes a thread that waits for an answer

    def close(self) -> None:
        """End the children, busy or not, and the fork server, and wait for that. Idempotent."""
        self.stop()
        if self._closed:
            return
        self._closed = True
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        if not poll.poll(STOP_S * 1000):
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # other code has waited for any child
            os.waitpid(self._pid, 0)
        with self._lock:
            os.close(self._ended)
            self._control.close()

    def ask(self, question: bytes, link: socket.socket | None = None) -> bytes:
        """Send the fork server a request, and wait for its answer.

        Raises:
            WorkError: It has ended, or does not answer.
        """
        with self._lock:
            if self._stopped:
                raise WorkError("the feed has ended")
            try:
                socket.send_fds(self._control, [question], [] if link is None else [link.fileno()])
                answer = self._control.recv(64)
            except ConnectionError:
                answer = b""
            except OSError as error:
                raise WorkError(f"no process can be had: {error}") from error
        if not answer:
            raise WorkError("the process that forks its processes has ended, and they with it")
        return answer


class StageProcess:
    """A child process that works on one item at a time, when it is called. It ends when it is closed.

    Args:
        nursery: Its fork server.

    Attributes:
        cpu_s: Processor time of its work so far.
    """

    def __init__(self, nursery: StageForkServer) -> None:
        self._nursery = nursery
        self.cpu_s = 0.0
        self._number = -1
        self._failed: WorkError | None = None
        self._link, theirs = socket.socketpair()
        with theirs:
            try:
                self._number = int(nursery.ask(b"fork", theirs))
            except WorkError as error:
                self._failed = error

    def __call__(self, item: Any) -> Any:
        """Return the work's result for an item.

        Raises:
            WorkError: The work raised an exception, or the process has ended.
            OneboxError: The work raised it, or the item cannot be sent.
        """
        if self._failed is not None:
            raise self._failed
        try:
            send(self._link, item)
            done, value, cpu_s = receive(self._link)
        except (EOFError, ConnectionError):
            raise WorkError(_death(int(self._nursery.ask(b"reap %d" % self._number)))) from None
        self.cpu_s += cpu_s
        if done:
            return value
        raise _raised(**value)

    def close(self) -> None:
        """End the child, unless it is busy: then it ends with the fork server."""
        self._link.close()


def _death(status: int) -> str:
    """Describe the end of a process."""
    if status >= 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name
    likely = ", as the system does where memory runs out" if -status == signal.SIGKILL else ""
    return f"its process was killed by {name}{likely}"


def _raised(kind: str, said: str, trace: str, path: Any, sample: Any) -> Exception:
    """Return the exception that a child has reported."""
    known = getattr(errors, kind, None)
    error: Exception
    if known is DataError:
        error = DataError(said, path=path, sample=sample)
    elif isinstance(known, type) and issubclass(known, OneboxError):
        error = known(said)
    else:
        error = WorkError(said, kind)
    error.add_note(f"In its process:\n{trace}")
    return error


# ---- in the children


def _fork() -> int:
    """Fork with standard streams flushed, and Ctrl-C blocked until a child can ignore it."""
    _flush()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _become_a_child()
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _become_a_child() -> None:
    try:
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the child must not return into the parent's code


def _flush() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _run_fork_server(control: socket.socket, parent: int, work: Callable[[Any], Any]) -> NoReturn:
    """Run the fork server: fork on request, wait for children on request, end with the parent."""
    status = 1
    try:
        torch.set_num_threads(1)
        _silence(control.fileno())
        children: list[int] = []
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(parent, select.POLLIN)
        while all(descriptor != parent for descriptor, _ in poll.poll()):
            question, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if not question:
                break
            if question == b"fork":
                with socket.socket(fileno=descriptors[0]) as link:
                    children.append(_fork_child(control, link, work))
                control.send(b"%d" % (len(children) - 1))
            else:
                control.send(b"%d" % _reap(children, int(question.split()[1])))
        for pid in filter(None, children):
            os.kill(pid, signal.SIGKILL)
        for number in range(len(children)):
            _reap(children, number)
        status = 0
    except BrokenPipeError:
        status = 0  # the parent has ended: its children end with this process
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _fork_child(control: socket.socket, link: socket.socket, work: Callable[[Any], Any]) -> int:
    nursery = os.getpid()
    pid = _fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != nursery:
            os._exit(1)
        control.close()
        _run_stage_process(link, work)
    return pid


def _reap(children: list[int], number: int) -> int:
    """Wait for the end of a child that has closed its socket or was killed; return its exit status."""
    pid, children[number] = children[number], 0
    if not pid:
        return 0
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    if not poll.poll(STOP_S / 2 * 1000):  # it has closed its socket by itself, and lives on
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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
                send(link, (False, _told(error), time.process_time() - begin_s))
            del item
            _flush()
    except (EOFError, BrokenPipeError):
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _told(error: BaseException) -> dict[str, Any]:
    """Return the report of an exception for the parent."""
    path, sample = getattr(error, "path", None), getattr(error, "sample", None)
    return {
        "kind": type(error).__name__,
        "said": str(error),
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
