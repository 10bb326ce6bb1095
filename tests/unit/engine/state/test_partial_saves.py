"""Temporary folders of checkpoints: whose are removed, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onebox.engine.state import partial_saves
from onebox.engine.state.partial_saves import ABANDONED_S, temporary_folder
from onebox.worker.system.process_watch import start_time


def left(folder: Path, name: str, *, age_s: float = 0.0) -> Path:
    """Return a temporary folder with a file, last changed some time ago."""
    path = folder / name
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    at_s = path.stat().st_mtime - age_s
    for each in (path / "model.safetensors", path):
        os.utime(each, (at_s, at_s))
    return path


def name_of(process: int, *, begun: str | None = None, kernel: str | None = None, what: str = "writing") -> str:
    begun = start_time(process) if begun is None else begun
    return f".{what}-lab1.{kernel or partial_saves._kernel()}.{process}.{begun}.0a1b2c3d"


def removed(path: Path) -> bool:
    """Tell whether the next writer removes a folder."""
    with temporary_folder(path.parent):
        return not path.exists()


@pytest.mark.parametrize("what", ["writing", "removing"])
def test_of_processes_of_this_host_those_that_have_ended(tmp_path: Path, what: str) -> None:
    parent = os.getppid()
    assert not removed(left(tmp_path, name_of(parent, what=what), age_s=10 * ABANDONED_S))
    assert removed(left(tmp_path, name_of(parent, begun="1", what=what))), "another process has the number now"
    assert removed(left(tmp_path, name_of(999_999_999, begun="1", what=what)))


def test_a_process_that_has_ended_writes_such_a_name(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.write(writer, partial_saves._name("writing").encode())
        os._exit(0)
    assert os.waitpid(process, 0) == (process, 0)
    name = os.read(reader, 1000).decode()
    for descriptor in (reader, writer):
        os.close(descriptor)
    assert f".{process}." in name and removed(left(tmp_path, name))


@pytest.mark.parametrize(
    "name", [name_of(999_999_999, begun="1", kernel="0" * 16), name_of(os.getppid(), kernel="0" * 16), ".writing-1234"]
)
def test_of_another_host_those_that_have_been_still_for_long(tmp_path: Path, name: str) -> None:
    """Whatever processes of this host have that number."""
    path = left(tmp_path, name)
    assert not removed(path)
    os.utime(path, (0, 0))
    assert not removed(path), "a file in it has just been written"
    os.utime(path / "model.safetensors", (0, 0))
    os.utime(path, (0, 0))
    assert removed(path)


def test_two_writers_of_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as one, temporary_folder(tmp_path) as other:
        assert one.is_dir() and other.is_dir() and one != other
    assert list(tmp_path.iterdir()) == []


def test_what_this_process_could_not_remove_is_removed_later(tmp_path: Path) -> None:
    assert removed(left(tmp_path, name_of(os.getpid())))
