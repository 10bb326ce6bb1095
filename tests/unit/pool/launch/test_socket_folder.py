"""Folders for sockets of this machine."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from onebox.errors import PoolError
from onebox.pool.launch.socket_folder import SocketFolder


@pytest.mark.parametrize("temporary", ["short", "too long for a socket", "not there"])
def test_sockets_get_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str) -> None:
    places = {"short": "/tmp", "too long for a socket": str(tmp_path / ("x" * 90)), "not there": "/nowhere"}
    (tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: places[temporary])
    folder = SocketFolder()
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert len(f"{folder.path}/{'x' * 16}") < 107
    Path(folder.path, "socket").touch()
    for _ in range(2):
        folder.close()
        assert not Path(folder.path).exists()


def test_no_place_for_sockets_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str, dir: str) -> str:
        raise PermissionError(dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(PoolError, match=r"no folder for sockets .* /dev/shm: let one of them be writable"):
        SocketFolder()
