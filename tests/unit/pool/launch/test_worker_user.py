"""The users that workers run as."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebox.errors import PoolError, UsageError
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch import worker_user as module
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.worker_user import (
    LeaseUsers,
    RunningProcess,
    WorkerUser,
    check_user_ids,
    lease_users,
    running_process,
)
from onebox.wire import new_keys
from onebox.worker import WorkerConfig

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


IDS = range(60800, 60804)


@pytest.fixture
def other() -> pwd.struct_passwd:
    found = next((entry for entry in pwd.getpwall() if entry.pw_uid and entry.pw_gid), None)
    if found is None:
        pytest.skip("this machine has no user but root")
    return found


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LeaseUsers]:
    monkeypatch.setattr(module, "_LOCKS", tmp_path)
    made = LeaseUsers(IDS)
    yield made
    made.close()


def test_root_names_no_user_of_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert lease_users(None, IDS, allow_root=True) is None
    with pytest.raises(UsageError, match="--user root: that is root"):
        lease_users("root", IDS, allow_root=True)


def test_others_start_workers_of_their_own(monkeypatch: pytest.MonkeyPatch, other: pwd.struct_passwd) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: other.pw_uid)
    assert lease_users(None, IDS, allow_root=False) is None
    assert lease_users(other.pw_name, IDS, allow_root=False) is None
    with pytest.raises(UsageError, match="only root can start workers as another user"):
        lease_users("root", IDS, allow_root=False)


@pytest.mark.parametrize("name", ["no-such-user-here", "", "a\0b"])
def test_a_user_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="has no user"):
        lease_users(name, IDS, allow_root=False)


@as_root
def test_users_that_cannot_run_python_are_told_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_LOCKS", tmp_path)
    for python in (str(tmp_path / "python"), "/bin/false"):
        monkeypatch.setattr(sys, "executable", python)
        with pytest.raises(UsageError, match=r"60800.*cannot run.*--allow-root"):
            lease_users(None, IDS, allow_root=False)


@as_root
def test_leases_have_the_groups_of_the_user_that_is_named(
    monkeypatch: pytest.MonkeyPatch, other: pwd.struct_passwd, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_LOCKS", tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    found = lease_users(other.pw_name, IDS, allow_root=False)
    assert found is not None
    groups = tuple(os.getgrouplist(other.pw_name, other.pw_gid))
    assert found.take() == WorkerUser(60800, 60800, groups, other.pw_dir)
    found.close()


# ---- ids


def test_no_two_leases_have_an_id(users: LeaseUsers) -> None:
    taken = [users.take() for _ in IDS]
    assert [each.user for each in taken if each is not None] == list(IDS)
    assert users.take() is None
    assert taken[2] is not None and taken[0] is not None
    users.give_back(taken[2])
    users.give_back(taken[0])
    assert users.take() == taken[2], "the one that has been free for longest"
    assert users.take() == taken[0]


def test_no_two_agents_have_an_id(users: LeaseUsers) -> None:
    other = LeaseUsers(IDS)
    first, second = users.take(), other.take()
    assert first is not None and second is not None and (first.user, second.user) == (60800, 60801)
    users.close()  # as the system does when an agent ends
    found = other.take()
    assert found is not None and found.user == 60800
    other.close()


@as_root
def test_an_id_that_a_process_has_is_not_given(users: LeaseUsers) -> None:
    left = subprocess.Popen(["/bin/sleep", "60"], user=60800, cwd="/")
    try:
        found = users.take()
        assert found is not None and found.user == 60801
        assert running_process(left.pid) == RunningProcess(left.pid, os.getpid(), 60800)
    finally:
        left.kill()
        assert left.wait() < 0
    assert running_process(left.pid) is None


def test_an_id_that_was_given_back_too_early_waits_for_its_processes(
    users: LeaseUsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [RunningProcess(77, 1, 60801)]
    given = [users.take() for _ in IDS]
    for each in given[:2]:
        assert each is not None
        users.give_back(each)
    monkeypatch.setattr(module, "running_processes", lambda: running)
    assert (users.take(), users.take()) == (given[0], None)
    running.clear()
    assert users.take() == given[1]


def test_without_a_look_at_the_processes_no_id_is_given(users: LeaseUsers, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, "running_processes", exhausted)
    with pytest.raises(OSError, match="Too many"):
        users.take()


@pytest.mark.parametrize("name", ["subuid", "subgid"])
def test_ids_of_others_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# containers\nana:100000:65536\nbob:60803:1\nodd:line\n")
    check_user_ids(range(60800, 60803), tmp_path)
    with pytest.raises(UsageError, match="60803-60803 to bob"):
        check_user_ids(IDS, tmp_path)
    with pytest.raises(UsageError, match="100000-165535 to ana"):
        check_user_ids(range(165535, 165540), tmp_path)
    with pytest.raises(UsageError, match="the user id 0 is that of"):
        check_user_ids(range(0, 1), tmp_path)


@as_root
def test_a_worker_has_nothing_left_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    other = WorkerUser(60800, 60800, (60801,))
    what = '(grep -E "^([UG]id|Groups|CapEff)" /proc/self/status; pwd; echo "$HOME") | tr "\\n" ";"; echo'
    monkeypatch.setattr(WorkerProcess, "command", ("/bin/sh", "-c", what))
    keys = new_keys()
    config = WorkerConfig("cpu", 1, keys.public, keys.secret, keys.public)
    made = WorkerProcess(WorkerLocation(worker=0, host="lab", device="cpu"), config, other)
    try:
        with pytest.raises(PoolError, match="where its ports were expected") as refused:
            made.ports()
        said = str(refused.value).split("'")[1].replace(r"\t", " ").replace(r"\n", "").split(";")
    finally:
        made.close(grace_s=0.0)
    found: dict[str, Any] = {line.split(":")[0]: line.split(":")[1].split() for line in said if ":" in line}
    assert found["Uid"] == [str(other.user)] * 4 and found["Gid"] == [str(other.group)] * 4
    assert sorted(map(int, found["Groups"])) == sorted(set(other.groups))
    assert int(found["CapEff"][0], 16) == 0
    assert "/" in said and other.home in said
