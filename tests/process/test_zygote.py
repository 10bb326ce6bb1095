"""Workers that are forked by a zygote: they are what workers that start from nothing are."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch
from torch import nn

import onebox
from onebox.errors import WorkerDied
from onebox.forking import ForkServerEnded
from onebox.pool import open_pool
from onebox.pool.backends import local as local_module
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch import zygotes as module
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.worker_user import WorkerUser, lease_users
from onebox.pool.launch.zygotes import ForkedWorker, ZygoteProcess, Zygotes, inheritance, worker_environment
from onebox.wire import new_keys
from onebox.worker import WorkerConfig
from tests.process.faults.scripts import Script, gone, happens, runs

WAIT_S = 60.0


@pytest.fixture(scope="module")
def own() -> Iterator[Zygotes]:
    """Zygotes of this module alone."""
    made = Zygotes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteProcess]:
    """A zygote whose workers are made one by one here."""
    made = ZygoteProcess(worker_environment(1))
    assert made.wait_ready(WAIT_S)
    yield made
    made.close()


@pytest.fixture
def words() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


def test_a_zygote_that_lacks_a_descriptor_for_its_socket_closes_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[IO[bytes]] = []
    plain = tempfile.TemporaryFile

    def opened(**options: Any) -> IO[bytes]:
        files.append(plain(**options))
        return files[-1]

    def refused(*kind: Any) -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module.tempfile, "TemporaryFile", opened)
    monkeypatch.setattr(module.socket, "socketpair", refused)
    with pytest.raises(OSError, match="open files"):
        ZygoteProcess(worker_environment(1))
    assert [file.closed for file in files] == [True]


@contextlib.contextmanager
def worker(spawner: Any, threads: int = 1, account: WorkerUser | None = None) -> Iterator[WorkerProcess]:
    """A worker whose sockets are bound."""
    keys = new_keys()
    config = WorkerConfig("cpu", threads, keys.public, keys.secret, keys.public, owner=os.getpid())
    made = WorkerProcess(WorkerLocation(worker=0, host="localhost", device="cpu"), config, account, spawner)
    try:
        made.ports()
        yield made
    finally:
        made.close(grace_s=WAIT_S)


def end(forked: ForkedWorker) -> int | None:
    """Let a worker end that was told nothing; return how it did."""
    forked.stdin.close()
    status = forked.wait(WAIT_S)
    forked.stdout.close()
    os.close(forked.descriptor)
    return status


# ---- what a worker is


def trained(threads: int) -> dict[str, torch.Tensor]:
    """Return the weights after a few steps, in which libraries divide their work by threads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 14 * 14, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with open_pool("cpu*2", threads=threads) as pool:
        assert isinstance(pool._handles[0], WorkerProcess)
        with onebox.Trainer(model, nn.functional.cross_entropy, optimizer, pool=pool) as trainer:
            for _ in range(3):
                trainer.step(torch.randn(16, 3, 16, 16), torch.randint(10, (16,)))
            trainer.pull()
    return dict(model.state_dict())


def test_it_computes_the_same_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = trained(threads=2)
    monkeypatch.setattr(local_module, "OWN", None)
    fresh = trained(threads=2)
    assert all(torch.equal(forked[name], fresh[name]) for name in fresh)


def test_it_is_a_child_of_the_zygote_in_a_session_of_its_own_with_nothing_open_of_others(own: Zygotes) -> None:
    with worker(own) as one, worker(own) as two:
        assert isinstance(one._process, ForkedWorker) and isinstance(two._process, ForkedWorker)
        first, second = psutil.Process(one.pid), psutil.Process(two.pid)
        assert first.parent() == second.parent() != psutil.Process()
        assert os.getsid(one.pid) == one.pid and os.getsid(two.pid) == two.pid
        assert first.name() == "onebox-worker"
        pipes = [{link for link in links(each) if link.startswith("pipe:")} for each in (one.pid, two.pid)]
        assert len(pipes[0]) >= 1 and not pipes[0] & pipes[1], "each has its own"
        parent = first.parent()
        assert parent is not None
        assert not set(links(one.pid)) & {link for link in links(parent.pid) if link.startswith("socket:")}
        assert sorted(os.sched_getaffinity(one.pid)) == sorted(os.sched_getaffinity(0))


def links(process: int) -> list[str]:
    return [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()]


def test_it_may_run_where_this_thread_may_when_it_is_born(zygote: ZygoteProcess, words: IO[bytes]) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        forked = zygote.fork_worker(words)
    finally:
        os.sched_setaffinity(0, before)
    assert happens(lambda: os.sched_getaffinity(forked.pid) == {min(before)}, WAIT_S)
    end(forked)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
def test_those_of_another_user_have_nothing_of_root(own: Zygotes) -> None:
    try:
        users = lease_users(None, range(60800, 60801), allow_root=False)
    except onebox.errors.UsageError as error:
        pytest.skip(str(error))
    assert users is not None
    account = users.take()
    users.close()
    assert account is not None
    with worker(own, account=account) as made:
        assert isinstance(made._process, ForkedWorker)
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{made.pid}/status").read_text().splitlines())
        assert status["Uid"].split() == [str(account.user)] * 4
        assert status["Gid"].split() == [str(account.group)] * 4
        assert int(status["CapEff"], 16) == 0


