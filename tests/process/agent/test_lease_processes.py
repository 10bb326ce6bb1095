"""Leases are kept apart, and nothing of them is left when they end, whatever their workers have started.

What a worker leaves is made here by programs that stand in for one, since a real one cannot start any.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebox.agent import workers as module
from onebox.agent.admission import Share
from onebox.agent.cgroups import LeaseCgroups
from onebox.agent.lease_processes import KEPT_S, LeaseIsolation
from onebox.agent.workers import LeaseClosed, LeasedWorker, LeaseEvent, LeaseNotStarted, LeaseReady, Workers
from onebox.pool.launch import worker_user
from onebox.pool.launch.worker_user import LeaseUsers, running_process, running_processes
from onebox.pool.launch.zygotes import Zygotes
from onebox.wire import new_keys
from onebox.worker.sandbox import seccomp
from tests.kit.waiting import until

SHARE = Share(device="cpu", threads=1, memory_bytes=1 << 26)
WAIT_S = 60.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")

LEAVE = "(setsid sh -c 'echo $$ >&2; exec sleep 600' >/dev/null &)"
"""A process with a session of its own, whose parent has ended; its number goes to standard error."""

PATCH = f"""
import subprocess, sys
if {{"onebox.worker.process.fork_server", "onebox.worker.process.zygote"}} & {{*sys.orig_argv}}:
    import onebox.worker.process.main as worker
    worker.main = lambda *given: subprocess.run(["sh", "-c", {LEAVE!r}])
"""


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers leave a process behind, and then wait for their end; they are started without a fork server.

    As real ones, they first take a moment, in which their lease's cgroup takes them in.
    """

    def fail(*given: Any) -> None:
        raise OSError

    monkeypatch.setattr("onebox.agent.lease_processes.ForkServerProcess", fail)
    monkeypatch.setattr(Zygotes, "find", lambda *given: None)
    monkeypatch.setattr(LeasedWorker, "command", ("/bin/sh", "-c", f"sleep 0.3; {LEAVE}; exec cat >/dev/null"))


