"""Files that are put in place whole or not at all."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import onebox
from onebox.files import make_folder, open_regular, put_file, read_regular
from tests.kit import leaks

SOURCE = Path(onebox.__file__).parent

READERS = {
    # files of the kernel
    "agent/cgroups.py",
    "engine/state/partial_saves.py",
    "pool/launch/cpu_affinity.py",
    "pool/launch/worker_user.py",
    "worker/accelerator/cpu.py",
    "worker/comm/shm/rendezvous.py",
    "worker/device.py",
    "worker/process/heartbeat.py",
    "worker/sandbox/confine.py",
    "worker/sandbox/seccomp.py",
    "worker/system/instruction_sets.py",
    "worker/system/process_watch.py",
    # files of this package, of this process, and programs that this user runs
    "agent/journal.py",
    "cli/commands/run.py",
    "feed/datasets/in_memory.py",
    "forking.py",
    "pool/launch/zygotes.py",
    "report/page/page_server.py",
    "report/run/metrics.py",
    "worker/process/zygote.py",
    "worker/sandbox/allow_list.py",
}
"""Modules that read files without :func:`onebox.files.open_regular`: none of these files comes from others."""


def reads(node: ast.AST) -> bool:
    """Return whether a call reads a file by its path, other than by the readers of regular files."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if name.endswith((".read_bytes", ".read_text")):
        return True
    if name in ("os.open", "webbrowser.open", "onebox.open"):
        return False
    if any(isinstance(one, ast.Call) and ast.unparse(one.func).endswith("open_regular") for one in node.args):
        return False
    by_name = name in ("open", "io.open", "os.fdopen")
    if not by_name and not (name.endswith(".open") and name.count(".") == 1):
        return False
    given = [*node.args[by_name : by_name + 1], *(one.value for one in node.keywords if one.arg == "mode")]
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else "r" if by_name and not given else ""
    return isinstance(mode, str) and ("r" in mode or "+" in mode) and not mode.strip("rbt+")


def test_files_of_others_are_read_by_one_reader() -> None:
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(map(reads, ast.walk(ast.parse(path.read_text()))))
    }
    assert found - READERS == set(), "read with onebox.files.read_regular, or open_regular"
    assert READERS - found == set(), "they read nothing"


@pytest.mark.parametrize("kind", ["pipe", "zeros", "folder", "link to zeros", "large", "nothing"])
def test_only_regular_files_of_a_size_are_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "link to zeros":
        file.symlink_to("/dev/zero")
    elif kind == "large":
        file.write_bytes(bytes(9))
    with pytest.raises(OSError), leaks.nothing_left():
        read_regular("/dev/zero" if kind == "zeros" else file, 8)


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("blob")
    assert read_regular(tmp_path / "link", 8) == b"12345678"
    with open(open_regular(tmp_path / "link"), "rb") as file:
        assert file.read(3) == b"123"


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o640)])
def test_a_file_is_private_or_as_the_umask_says(private: bool, mode: int, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        put_file(tmp_path / "a", b"content", private=private)
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == b"content"
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


def test_an_earlier_file_is_replaced_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    put_file(file, b"first")
    put_file(file, b"second")
    assert file.read_bytes() == b"second"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        put_file(file, b"third")
    assert file.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files and folders that are synced from here on."""
    found: list[Path] = []
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return found


def test_each_folder_that_is_made_is_an_entry_on_disk(tmp_path: Path, synced: list[Path]) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "c").is_dir() and not synced
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            make_folder(path)


def test_a_file_that_is_put_in_place_is_an_entry_on_disk(tmp_path: Path, synced: list[Path]) -> None:
    put_file(tmp_path / "a", b"content")
    assert synced[-1] == tmp_path
