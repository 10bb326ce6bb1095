"""An agent that root runs: real workers, each lease with a user of its own, as far as ``onebox serve`` goes alone."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import onebox
from onebox.errors import OneboxError
from onebox.pool.keys.keyring import KnownAgent, allow_client, identity, remember_agent
from onebox.pool.launch.worker_user import running_processes
from onebox.worker.sandbox import seccomp
from tests.kit import warm
from tests.kit.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")

WAIT_S = 120.0
IDS = range(60820, 60824)

LET_IN = """
set -e
kept=$(mktemp -d)
mount --bind "$1" "$kept"
mount -t tmpfs -o mode=755 none "$2"
mkdir -p "$1"
mount --move "$kept" "$1"
rmdir "$kept"
shift 2
exec "$@"
"""
"""Runs a program where a folder of root's (the second argument) lets everybody into another below it (the first)."""


def readable_by_all(command: list[str]) -> list[str]:
    """Return a command line for a program of Python's that other users find Python for, wherever it is."""
    base = Path(sys.base_prefix).resolve()
    closed = next((folder for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001), None)
    if closed is None:
        return command
    return ["unshare", "--mount", "sh", "-c", LET_IN, "sh", str(base), str(closed), *command]


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, Path, Path]]:
    """Start an agent; its address, its journal, and the folder of its paired client's keys: beside it is another
    client's."""
    owner, client, journal = folder / "owner", folder / "client", folder / "journal"
    with pytest.MonkeyPatch.context() as patch:
        for name, keys in (("ana@desk", client), ("bob@desk", client.with_name("bob"))):
            patch.setenv("ONEBOX_CONFIG", str(keys))
            key = identity("client").public
            patch.setenv("ONEBOX_CONFIG", str(owner))
            allow_client(name, key)
        public = identity("agent").public
    ids = f"{IDS.start}-{IDS.stop - 1}"
    always = ["--bind", "127.0.0.1", "--port", "0", "--devices", "cpu", "--user-ids", ids, "--journal", str(journal)]
    line = readable_by_all([sys.executable, "-m", "onebox", "serve", *always, *options])
    environment = warm.single() | {"ONEBOX_CONFIG": str(owner)}
    said = folder / "said"
    with (
        said.open("w") as output,
        subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=output) as process,
    ):
        try:
            found = until(
                lambda: process.poll() is not None or re.search(r"agent at (127.0.0.1:\d+)", said.read_text())
            )
            if found is True and "cannot run" in said.read_text():
                pytest.skip(said.read_text())
            assert isinstance(found, re.Match), said.read_text()
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("ONEBOX_POOL", raising=False)
                for keys in (client.with_name("bob"), client):
                    patch.setenv("ONEBOX_CONFIG", str(keys))
                    remember_agent(KnownAgent(found[1], public, "lab"))
                yield found[1], journal, client
        finally:
            process.terminate()
            process.wait(WAIT_S)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """An agent without limits."""
    with serving(tmp_path_factory.mktemp("users")) as started:
        yield started


