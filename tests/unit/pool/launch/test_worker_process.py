"""How a worker's process is started: with nothing in its command line or environment that others may read or plant."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from onebox.errors import PoolError, WorkerDied
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch import worker_process as module
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.wire import new_keys
from onebox.worker import Ports, WorkerConfig
from tests.kit import leaks

PLACE = WorkerLocation(worker=3, host="localhost", device="cpu")


class Started:
    """Stands in for the process that would be started."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.options = command, options
        self.stderr = os.dup(options["stderr"].fileno())
        self.pid = os.getpid()
        heard, self.stdin = os.pipe()
        self.heard = os.fdopen(heard, "rb")
        self.stdin = os.fdopen(self.stdin, "wb")  # type: ignore[assignment]
        stdout, self.says = os.pipe()
        self.stdout = os.fdopen(stdout, "rb")
        self.status: int | None = 0
        self.killed = False

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None and not self.killed:
            raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
        return -9 if self.killed else self.status or 0

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def config() -> WorkerConfig:
    keys = new_keys()
    return WorkerConfig("cpu", 3, keys.public, keys.secret, keys.public)


@contextlib.contextmanager
def started_worker(config: WorkerConfig) -> Iterator[tuple[WorkerProcess, Any]]:
    """Give a worker, and what stands in for its process."""
    processes: list[Any] = []

    def start(command: list[str], **options: Any) -> Started:
        processes.append(Started(command, **options))
        return processes[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", start)
        made = WorkerProcess(PLACE, config)
    (started,) = processes
    yield made, started
    made.close(grace_s=0.0)
    made.close(grace_s=0.0)
    started.heard.close()
    os.close(started.says)
    os.close(started.stderr)


@pytest.fixture
def worker(config: WorkerConfig) -> Iterator[tuple[WorkerProcess, Any]]:
    with started_worker(config) as made:
        yield made


def test_keys_go_through_a_pipe_and_nowhere_else(worker: tuple[WorkerProcess, Any], config: WorkerConfig) -> None:
    _, started = worker
    line = started.heard.readline()
    assert msgspec.json.decode(line, type=WorkerConfig) == config
    seen = " ".join([*started.command, *started.options["env"], *started.options["env"].values()])
    assert config.secret not in seen


def test_secrets_of_its_parent_stay_there(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "HF_TOKEN", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "x")
    with started_worker(config) as (_, started):
        environment = started.options["env"]
    assert {"NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"} < environment.keys()
    assert not {"AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "HF_TOKEN"} & environment.keys()


def test_nothing_is_imported_from_the_current_folder(worker: tuple[WorkerProcess, Any]) -> None:
    """Somebody else may have put a ``numpy.py`` there."""
    _, started = worker
    assert started.command[0] == sys.executable
    assert started.command[1:] == ["-P", "-m", "onebox.worker"]


def test_it_is_not_hit_by_ctrl_c_and_has_its_share_of_threads(worker: tuple[WorkerProcess, Any]) -> None:
    _, started = worker
    assert started.options["start_new_session"] is True
    assert started.options["env"]["OMP_NUM_THREADS"] == "3"
    assert not started.options.get("shell")


def test_ports_are_read_also_in_pieces(worker: tuple[WorkerProcess, Any]) -> None:
    made, started = worker
    os.write(started.says, b'{"commands": "ipc:///a", "heartbe')
    os.write(started.says, b'ats": "ipc:///b"}\n')
    assert made.ports() == Ports("ipc:///a", "ipc:///b")


@pytest.mark.parametrize("line", [b"hello\n", b"{}\n", b'{"commands": 1, "heartbeats": 2}\n', b"\xff\n"])
def test_something_else_than_ports(worker: tuple[WorkerProcess, Any], line: bytes) -> None:
    made, started = worker
    os.write(started.says, line)
    with pytest.raises(PoolError, match="where its ports were expected"):
        made.ports()


def test_a_worker_that_is_slow_to_start(worker: tuple[WorkerProcess, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.05)
    made, _ = worker
    with pytest.raises(PoolError, match=r"worker 3 .*did not start within"):
        made.ports()


@pytest.mark.parametrize(
    ("status", "how"), [(1, "exit status 1"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (None, "exit status None")]
)
def test_a_worker_that_ends_says_how_and_its_last_words(
    worker: tuple[WorkerProcess, Any], status: int | None, how: str
) -> None:
    made, started = worker
    started.status = status
    os.write(started.stderr, b"x" * 10_000 + b"\nImportError: no module \xff\n")
    started.stdout.close()
    started.stdout = open(os.devnull, "rb")  # noqa: SIM115 (closed by close)
    with pytest.raises(WorkerDied, match=how) as caught:
        made.ports()
    assert caught.value.exit_status == status
    assert caught.value.last_words.endswith("ImportError: no module \N{REPLACEMENT CHARACTER}")
    assert len(caught.value.last_words) <= 4000
    assert (caught.value.worker, caught.value.device) == (3, "cpu")


def test_a_worker_that_does_not_end_is_killed(worker: tuple[WorkerProcess, Any]) -> None:
    made, started = worker
    started.status = None
    made.close(grace_s=0.0)
    assert started.killed
    assert started.stdin.closed, "which ends it, too"


def test_what_a_worker_says_in_parts_is_put_together_without_a_wait(worker: tuple[WorkerProcess, Any]) -> None:
    made, started = worker
    os.write(started.says, b'{"commands": "tcp://')
    assert made.read_ports() is None
    os.write(started.says, b'1:2", "heartbeats": "tcp://1:3"}\n')
    assert made.read_ports() == Ports("tcp://1:2", "tcp://1:3")
    os.close(started.says)
    with pytest.raises(EOFError):
        made.read_ports()
    started.says = os.open(os.devnull, os.O_WRONLY)


def test_a_worker_that_never_ends_its_line_is_not_read_for_ever(worker: tuple[WorkerProcess, Any]) -> None:
    made, started = worker
    os.write(started.says, b"x" * 5000)
    with pytest.raises(PoolError, match="where its ports were expected"):
        made.read_ports()


def test_the_last_words_of_a_process_that_floods_its_standard_error_are_kept(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = "import os, sys\nfor _ in range(1500): os.write(2, b'UserWarning\\n' * 100)\nsys.exit('the end')"
    monkeypatch.setattr(WorkerProcess, "command", (sys.executable, "-S", "-c", flood))
    worker = WorkerProcess(PLACE, config)
    try:
        with pytest.raises(WorkerDied) as caught:
            worker.ports()
        assert caught.value.last_words.endswith("the end") and caught.value.exit_status == 1
    finally:
        worker.close(grace_s=1.0)


def test_without_a_descriptor_of_the_process_nothing_is_left(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent whose descriptors a stranger has used up refuses a lease, and loses no further ones."""

    def refuse(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(WorkerProcess, "command", ("/bin/sleep", "600"))
    with leaks.nothing_left():
        monkeypatch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            WorkerProcess(PLACE, config)
        monkeypatch.undo()