@pytest.fixture(autouse=True)
def _ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No workers outlive a test."""
    begin, made = Workers.__init__, []

    def note(self: Workers, **given: Any) -> None:
        begin(self, **given)
        made.append(self)

    monkeypatch.setattr(Workers, "__init__", note)
    yield
    for workers in made:
        workers.close()


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LeaseUsers]:
    monkeypatch.setattr(worker_user, "_LOCKS", tmp_path)
    made = LeaseUsers(range(60810, 60812))
    yield made
    made.close()


@pytest.fixture
def cgroups() -> Iterator[LeaseCgroups]:
    made = LeaseCgroups()
    if made.state.startswith("off"):
        pytest.skip(made.state)
    yield made
    made.close()


def folder_of(cgroups: LeaseCgroups) -> Path:
    assert cgroups.folder is not None
    return cgroups.folder


def started(isolation: LeaseIsolation, *leases: int) -> Workers:
    workers = Workers(host="lab", bind="127.0.0.1", advertise="127.0.0.1", isolation=isolation)
    for lease in leases:
        assert workers.start(lease, [SHARE], "ana", new_keys().public, 1.0, 0.0) is None
    return workers


def left_by(workers: Workers, lease: int) -> int:
    """Return the process that the worker of a lease has left."""
    (worker,) = workers._crews[lease].workers
    left = int(until(worker.last_words))
    found = until(lambda: running_process(left))
    assert found.parent != worker.pid and os.getsid(left) == left != os.getsid(worker.pid)
    return left


def turn(workers: Workers, now_s: float) -> list[LeaseEvent]:
    """Process what has happened by now."""
    poll = select.poll()
    for descriptor in workers.descriptors():
        poll.register(descriptor, select.POLLIN)
    return workers.attend({descriptor for descriptor, _ in poll.poll(10)}, now_s)


def end(workers: Workers, lease: int) -> LeaseClosed:
    workers.end(lease, 0.0, 1.0)
    found: LeaseClosed = until(
        lambda: next((news for news in turn(workers, 2.0) if isinstance(news, LeaseClosed)), None)
    )
    return found


@as_root
@pytest.mark.usefixtures("leaves")
def test_each_lease_has_a_user_and_nothing_of_it_is_left(users: LeaseUsers) -> None:
    isolation = LeaseIsolation(users)
    workers = started(isolation, 1, 2)
    left = [left_by(workers, lease) for lease in (1, 2)]
    found = [running_process(process) for process in left]
    assert [each.user for each in found if each is not None] == [60810, 60811]
    assert "user ids of leases are taken: 60810-60811" in str(
        workers.start(3, [SHARE], "ana", new_keys().public, 1.0, 0.0)
    )
    assert end(workers, 3) == LeaseClosed(3)
    assert end(workers, 1) == LeaseClosed(1)
    assert running_process(left[0]) is None and running_process(left[1]) is not None
    assert workers.start(3, [SHARE], "ana", new_keys().public, 1.0, 0.0) is None, "its user is free again"
    third = left_by(workers, 3)
    workers.close()
    assert running_process(left[1]) is None and running_process(third) is None


@pytest.mark.feature("Agents: Keep each lease apart by user and cgroup")
@pytest.mark.usefixtures("leaves")
def test_each_lease_has_a_cgroup_and_nothing_of_it_is_left(cgroups: LeaseCgroups) -> None:
    workers = started(LeaseIsolation(None, cgroups), 1, 2)
    left = [left_by(workers, lease) for lease in (1, 2)]
    places = [Path(f"/proc/{process}/cgroup").read_text().splitlines()[-1] for process in left]
    assert [place.rpartition("/")[2] for place in places] == ["lease-1", "lease-2"]
    folders = [folder_of(cgroups) / f"lease-{lease}" for lease in (1, 2)]
    assert str(left[0]) in (folders[0] / "cgroup.procs").read_text().split()
    assert end(workers, 1) == LeaseClosed(1)
    assert running_process(left[0]) is None and running_process(left[1]) is not None
    assert [folder.exists() for folder in folders] == [False, True]
    workers.close()
    assert running_process(left[1]) is None
    assert not folders[1].exists()


def killed_by_the_kernel(cgroups: LeaseCgroups) -> None:
    """Skip where cgroups have no ``cgroup.kill``."""
    probe = folder_of(cgroups) / "lease-0"
    probe.mkdir()
    there = (probe / "cgroup.kill").exists()
    probe.rmdir()
    if not there:
        pytest.skip("this kernel ends no cgroups: it is older than 5.14")


@pytest.mark.usefixtures("leaves")
def test_the_end_of_a_lease_is_that_of_its_cgroup(cgroups: LeaseCgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel's cgroups: nothing else kills what a worker has left here."""
    killed_by_the_kernel(cgroups)
    monkeypatch.setattr("onebox.agent.lease_processes._kill", lambda found: None)
    workers = started(LeaseIsolation(None, cgroups), 1, 2)
    left = [left_by(workers, lease) for lease in (1, 2)]
    assert end(workers, 1) == LeaseClosed(1)
    assert running_process(left[0]) is None and running_process(left[1]) is not None
    workers.close()
    assert running_process(left[1]) is None


def test_what_is_frozen_or_forks_ends_with_its_cgroup(cgroups: LeaseCgroups) -> None:
    """Each process is in the cgroup of its parent from its first instruction, and leaves it by no session or parent."""
    killed_by_the_kernel(cgroups)
    group = cgroups.make(1, [SHARE])
    assert group is not None
    forks = "read go; for each in 1 2 3; do setsid sh -c 'sleep 600 & sleep 600' & done; sleep 600"
    with subprocess.Popen(["sh", "-c", forks], stdin=subprocess.PIPE, start_new_session=True) as first:
        try:
            group.add(first.pid)
            assert first.stdin is not None
            first.stdin.write(b"go\n")
            first.stdin.flush()
            until(lambda: len(group.processes()) >= 8)
            processes = group.processes()
            folder = folder_of(cgroups) / "lease-1"
            (folder / "cgroup.freeze").write_text("1")
            until(lambda: "frozen 1" in (folder / "cgroup.events").read_text())
            assert not group.remove()
        finally:
            group.kill()
        assert first.wait(WAIT_S) == -signal.SIGKILL
    until(group.remove)
    assert [process for process in processes if running_process(process)] == []


@pytest.mark.usefixtures("leaves")
def test_what_an_agent_left_that_was_killed_is_ended_by_the_next(cgroups: LeaseCgroups) -> None:
    workers = started(LeaseIsolation(None, cgroups), 1)
    left = left_by(workers, 1)
    gone = folder_of(cgroups).with_name("onebox-4194304-0")  # no process has this number: pid_max is at most 2^22
    gone.mkdir()
    (gone / "lease-5").mkdir()
    (gone / "lease-5" / "cgroup.procs").write_text(str(left))
    LeaseCgroups().close()
    until(lambda: running_process(left) is None)
    LeaseCgroups().close()
    assert not gone.exists()
    workers.close()


