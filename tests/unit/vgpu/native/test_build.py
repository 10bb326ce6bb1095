"""The object of the device is compiled once, whoever needs it; compilers here are scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from onebox.errors import PoolError
from onebox.vgpu.native import build
from tests.kit.supported import TORCH_MINORS

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


def test_the_object_of_a_wheel_is_that_of_a_minor_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.99.1+cu130")
    path = build.packaged()
    assert path.name == f"torch-2.99{EXTENSION_SUFFIXES[0]}"
    assert path.parent == Path(build.__file__).with_name("built")


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
    program = (
        f"import runpy; print(runpy.run_path({build.__file__!r})['compiled']())"  # its package may load the object
    )
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(3)]
    held()
    found = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(found) == 1
    assert len(compilations(compiler)) == len(build.SOURCES) + 1


@pytest.mark.soak  # downloads 90 MB and compiles, which takes more than a minute of one core
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("minor", TORCH_MINORS)
def test_every_supported_torch_has_the_headers_that_the_sources_need(
    minor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are linked to the libraries of the installed one: no symbol is looked up before an object is loaded."""
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("there is no C++ compiler")
    version, include = headers(minor, tmp_path)
    monkeypatch.setattr("torch.__version__", version)
    monkeypatch.setattr(build.cpp_extension, "include_paths", lambda: [str(path) for path in include])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.compiled().stat().st_size > 100_000


def headers(minor: str, folder: Path) -> tuple[str, list[Path]]:
    """Download a PyTorch; return its version, and the folders of its headers.

    They are those of the wheel for macOS, which is for CPUs alone; the one for Linux brings CUDA.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-deps", "--only-binary=:all:"]
    build_of = ["--platform=macosx_14_0_arm64", f"--python-version={sys.version_info[0]}.{sys.version_info[1]}"]
    done = subprocess.run(
        [*pip, *build_of, f"--dest={folder}", f"torch=={minor}.*"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    wheels = sorted(folder.glob("torch-*.whl"))
    if not wheels:
        pytest.skip(f"pip cannot get torch {minor}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("torch/include/")])
    wheels[0].unlink()
    include = folder / "torch" / "include"
    return wheels[0].name.split("-")[1], [include, include / "torch" / "csrc" / "api" / "include"]


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
