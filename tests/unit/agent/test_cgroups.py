"""The cgroups of leases, in folders that behave as those of a system with all controllers do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onebox.agent import cgroups as module
from onebox.agent.admission import Share
from onebox.agent.cgroups import LeaseCgroups, lease_limits, most_processes
from onebox.worker.memory.shared import shared_limit_bytes
from onebox.worker.sandbox.confine import memory_limit_bytes

CPU = Share(device="cpu", threads=2, memory_bytes=1 << 30)
GPU = Share(device="cuda:0", threads=4, memory_bytes=8 << 30)

WRITE, MAKE, REMOVE = Path.write_text, Path.mkdir, Path.rmdir


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of cgroups in plain files, in which this process is alone; as ``cgroups(7)`` says of version 2."""
    root = tmp_path / "cgroup"
    files = ("cgroup.procs", "cgroup.controllers", "cgroup.subtree_control", "cgroup.kill")

    def write(path: Path, text: str) -> int:
        if path.name == "cgroup.procs":
            process = str(os.getpid()) if text == "0" else text
            for each in root.rglob("cgroup.procs"):
                WRITE(each, " ".join(word for word in each.read_text().split() if word != process))
            text = " ".join([*path.read_text().split(), process])
        if path.name == "cgroup.subtree_control":
            if (path.parent / "cgroup.procs").read_text().split() and text.startswith("+"):
                raise OSError(16, "Device or resource busy")
            if text[1:] not in (path.parent / "cgroup.controllers").read_text().split():
                raise OSError(2, "No such file or directory")
            there = set(path.read_text().split())
            text = " ".join(there | {text[1:]} if text[0] == "+" else there - {text[1:]})
            for child in path.parent.glob("*/cgroup.controllers"):
                WRITE(child, text)
        return WRITE(path, text)

    def make(path: Path, **given: bool) -> None:
        MAKE(path)
        for name in files:
            WRITE(path / name, "")
        above = path.parent / "cgroup.subtree_control"
        if above.exists():
            WRITE(path / "cgroup.controllers", above.read_text())

    def remove(path: Path) -> None:
        if any(each.is_dir() for each in path.iterdir()) or (path / "cgroup.procs").read_text().split():
            raise OSError(16, "Device or resource busy")
        for each in path.iterdir():
            each.unlink()
        REMOVE(path)

    make(root)
    make(root / "own")
    WRITE(root / "own" / "cgroup.controllers", "cpuset cpu io memory pids")
    WRITE(root / "own" / "cgroup.procs", f"{os.getpid()}")
    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    monkeypatch.setattr(module, "_SYSTEMD", tmp_path / "none")
    WRITE(tmp_path / "mountinfo", f"30 23 0:26 / {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")
    return root


def proc(tree: Path, place: str = "/own") -> Path:
    """Return a folder as ``proc(5)`` for a process in a cgroup."""
    made = tree.parent / "proc"
    os.makedirs(made / "self", exist_ok=True)
    WRITE(made / "self" / "cgroup", f"4:memory:/elsewhere\n0::{place}\n")
    WRITE(made / "self" / "mountinfo", (tree.parent / "mountinfo").read_text())
    return made


def test_limits_of_a_lease() -> None:
    one, two = lease_limits([CPU]), lease_limits([CPU, GPU])
    memory = shared_limit_bytes(1 << 30) + memory_limit_bytes(1 << 30, 2)
    assert one == {"memory": str(memory), "pids": "2064", "cpu": "300000 100000"}
    memory += shared_limit_bytes(8 << 30) + memory_limit_bytes(8 << 30, 4) + (4 << 30)
    assert two == {"memory": str(memory), "pids": "4144", "cpu": "800000 100000"}
    assert lease_limits([CPU, Share(device="cpu", threads=1, memory_bytes=0)])["memory"] == "max"
    assert most_processes([CPU, GPU]) == 4144


def test_an_agent_that_is_alone_limits_its_leases_and_leaves_nothing(tree: Path) -> None:
    made = LeaseCgroups(proc(tree))
    assert made.state == "on" and made.limits == ("memory", "pids", "cpu")
    assert (tree / "own" / "cgroup.procs").read_text() == ""
    lease = made.make(7, [CPU])
    assert lease is not None
    assert made.folder is not None
    folder = made.folder / "lease-7"
    limits = lease_limits([CPU])
    assert {name: (folder / f"{name}.max").read_text() for name in limits} == limits
    lease.add(4194303)
    assert lease.processes() == [4194303]
    assert not lease.remove()
    lease.kill()
    assert (folder / "cgroup.kill").read_text() == "1"
    WRITE(folder / "cgroup.procs", "")
    assert lease.remove() and lease.remove() and not folder.exists()
    made.close()
    made.close()
    assert (tree / "own" / "cgroup.procs").read_text() == str(os.getpid())
    assert [path.name for path in (tree / "own").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("ends", ["never", "before", "meanwhile"])
def test_a_process_that_has_ended_is_in_none(tree: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Its number may be that of another process by now."""
    made = LeaseCgroups(proc(tree))
    lease = made.make(7, [CPU])
    assert lease is not None
    write = Path.write_text
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:

        def writing(path: Path, text: str) -> int:
            if path.name == "cgroup.procs" and ends == "meanwhile":
                process.kill()
                process.wait()
            return write(path, text)

        monkeypatch.setattr(Path, "write_text", writing)
        descriptor = os.pidfd_open(process.pid)
        if ends == "before":
            process.kill()
            process.wait()
        try:
            with contextlib.nullcontext() if ends == "never" else pytest.raises(ProcessLookupError):
                lease.add(process.pid, descriptor)
        finally:
            os.close(descriptor)


def test_beside_others_there_are_cgroups_without_limits(tree: Path) -> None:
    WRITE(tree / "own" / "cgroup.procs", f"{os.getpid()} 1")
    made = LeaseCgroups(proc(tree))
    assert made.limits == () and "memory, pids, cpu" in made.state and "other processes" in made.state
    assert made.make(1, [CPU]) is not None
    made.close()


def test_controllers_that_are_not_there_are_said(tree: Path) -> None:
    WRITE(tree / "own" / "cgroup.controllers", "pids io")
    made = LeaseCgroups(proc(tree))
    assert made.limits == ("pids",)
    assert made.state == "on, without limits of memory, cpu: the system has no such controller here"
    made.close()


@pytest.mark.parametrize("place", ["", "/../other"])
def test_without_a_cgroup_of_its_own_there_are_none(tree: Path, place: str) -> None:
    made = LeaseCgroups(proc(tree, place))
    assert made.state.startswith("off: this system has no cgroups") and made.make(1, [CPU]) is None
    made.close()


def test_systemd_has_to_delegate(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SYSTEMD", tree)
    made = LeaseCgroups(proc(tree))
    assert made.state.startswith("off: systemd has not delegated") and "Delegate=yes" in made.state
    asked: list[tuple[Path, str]] = []

    def attribute(folder: Path, name: str) -> bytes:
        asked.append((folder, name))
        if folder != tree / "own" or name != "user.delegate":
            raise OSError(61, "No data available")
        return b"1"

    monkeypatch.setattr(os, "getxattr", attribute)
    os.makedirs(tree / "own" / "agent")
    for name in ("cgroup.procs", "cgroup.controllers", "cgroup.subtree_control"):
        WRITE(tree / "own" / "agent" / name, "")
    WRITE(tree / "own" / "cgroup.procs", "")
    made = LeaseCgroups(proc(tree, "/own/agent"))  # DelegateSubgroup=agent
    assert made.state == "on" and made.folder is not None and made.folder.parent == tree / "own"
    made.close()
