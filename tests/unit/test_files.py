"""Files that are put in place whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onebox.files import make_folder, put_file


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
