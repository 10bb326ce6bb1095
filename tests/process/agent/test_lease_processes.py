"""Leases are kept apart, and nothing of them is left when they end, whatever their workers have started.

Where there are neither cgroups nor users, a zygote ends what a worker has left: see tests/process/test_zygote.py. What
a worker leaves is made here by programs that stand in for one, since a real one cannot start any.
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
from onebox.agent.cgroups import LeaseCgroup, LeaseCgroups
from onebox.agent.lease_processes import LeaseIsolation, LeaseZygotes
from onebox.agent.workers import LeaseClosed, LeasedWorker, LeaseEvent, LeaseReady, Workers
from onebox.pool.launch import worker_user
from onebox.pool.launch.worker_user import LeaseUsers, running_process
from onebox.wire import new_keys
from tests.kit.waiting import until

SHARE = Share(device="cpu", threads=1, memory_bytes=1 << 26)
WAIT_S = 60.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")

LEAVE = "(setsid sh -c 'echo $$ >&2; exec sleep 600' >/dev/null &)"
"""A process with a session of its own, whose parent has ended; its number goes to standard error."""


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers leave a process behind, and then wait for their end; no zygote forks them.

    As real ones, they first wait for their configuration.
    """
    monkeypatch.setattr(LeaseZygotes, "prepare", lambda *given: True)
    monkeypatch.setattr(LeasedWorker, "command", ("/bin/sh", "-c", f"read configuration; {LEAVE}; exec cat >/dev/null"))


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
    os.kill(left, signal.SIGKILL)
    until(lambda: running_process(left) is None)
    again = users.take()
    assert again is not None and again.user == 60810, "no process has it by now"


# ---- workers that a zygote forks


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a zygote however much memory other tests take."""
    monkeypatch.setattr("onebox.agent.lease_processes.SPARE_BYTES", 0)


def test_a_forked_worker_is_in_the_cgroup_of_its_lease_before_it_is_told_anything_and_its_zygote_is_not(
    cgroups: LeaseCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []
    limit = LeasedWorker.limit

    def place_of(process: int) -> str:
        return Path(f"/proc/{process}/cgroup").read_text().splitlines()[-1].rpartition("/")[2]

    def limited(self: LeasedWorker) -> None:
        before = place_of(self.pid)
        limit(self)
        places.append(place_of(self.pid))
        assert before != places[-1] and self.forked

    monkeypatch.setattr(LeasedWorker, "limit", limited)
    workers = started(LeaseIsolation(None, cgroups), 1, 2)
    found: list[LeaseReady] = []
    until(lambda: found.extend(each for each in turn(workers, 0.0) if isinstance(each, LeaseReady)) or len(found) == 2)
    assert places == ["lease-1", "lease-2"]
    processes = {ready.lease: ready.workers[0].process for ready in found}
    (zygote,) = {found.parent for each in processes.values() if (found := running_process(each))}
    assert not place_of(zygote).startswith("lease-")
    assert end(workers, 1) == LeaseClosed(1)
    assert running_process(processes[1]) is None and running_process(processes[2]) is not None
    assert running_process(zygote) is not None


@pytest.mark.usefixtures("leaves")
def test_a_worker_that_cannot_be_limited_is_told_nothing_and_ends(
    cgroups: LeaseCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def refuse(self: LeaseCgroup, process: int, descriptor: int) -> None:
        tried.append(process)
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(LeaseCgroup, "add", refuse)
    workers = Workers(host="lab", bind="127.0.0.1", advertise="127.0.0.1", isolation=LeaseIsolation(None, cgroups))
    why = workers.start(1, [SHARE], "ana", new_keys().public, 1.0, 0.0)
    assert why == "cpu on lab: no worker could be started: it cannot be limited: Permission denied"
    assert len(tried) == 1 and running_process(tried[0]) is None
    assert end(workers, 1) == LeaseClosed(1)