# ---- what a zygote is


def test_it_has_one_thread_and_has_asked_no_driver_for_anything(zygote: ZygoteProcess) -> None:
    assert len(os.listdir(f"/proc/{zygote.pid}/task")) == 1
    assert not [link for link in links(zygote.pid) if link.startswith("/dev/") and link != os.devnull]
    look = (
        "import onebox.worker.process.zygote, torch\n"
        "print(torch.cuda.is_initialized(), torch.get_num_interop_threads() > 0)"
    )
    said = subprocess.run([sys.executable, "-P", "-c", look], capture_output=True, text=True, timeout=240, check=True)
    assert said.stdout.split() == ["False", "True"]


def test_where_a_library_starts_threads_workers_are_started_from_nothing_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture, words: IO[bytes]
) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("NumPy's library starts no threads on one core")
    environment = {**worker_environment(1), "OPENBLAS_NUM_THREADS": "2"}
    made = Zygotes()
    with caplog.at_level(logging.WARNING, "onebox"):
        assert made.spawn_worker(environment, words) is None
        assert made.spawn_worker(environment, words) is None
    made.close()
    (record,) = caplog.records
    assert "started threads" in record.getMessage()


def test_a_zygote_that_cannot_import_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, words: IO[bytes]
) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-P", "-c", "raise ImportError('no torch here')"))
    made = Zygotes()
    with caplog.at_level(logging.WARNING, "onebox"), worker(made) as started:
        assert isinstance(started._process, subprocess.Popen), "it works all the same"
    made.close()
    assert "ImportError: no torch here" in caplog.text


