"""Whom workers run as."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path
from typing import Any

import pytest

from onebox.errors import PoolError, UsageError
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch import worker_user as module
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.worker_user import WorkerUser, find_user, worker_user
from onebox.wire import new_keys
from onebox.worker import WorkerConfig

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")


@pytest.fixture
def other() -> WorkerUser:
    found = next((entry for entry in pwd.getpwall() if entry.pw_uid and entry.pw_gid), None)
    if found is None:
        pytest.skip("this machine has no user but root")
    return find_user(found.pw_name)


def test_root_has_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UsageError, match=r"--user NAME.*--allow-root"):
        worker_user(None, allow_root=False)
    assert worker_user(None, allow_root=True) is None
    with pytest.raises(UsageError, match="--user root: that is root"):
        worker_user("root", allow_root=True)


def test_others_start_workers_of_their_own(monkeypatch: pytest.MonkeyPatch, other: WorkerUser) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: other.user)
    assert worker_user(None, allow_root=False) is None
    assert worker_user(other.name, allow_root=False) is None
    with pytest.raises(UsageError, match="only root can start workers as another user"):
        worker_user("root", allow_root=False)


@pytest.mark.parametrize("name", ["no-such-user-here", "", "a\0b"])
def test_a_user_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="has no user"):
        worker_user(name, allow_root=False)


@as_root
def test_a_user_that_cannot_run_python_is_told_beforehand(
    monkeypatch: pytest.MonkeyPatch, other: WorkerUser, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="cannot run"):
        worker_user(other.name, allow_root=False)
    monkeypatch.setattr(module, "_PROBE", "import sys; sys.exit(1)")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match="cannot run"):
        worker_user(other.name, allow_root=False)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert worker_user(other.name, allow_root=False) == other


@as_root
def test_a_worker_has_nothing_left_of_root(monkeypatch: pytest.MonkeyPatch, other: WorkerUser) -> None:
    what = '(grep -E "^([UG]id|Groups|CapEff)" /proc/self/status; pwd; echo "$HOME") | tr "\\n" ";"; echo'
    monkeypatch.setattr(WorkerProcess, "command", ("/bin/sh", "-c", what))
    keys = new_keys()
    config = WorkerConfig("cpu", 1, keys.public, keys.secret, keys.public)
    made = WorkerProcess(WorkerLocation(worker=0, host="lab", device="cpu"), config, other)
    try:
        with pytest.raises(PoolError, match="where its ports were expected"):
            made.ports()
        said = made._output.decode().strip().split(";")
    finally:
        made.close(grace_s=0.0)
    found: dict[str, Any] = {line.split(":")[0]: line.split(":")[1].split() for line in said if ":" in line}
    assert found["Uid"] == [str(other.user)] * 4 and found["Gid"] == [str(other.group)] * 4
    assert sorted(map(int, found["Groups"])) == sorted(set(other.groups))
    assert int(found["CapEff"][0], 16) == 0
    assert "/" in said and other.home in said
