"""Folders for sockets of this machine."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
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


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: place)
    try:
        used = SocketFolder()
        program = (
            "import os, signal, socket\n"
            "from onebox.pool.launch.socket_folder import SocketFolder\n"
            "one, other = SocketFolder(), SocketFolder()\n"
            "socket.socket(socket.AF_UNIX).bind(one.path + '/socket')\n"
            "open(other.path + '/file', 'w').close()\n"
            "print(one.path, other.path, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        environment = {**os.environ, "TMPDIR": place}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        left, strange = map(Path, done.stdout.split())
        assert left.parent == strange.parent == Path(place) and left.exists()
        SocketFolder().close()
        assert not left.exists() and Path(used.path).exists()
        assert strange.exists(), "it has what is no socket"
        used.close()
    finally:
        shutil.rmtree(place)


def test_a_folder_that_another_process_takes_for_one_that_was_left_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def removed_once(prefix: str, dir: str) -> str:
        made.append(make(prefix=prefix, dir=dir))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed_once)
    folder = SocketFolder()
    assert folder.path == made[-1] != made[0] and Path(folder.path).exists()
    folder.close()