def test_what_was_born_to_a_question_that_was_interrupted_ends_and_the_next_is_answered(
    zygote: ZygoteProcess, words: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = zygote._receive

    def interrupted(end_s: float) -> Any:
        monkeypatch.setattr(zygote, "_receive", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(zygote, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        zygote.fork_worker(words)
    forked = zygote.fork_worker(words)
    assert happens(lambda: psutil.Process(zygote.pid).children() == [psutil.Process(forked.pid)], WAIT_S)
    assert end(forked) == 1
    words.seek(0)
    assert words.read().count(b"no configuration on standard input") == 2


def test_several_threads_get_workers_of_their_own(own: Zygotes) -> None:
    found: list[int] = []

    def spawn_worker() -> None:
        with tempfile.TemporaryFile() as file:
            forked = own.spawn_worker(worker_environment(1), file)
            assert forked is not None
            found.append(forked.pid)
            assert end(forked) == 1

    threads = [threading.Thread(target=spawn_worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(set(found)) == 4


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV])
def test_the_end_of_a_killed_worker_is_reported(own: Zygotes, status: int) -> None:
    with worker(own) as made:
        os.kill(made.pid, -status)
        assert made.death().exit_status == status
        assert not runs(made.pid)


# ---- whose it is


def test_what_a_fork_would_inherit_makes_another(own: Zygotes, words: IO[bytes]) -> None:
    plain = worker_environment(1)
    assert inheritance(plain) == inheritance(dict(reversed(plain.items())))
    assert len({inheritance(each) for each in (plain, worker_environment(2), {**plain, "OMP_DYNAMIC": "1"})}) == 3
    mask = os.umask(0o77)
    try:
        assert inheritance(plain) != inheritance_with(mask, plain)
    finally:
        os.umask(mask)
    one, two = own.spawn_worker(plain, words), own.spawn_worker({**plain, "ATEN_CPU_CAPABILITY": "default"}, words)
    assert one is not None and two is not None
    assert psutil.Process(one.pid).parent() != psutil.Process(two.pid).parent()
    assert [end(each) for each in (one, two)] == [1, 1]


def inheritance_with(mask: int, environment: dict[str, str]) -> tuple[object, ...]:
    other = os.umask(mask)
    try:
        return inheritance(environment)
    finally:
        os.umask(other)


def test_more_environments_than_are_kept_get_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, words: IO[bytes]
) -> None:
    monkeypatch.setattr(module, "MOST", 0)
    assert Zygotes().spawn_worker(worker_environment(1), words) is None


def test_a_zygote_that_is_expected_is_the_one_that_forks(words: IO[bytes]) -> None:
    made = Zygotes()
    made.expect(worker_environment(1))
    (early,) = made._found.values()
    worker = made.spawn_worker(worker_environment(1), words)
    assert worker is not None and end(worker) == 1
    assert [*made._found.values()] == [early]
    made.close()


def test_a_zygote_without_workers_is_not_waited_for() -> None:
    """It may still be importing PyTorch, as where a command fails early."""
    made = Zygotes()
    made.expect(worker_environment(1))
    (server,) = made._found.values()
    made.close()
    assert server._process.returncode == -signal.SIGKILL


def test_a_zygote_that_has_ended_is_replaced(words: IO[bytes]) -> None:
    made = Zygotes()
    first = made.spawn_worker(worker_environment(1), words)
    assert first is not None
    assert end(first) == 1
    (zygote,) = made._found.values()
    os.kill(zygote.pid, signal.SIGKILL)
    second = made.spawn_worker(worker_environment(1), words)
    assert second is not None
    (other,) = made._found.values()
    assert other is not zygote and end(second) == 1
    made.close()
    assert not runs(other.pid)
    with pytest.raises(ForkServerEnded):
        other.fork_worker(words)


def test_workers_go_on_without_their_zygote_and_what_is_known_of_their_end_is_said() -> None:
    made = Zygotes()
    with worker(made) as started:
        (zygote,) = made._found.values()
        os.kill(zygote.pid, signal.SIGKILL)
        assert gone([zygote.pid], WAIT_S) and runs(started.pid)
        os.kill(started.pid, signal.SIGKILL)
        death = started.death()
        assert isinstance(death, WorkerDied) and death.exit_status is None
        assert "ended after its zygote" in str(death)
    made.close()


def test_a_zygote_that_is_to_fork_no_more_tells_how_its_workers_end_and_ends_with_the_last(words: IO[bytes]) -> None:
    made = ZygoteProcess(worker_environment(1), stays=True)
    one, two = made.fork_worker(words), made.fork_worker(words)
    made.stop()
    with pytest.raises(ForkServerEnded):
        made.fork_worker(words)
    assert end(one) == 1 and not made.ended
    os.kill(two.pid, signal.SIGKILL)
    assert end(two) == -signal.SIGKILL
    assert happens(lambda: made.ended, WAIT_S)
    made.close()


def test_a_worker_whose_owner_ends_before_it_has_told_it_anything_ends(tmp_path: Path) -> None:
    """Also where a fork of the owner holds its pipes open."""
    body = """
import tempfile
from onebox.pool.launch.zygotes import OWN, worker_environment
with tempfile.TemporaryFile() as words:
    forked = OWN.spawn_worker(worker_environment(1), words)
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("workers", forked.pid, flush=True)
    time.sleep(60)
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        script.signal(signal.SIGKILL)
        assert gone(script.workers, WAIT_S)
        script.signal(signal.SIGKILL, group=True)


LEAVING = """
import os, subprocess, sys
import onebox.worker.process.zygote as zygote

def leave(*given):
    subprocess.run(["sh", "-c", "(setsid sh -c 'echo $$ >&2; exec sleep 600' >/dev/null &)"])
    sys.stdin.read()
    os._exit(3)

zygote.serve_worker = leave
zygote.main(users=False, stays=True)
os._exit(0)
"""
"""A zygote each of whose workers leaves a process with a session of its own, whose parent has ended; its number goes to
standard error."""


def test_what_a_worker_leaves_is_ended_before_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch, words: IO[bytes]
) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-P", "-c", LEAVING))
    made = ZygoteProcess(worker_environment(1))
    forked, other = made.fork_worker(words), made.fork_worker(words)
    assert happens(lambda: os.pread(words.fileno(), 100, 0).count(b"\n") == 2, WAIT_S)
    left = [int(line) for line in os.pread(words.fileno(), 100, 0).split()]
    assert happens(lambda: all(psutil.Process(each).ppid() == made.pid for each in left), WAIT_S)
    assert end(forked) == 3
    assert not any(runs(each) for each in left) and runs(other.pid)
    assert end(other) == 3
    assert not psutil.Process(made.pid).children()
    made.close()


def test_a_stopped_zygote_of_a_killed_process_ends_and_so_do_its_workers(tmp_path: Path) -> None:
    body = """
import psutil
with open_pool("cpu*1", threads=1) as pool:
    (zygote,) = psutil.Process().children()
    print("workers", *pool.process_ids, zygote.pid, flush=True)
    time.sleep(60)
"""
    with Script(tmp_path, body) as script:
        script.wait_until_ready()
        for process in reversed(script.workers):
            os.kill(process, signal.SIGSTOP)
        script.signal(signal.SIGKILL)
        assert gone(script.workers, WAIT_S)


def test_a_fork_of_a_client_has_its_own(tmp_path: Path) -> None:
    body = """
import psutil
from onebox.wire.protocol.instructions import Ask
def zygotes():
    return {psutil.Process(process).parent() for process in pool.process_ids}
with open_pool("cpu*2", threads=1) as pool:
    mine = zygotes()
    child = os.fork()
    if child == 0:
        pool = open_pool("cpu*1", threads=1)
        print(len(mine), mine & zygotes(), flush=True)
        pool.close()
        sys.exit(0)  # runs what is registered with atexit
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(len(pool.post(1, [Ask("memory")], answer=True).result(30).results))
"""
    with Script(tmp_path, body) as script:
        assert script.end(60.0) == (0, "1 set()\n0\n1\n", "")