def status(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def users(processes: list[int]) -> set[int]:
    found = {int(word) for process in processes for word in status(process)["Uid"].split()}
    assert found == {int(word) for process in processes for word in status(process)["Gid"].split()}
    assert {status(process)["Groups"] for process in processes} == {""}
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_of_a_lease_have_one_user_and_work(agent: tuple[str, Path, Path]) -> None:
    address, journal, _ = agent
    with onebox.open(f"{address}/cpu*2", threads=1, memory="64MiB") as pool:
        (user,) = users(list(pool.process_ids))
        assert user in IDS
        (parent,) = {psutil.Process(process).ppid() for process in pool.process_ids}
        assert users([parent]) == {0} and psutil.Process(parent).name() == "onebox-zygote"
        x_BD = torch.arange(6.0, dtype=torch.float64, device="vgpu:0").reshape(2, 3)
        assert ((x_BD.to("vgpu:1") + 1).to("vgpu:0") * x_BD).cpu().tolist() == [[0, 2, 6], [12, 20, 30]]
        for process in pool.process_ids:
            assert status(process)["CapEff"] == "0" * 16
            if seccomp.supported():
                assert status(process)["Seccomp_filters"] == "2"
            limits = Path(f"/proc/{process}/limits").read_text().splitlines()
            assert "unlimited" not in next(line for line in limits if line.startswith("Max data size")), "its quota"
            most = next(line for line in limits if line.startswith("Max processes"))
            assert most.split()[2:4] == ["4112", "4112"], "of both workers together"
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        begin = next(event for event in events if event["event"] == "started")
        assert begin["users"] == "one for each lease: 60820-60823"
        if begin["cgroups"].startswith("on"):
            (place,) = {Path(f"/proc/{each}/cgroup").read_text().splitlines()[-1] for each in pool.process_ids}
            assert "lease-" in place
    until(lambda: not [process for process in running_processes() if process.user == user])


@pytest.mark.feature("Agents: Keep each lease apart by user and cgroup")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_leases_at_the_same_time_have_two_users(agent: tuple[str, Path, Path]) -> None:
    address, _, _ = agent
    with (
        onebox.open(f"{address}/cpu", threads=1, memory="64MiB") as one,
        onebox.open(f"{address}/cpu", threads=1, memory="64MiB") as two,
    ):
        found = users(list(one.process_ids)) | users(list(two.process_ids))
        assert len(found) == 2 and found < set(IDS)


def test_the_user_of_a_lease_cannot_inspect_the_zygote(agent: tuple[str, Path, Path]) -> None:
    """Even without what confines workers: the zygote's next workers are those of others."""
    address, _, _ = agent
    with onebox.open(f"{address}/cpu", threads=1, memory="64MiB") as pool:
        (process,) = pool.process_ids
        (user,) = users([process])
        rights: dict[str, Any] = {"user": user, "group": user, "extra_groups": ()}
        looks = [
            subprocess.run(["cat", f"/proc/{each}/maps"], capture_output=True, check=False, **rights)
            for each in (process, psutil.Process(process).ppid())
        ]
    assert [look.returncode for look in looks] == [0, 1]
    assert b"Permission denied" in looks[1].stderr


@pytest.mark.feature("Agents: Limit the cores and the memory that an agent offers")
def test_an_agent_offers_no_more_than_it_is_told_to(tmp_path: Path) -> None:
    with serving(tmp_path, "--cores", "1", "--memory", "64MiB") as (address, _, _):
        with pytest.raises(OneboxError, match="1 core"):
            onebox.open(f"{address}/cpu*2", threads=1)
        with pytest.raises(OneboxError, match="64 MiB"):
            onebox.open(f"{address}/cpu", threads=1, memory="65MiB")
        with onebox.open(f"{address}/cpu", threads=1, memory="64MiB"):
            assert torch.ones(1 << 20, device="vgpu:0").sum().item() == 1 << 20
            with pytest.raises(torch.OutOfMemoryError, match="the quota is 64 MiB"):
                torch.ones(1 << 24, dtype=torch.float64, device="vgpu:0").sum().item()


@pytest.mark.feature("Agents: Give workers the groups of a user")
def test_workers_have_the_groups_of_the_user_that_is_named(tmp_path: Path) -> None:
    named = next(user for user in pwd.getpwall() if 0 < user.pw_uid < 1000)
    with (
        serving(tmp_path, "--user", named.pw_name) as (address, _, _),
        onebox.open(f"{address}/cpu", threads=1, memory="64MiB") as pool,
    ):
        found = status(pool.process_ids[0])
        assert {int(word) for word in found["Groups"].split()} == set(os.getgrouplist(named.pw_name, named.pw_gid))
        assert int(found["Uid"].split()[0]) in IDS