def test_orphans_are_children_of_their_leases_fork_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    workers = started(LeaseIsolation(), 1)
    crew = workers._crews[1]
    until(lambda: workers.attend(set(), 0.0) is not None and crew.workers)
    left = int(until(crew.workers[0].last_words))
    until(lambda: (found := running_process(left)) and found.parent == crew.fork_server.pid)
    until(lambda: any(isinstance(news, LeaseNotStarted) for news in workers.attend(set(workers.descriptors()), 0.0)))
    assert end(workers, 1) == LeaseClosed(1)
    assert running_process(left) is None


@as_root
@pytest.mark.usefixtures("leaves")
def test_a_user_whose_processes_do_not_end_is_given_to_no_other_lease(
    users: LeaseUsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebox.agent.lease_processes._kill", lambda found: None)  # as in a call of a driver
    workers = started(LeaseIsolation(users), 1)
    left = left_by(workers, 1)
    workers.end(1, 0.0, 1.0)
    until(lambda: running_process(workers._crews[1].workers[0].pid) is None)
    assert workers.attend(set(workers.descriptors()), 1.0) == []
    assert workers.attend(set(), 1.0 + module.LEAVE_S - 0.1) == []
    assert workers.attend(set(), 1.0 + module.LEAVE_S) == [LeaseClosed(1, (left,))]
    found = users.take()
    assert found is not None and found.user == 60811 and users.take() is None
    os.kill(left, 9)
    assert until(users.take).user == 60810, "it has ended"


# ---- fork servers that are kept


def ready(workers: Workers, lease: int) -> int:
    """Wait until the single worker of a lease is ready; return its process id."""
    until(lambda: any(isinstance(news, LeaseReady) for news in turn(workers, 0.0)))
    (worker,) = workers._crews[lease].workers
    return worker.pid


def parent_of(process: int) -> int:
    found = running_process(process)
    assert found is not None
    return found.parent


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers are kept however much memory other tests take."""
    monkeypatch.setattr("onebox.agent.lease_processes.SPARE_BYTES", 0)


needs_filter = pytest.mark.skipif(not seccomp.supported(), reason="none is kept without a filter of system calls")


@needs_filter
def test_leases_of_one_client_share_a_fork_server_and_those_of_others_have_their_own() -> None:
    workers = started(LeaseIsolation(), 1)
    first = ready(workers, 1)
    server = parent_of(first)
    assert end(workers, 1) == LeaseClosed(1, (), server)
    assert running_process(first) is None
    assert [each for each in running_processes() if each.parent == server] == []

    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, 0.0) is None
    other = parent_of(ready(workers, 2))
    assert workers.start(3, [SHARE], "ana", new_keys().public, 1.0, 0.0) is None
    assert parent_of(ready(workers, 3)) == server != other

    assert end(workers, 3).kept == server
    workers.attend(set(), 2.0 + KEPT_S)
    assert running_process(server) is None and running_process(other) is not None
    assert end(workers, 2).kept == other
    workers.close()
    assert running_process(other) is None


@needs_filter
def test_a_kept_fork_server_that_is_killed_is_replaced() -> None:
    workers = started(LeaseIsolation(), 1)
    server = parent_of(ready(workers, 1))
    assert end(workers, 1).kept == server
    os.kill(server, signal.SIGKILL)
    until(lambda: running_process(server) is None)
    assert turn(workers, 3.0) == []
    assert workers.start(2, [SHARE], "ana", new_keys().public, 1.0, 0.0) is None
    assert parent_of(ready(workers, 2)) != server
    assert [each.process for each in workers.ended_fork_servers()] == [server]


@needs_filter
def test_a_kept_fork_server_is_in_the_cgroup_of_the_lease_that_it_forks_for(cgroups: LeaseCgroups) -> None:
    workers = started(LeaseIsolation(None, cgroups), 1)
    first = ready(workers, 1)
    server = parent_of(first)

    def places(*processes: int) -> set[str]:
        found = (Path(f"/proc/{process}/cgroup").read_text().splitlines()[-1] for process in processes)
        return {place.rpartition("/")[2] for place in found}

    assert places(first, server) == {"lease-1"}
    assert end(workers, 1).kept == server
    assert places(server) == {"kept"} and not (folder_of(cgroups) / "lease-1").exists()
    assert workers.start(2, [SHARE], "ana", new_keys().public, 1.0, 0.0) is None
    assert places(ready(workers, 2), server) == {"lease-2"}
    assert end(workers, 2).kept == server
    folder = folder_of(cgroups)
    workers.close()
    assert running_process(server) is None
    cgroups.close()
    assert not folder.exists()
