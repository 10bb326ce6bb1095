"""The object of the device is compiled once, whoever needs it; compilers here are scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onebox.errors import PoolError
from onebox.vgpu.native import build

COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo "$2" >> "$0.log"
while [ -e "$0.hold" ]; do sleep 0.05; done
echo made > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes what it is asked for, and a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script(tmp_path / "c++", COMPILER, monkeypatch)


def script(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a script the compiler."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def compilations(compiler: Path) -> list[str]:
    """Return the names of what was compiled and linked."""
    log = Path(f"{compiler}.log")
    return [Path(line).name for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def test_it_is_compiled_once_and_one_line_says_so(compiler: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = build.compiled()
    assert path.read_text(encoding="utf-8") == "made\n"
    assert sorted(compilations(compiler)) == sorted([*(f"{name}.o" for name in build.SOURCES), path.name])
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "building the virtual device" in said
    assert build.compiled() == path
    assert len(compilations(compiler)) == len(build.SOURCES) + 1
    assert capfd.readouterr().err == ""
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]
    assert path.parent.stat().st_mode & 0o077 == 0


def test_other_sources_another_torch_and_another_compiler_have_objects_of_their_own(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {build.compiled()}
    monkeypatch.setattr("torch.__version__", "2.99.0")
    found.add(build.compiled())
    monkeypatch.setattr(build, "HEADERS", ("queue.h",))
    found.add(build.compiled())
    script(tmp_path / "clang++", COMPILER, monkeypatch)
    found.add(build.compiled())
    assert len(found) == 4


def test_a_compiler_that_is_gone_is_not_missed(compiler: Path) -> None:
    path = build.compiled()
    compiler.unlink()
    assert build.compiled() == path


def test_without_a_compiler_one_error_says_what_to_install(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PoolError, match=r"no no-such-compiler: install it, such as by apt install g\+\+"):
        build.compiled()


def test_what_a_compiler_says_is_in_the_error_and_nothing_is_left(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "broken", "#!/bin/sh\necho 'queue.h: no such type'\nexit 1\n", monkeypatch)
    with pytest.raises(
        PoolError, match=r"could not build the virtual device for PyTorch .* it said:\nqueue\.h: no such type"
    ):
        build.compiled()
    assert [one.suffix for one in (tmp_path / "cache" / "onebox" / "device").iterdir()] == [".lock"]
    monkeypatch.setenv("CXX", str(compiler))
    assert build.compiled().exists()


def test_a_compiler_that_does_not_end_is_ended(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{compiler}.hold").touch()
    monkeypatch.setattr(build, "WITHIN_S", 0.0)
    with pytest.raises(PoolError, match="has not built the virtual device"):
        build.compiled()


def test_a_folder_that_cannot_be_used_is_one_error(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "cache").write_text("", encoding="utf-8")
    with pytest.raises(PoolError, match="XDG_CACHE_HOME names another"):
        build.compiled()


@pytest.mark.long  # three processes import PyTorch
def test_processes_at_the_same_time_compile_once(compiler: Path, held: Callable[[], None]) -> None:
    command = [sys.executable, "-c", "from onebox.vgpu.native import build; print(build.compiled())"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(3)]
    held()
    found = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(found) == 1
    assert len(compilations(compiler)) == len(build.SOURCES) + 1


@pytest.fixture
def held(compiler: Path) -> Callable[[], None]:
    """Hold the compiler, until the returned function is called and it has begun."""
    from tests.kit.waiting import until

    hold = Path(f"{compiler}.hold")
    hold.touch()

    def release() -> None:
        until(lambda: bool(compilations(compiler)))
        hold.unlink()

    return release
