"""Programs in Python that tests run as processes, by forks of one that has imported torch and what captures models.

To import these is most of the work of a short program. What is started here is a child of this process like any other,
with its own standard streams, folder, environment and signals, and runs what ``python FILE``, ``python -m MODULE`` or
``python -c TEXT`` would; a program that is to differ in what is read before the first import is started as usual.

A module or text that is run has a process of its own to fork as well, for the zygotes and single workers that it
starts. Those of tests themselves, of files and of the hosts of ``tests/net`` are started as a user's are.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_GIVEN = (
    *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell"),
    *("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals"),
    *("gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)
"""What ``subprocess.Popen`` gives to its step that starts the process."""

_SUBREAPER = 36  # of prctl(2)
_PREFIXES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH")
_THREADS = "OMP_NUM_THREADS"
"""What libraries are told of threads when they are loaded: there is a process to fork for each value of it."""
_SERVICES = ("onebox.worker", "onebox.worker.process.zygote")
"""What programs start by themselves."""
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
"""Variables that are read when a process starts, and what ``mallopt(3)`` calls them."""
_LONGEST = 1 << 17
_WAIT_S = 60.0


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` of a program in Python, without its imports."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # the one step of Popen that starts the process
        given = dict(zip(_GIVEN, rest, strict=True))
        line = [os.fspath(word) for word in args]
        environment = dict(os.environ if given["env"] is None else given["env"])
        if not _can(line, environment, given):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        wish = {
            "line": _words(line),
            "folder": os.path.abspath(given["cwd"] or "."),
            "environment": environment,
            "session": bool(given["start_new_session"]),
        }
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        ends = [number if stream < 0 else stream for number, stream in enumerate(streams)]
        self.pid = _STARTERS[environment.get(_THREADS)].fork(wish, ends)
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])  # type: ignore


def run(line: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end and return what it said; like ``subprocess.run`` with ``capture_output``."""
    with Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(line, process.returncode, said, errors)


def single() -> dict[str, str]:
    """Return the environment of a program whose libraries have one thread each, and its workers' likewise."""
    return {**os.environ, _THREADS: "1"}


def start() -> None:
    """Start the process that is forked for programs of one thread, where it does not run."""
    _STARTERS[single()[_THREADS]].start()


def _words(line: Sequence[str]) -> list[str]:
    """Return the words behind the interpreter, without ``-P``, which a module has no use for that is imported."""
    return list(line[2:] if line[1] == "-P" else line[1:])


def _can(line: Sequence[str], environment: Mapping[str, str], given: Mapping[str, Any]) -> bool:
    """Tell whether a fork does what a new process would."""
    if line[0] != sys.executable or any(given[name] is not None for name in ("uid", "gid", "gids")):
        return False
    words = _words(line)
    if _IN_PROGRAM:
        return words[0] == "-m" and words[1] in _SERVICES and _fits_services(environment)
    here = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)} - {_THREADS}
    early = any(name.startswith(_PREFIXES) or (name.startswith("PYTHON") and name != "PYTHONPATH") for name in here)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    own_start = any(Path(folder, "sitecustomize.py").exists() for folder in folders if folder)
    first = words[2] if words[0] == "-W" else words[0]
    return not early and not own_start and (first in ("-m", "-c") or first[0] == "/")


def _fits_services(environment: Mapping[str, str]) -> bool:
    """Tell whether what libraries read when they are loaded is for a service what it is for its program."""
    threads = environment.get(_THREADS)
    as_loaded = {_THREADS: threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1"}
    early = [name for name in {*environment, *os.environ} if name.startswith(_PREFIXES) and name not in _MALLOPT]
    return threads in _STARTERS and all(
        environment.get(name) == as_loaded.get(name, os.environ.get(name)) for name in early
    )


# ---- the process that is forked, as this one sees it


class _Starter:
    _lock = threading.Lock()  # of all: whether this process takes orphans is one flag

    def __init__(self, threads: str | None) -> None:
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def adopt(self, channel: socket.socket) -> None:
        """Take one that runs."""
        self._channel = channel
        channel.settimeout(_WAIT_S)

    def start(self) -> None:
        if self._channel is not None:
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_WAIT_S)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # whose threads start when it is loaded
        environment.pop(_THREADS, None)
        if self._threads is not None:
            environment[_THREADS] = self._threads
        line = [sys.executable, __file__]
        with theirs:
            self._process = subprocess.Popen(line, stdin=theirs.fileno(), env=environment, start_new_session=True)
        atexit.register(self.end)

    def end(self) -> None:
        assert self._process is not None and self._channel is not None
        self._channel.close()
        self._process.wait(_WAIT_S)

    def fork(self, wish: dict[str, Any], streams: Sequence[int]) -> int:
        """Start a program; it becomes a child of this process, since its parent ends and this one takes orphans."""
        with self._lock:
            self.start()
            assert self._channel is not None
            libc = ctypes.CDLL(None, use_errno=True)
            libc.prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._channel, [json.dumps(wish).encode()], streams)
                return int(self._channel.recv(_LONGEST))
            finally:
                libc.prctl(_SUBREAPER, 0, 0, 0, 0)


