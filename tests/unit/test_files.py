"""Files that are put in place whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onebox.files import put_file


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
