"""Child processes that work on items, for work that holds the interpreter's lock.

**Forked, twice.** A stage's work is any callable over any data set, and nothing is pickled here: a child has to be a
copy of this process. But a copy that is made while other threads run has only the thread that made it, and locks that
others held stay locked in it. So this process forks once for each stage, before the pipeline's own threads start: that
child, the nursery, has one thread and runs nothing of the user's. Whenever another worker is wanted, also in the middle
of a run, the nursery forks it, which is safe as nobody else runs there.

What remains is that threads of others may run at the one fork: the transport of the pool, PyTorch's own. Python (from
3.12 on) warns of that; the warning is suppressed here, because of what a child keeps away from: it computes on one
thread (OpenMP's would not be there, and it would wait for them for ever); Python makes the locks of its own logging and
streams anew; sockets and pipes are replaced by ``/dev/null``, so that nothing can be said in the name of this process;
objects are never collected that were there before the fork, so that none of them ends what it owns; and it leaves by
``_exit``, which runs no handlers. CUDA cannot be used in a child; PyTorch says so.

**Ended, always.** The nursery ends its children and itself as soon as this process closes its end of their socket, or
ends, however it does: the nursery watches a descriptor of this process (``pidfd_open(2)``). Children are killed by the
kernel when the nursery ends (``PR_SET_PDEATHSIG``). Ctrl-C is this process's to handle: they ignore it.
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
"""How long the nursery may take to end its children, and itself."""

ANSWER_S = 60.0
"""How long the nursery may take for a fork, or to see a child off."""

_PR_SET_PDEATHSIG = 1
_STANDARD = 2  # the last descriptor of the standard streams


class WorkError(Exception):
    """What an exception in a child's work was.

    Args:
        said: What it said.
        kind: The name of its type; empty if the process itself ended.
    """

    def __init__(self, said: str, kind: str = "") -> None:
        super().__init__(said)
        self.kind = kind


class StageForkServer:
    """Forks children that do some work, whenever one is wanted.

    Args:
        work: What they do: makes a result of an item.
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
        """Fork a child; where that fails, it says so when it is first called."""
        return StageProcess(self)

    def stop(self) -> None:
        """Begin to end the children, whatever they are doing, and the nursery. Idempotent."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # which wakes who waits for an answer, too

    def close(self) -> None:
        """End the children, whatever they are doing, and the nursery, and wait for that. Idempotent."""
        self.stop()
        if self._closed:
            return
        self._closed = True
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        if not poll.poll(STOP_S * 1000):
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for any child
            os.waitpid(self._pid, 0)
        with self._lock:
            os.close(self._ended)
            self._control.close()

    def ask(self, question: bytes, link: socket.socket | None = None) -> bytes:
        """Tell the nursery to do something, and wait for its answer.

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
    """A child that works on one item at a time, when it is called with it. It ends when it is closed.

    Args:
        nursery: Where it comes from.

    Attributes:
        cpu_s: Time of a processor that its work took so far.
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
        """Return what the work makes of an item.

        Raises:
            WorkError: The work raised something, or the process has ended.
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
        """End the child, unless it is in the middle of an item: then it ends with the nursery."""
        self._link.close()


def _death(status: int) -> str:
    """Say how a process ended."""
    if status >= 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name
    likely = ", as the system does where memory runs out" if -status == signal.SIGKILL else ""
    return f"its process was killed by {name}{likely}"


def _raised(kind: str, said: str, trace: str, path: Any, sample: Any) -> Exception:
    """Return the exception that a child has told of."""
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
    """Fork with standard streams written out, and Ctrl-C held back until a child can ignore it."""
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
        os._exit(1)  # nothing may run on in the parent's place


def _flush() -> None:
    """Write out what is in the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _run_fork_server(control: socket.socket, parent: int, work: Callable[[Any], Any]) -> NoReturn:
    """Be the nursery: fork when told to, wait for children when told to, end with the parent."""
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
        status = 0  # the parent is gone: its children end with this process
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
    """Wait for the end of a child, which has closed its socket or was killed; return its exit status."""
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
    """Be a child: work on items until nobody sends any."""
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
    """Return what the parent is told of an exception."""
    path, sample = getattr(error, "path", None), getattr(error, "sample", None)
    return {
        "kind": type(error).__name__,
        "said": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "path": None if path is None else str(path),
        "sample": sample if isinstance(sample, int | str | None) else str(sample),
    }


def _silence(kept: int) -> None:
    """Put ``/dev/null`` in the place of every socket and pipe that came with the fork but one."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if descriptor > _STANDARD and descriptor != kept and what.startswith(("socket:", "pipe:")):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