class _Starters(dict[str | None, _Starter]):
    """From a number of threads to what is forked for it."""

    def __missing__(self, threads: str | None) -> _Starter:
        return self.setdefault(threads, _Starter(threads))


_STARTERS = _Starters()
_IN_PROGRAM: list[str] = []
"""The module that this process runs, where it is a fork: then only services are forked from here."""


# ---- the process that is forked


def _main() -> None:

    import onebox.cli.commands.plan
    import onebox.cli.commands.serve
    import onebox.cli.commands.train  # noqa: F401

    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    parent = os.pidfd_open(os.getppid())
    assert len(os.listdir("/proc/self/task")) == 1, "what has threads is not forked"
    gc.collect()
    gc.freeze()
    program = _serve(channel, parent)
    if program is not None:
        program()


def _serve(channel: socket.socket, parent: int) -> Callable[[], None] | None:
    """Fork until the client has gone; return what to run in a fork."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        if any(descriptor == parent for descriptor, _ in poll.poll()):
            return None
        packet, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, 3)
        if not packet:
            return None
        heard, tells = os.pipe()
        between = os.fork()
        if not between:
            mine = os.getpid()
            process = os.fork()
            if process:
                os.write(tells, str(process).encode())
                os._exit(0)
            channel.close()
            while os.getppid() == mine:
                time.sleep(0.0005)
            for descriptor in (heard, tells, parent):
                os.close(descriptor)
            return _become(json.loads(packet), descriptors)
        os.waitpid(between, 0)  # from now on the program is a child of the client
        process = int(os.read(heard, _LONGEST))
        for descriptor in (heard, tells, *descriptors):
            os.close(descriptor)
        channel.send(str(process).encode())


def _become(wish: dict[str, Any], streams: Sequence[int]) -> Callable[[], None]:
    """Take a program's streams, folder and environment; return what runs it."""
    if wish["session"]:
        os.setsid()
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    os.chdir(wish["folder"])
    os.environ.clear()
    os.environ.update(wish["environment"])
    tempfile.tempdir = None
    first, *words = wish["line"]
    if first == "-W":
        sys.warnoptions[:], (first, *words) = words[:1], words[1:]
        warnings.simplefilter(sys.warnoptions[0])  # type: ignore[arg-type]
    paths = [path for path in wish["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    if first in ("-m", "-c"):
        text, *words = words
        sys.argv = ["-c" if first == "-c" else "-m", *words]
        here = [] if text in _SERVICES else ["" if first == "-c" else os.getcwd()]
        sys.path[:] = [*here, *paths, *(each for each in sys.path if each not in paths)]
    else:
        text = first
        sys.argv = [first, *words]
        folder = os.path.dirname(os.path.abspath(first))
        sys.path[:] = [folder, *paths, *(each for each in sys.path if each not in paths)]
    sys.excepthook = _without_ours
    if first == "-m" and text in _SERVICES:
        libc = ctypes.CDLL(None)
        for name, number in _MALLOPT.items():
            if name in os.environ:
                libc.mallopt(number, min(int(os.environ[name]), 0x7FFFFFFF))
    elif first in ("-m", "-c"):
        _IN_PROGRAM.append(text)
        serving = _fork_for_services()
        if serving is not None:
            return serving
    if first == "-m":
        return lambda: _leave(lambda: runpy.run_module(text, run_name="__main__", alter_sys=True))
    if first == "-c":
        main = sys.modules["__main__"].__dict__
        return lambda: _leave(lambda: exec(compile(text, "<string>", "exec"), {**main, "__name__": "__main__"}))
    return lambda: _leave(lambda: runpy.run_path(text, run_name="__main__"))


def _fork_for_services() -> Callable[[], None] | None:
    """Fork what the services of this program are forks of; return what runs there, and ``None`` in the program."""
    import onebox.pool.launch.worker_process
    import onebox.pool.launch.zygotes

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    me = os.pidfd_open(os.getpid())
    if os.fork():
        theirs.close()
        os.close(me)
        _STARTERS[os.environ.get(_THREADS)].adopt(ours)
        atexit.register(ours.close)
        names = {**vars(subprocess), "Popen": Popen}
        for module in (onebox.pool.launch.zygotes, onebox.pool.launch.worker_process):
            module.subprocess = types.SimpleNamespace(**names)  # type: ignore[attr-defined]
        return None
    ours.close()
    os.setsid()  # Ctrl-C is for the program
    with open(os.devnull, "r+b") as nothing:
        for standard in range(3):
            os.dup2(nothing.fileno(), standard)
    return _serve(theirs, me) or (lambda: os._exit(0))


def _leave(program: Callable[[], object]) -> None:
    gc.enable()
    program()


def _without_ours(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an error without the lines of this file and of what runs a file for it."""
    ours = (__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    with contextlib.suppress(BrokenPipeError):
        sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    _main()
