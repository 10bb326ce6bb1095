"""Wheels and source distribution, built, installed into a fresh environment, and tried there: ``make package``.

    python -m tests.package_run [--dist FOLDER] [--outer] [--wheel FILE]

One wheel is for any machine. On Linux with a C++ compiler there is another, which also has the object of the virtual
device for the installed PyTorch: pip takes it where its tag fits. That one is tried if there is one. With ``--wheel``
nothing is built, and this wheel is tried. With ``--outer`` the fresh environment uses the packages of the one that runs
this, except onebox, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
BUILD_S, INSTALL_S, TRY_S = 200.0, 1800.0, 200.0
NOT_PACKAGED = ("__pycache__",)
LOAD = "from onebox.vgpu.native import build; assert build.packaged().exists(); print(build.load().__file__)"


def main() -> None:
    """Build, install and try; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="folder of the two distributions")
    parser.add_argument("--outer", action="store_true", help="use the packages of this environment, download nothing")
    parser.add_argument("--wheel", type=Path, help="build nothing, and try this wheel, which has an object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onebox-package-") as name:
        folder = Path(name)
        wheel, has_object = options.wheel, True
        if wheel is None:
            wheel, sdist = build(ROOT, options.dist)
            print(f"built {wheel} and {sdist}")
            tree = unpack(sdist, folder / "unpacked")
            check_contents(wheel, tree, folder)
            print("the source distribution builds the same wheel; all files are there")
            has_object = can_compile()
            if has_object:
                wheel = build_with_object(wheel, tree)
                print(f"built {wheel}, with the object of the virtual device")
            else:
                print("no wheel with the object of the virtual device: this needs Linux and a C++ compiler")
        python = install(wheel, folder / "venv", outer=options.outer)
        for line in attempt(python, folder / "elsewhere"):
            print(line)
        if has_object:
            print(f"loaded without a compiler: {attempt_object(python, folder / 'without-compiler')}")


def build(source: Path, dist: Path, *what: str) -> tuple[Path, ...]:
    """Build the distributions of a source tree.

    Args:
        source: The tree.
        dist: The folder for them; onebox's own earlier ones are removed.
        what: Options of ``build``; all distributions without them.

    Returns:
        The files, the wheel first.
    """
    for old in dist.glob("onebox-*"):
        old.unlink()
    run([sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(dist), str(source)], BUILD_S)
    return tuple(sorted(dist.glob("onebox-*"), key=lambda path: path.suffix != ".whl"))


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution into a folder, and return its tree."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def check_contents(wheel: Path, tree: Path, folder: Path) -> None:
    """Require that the wheel has all files of the source, and that the source distribution builds the same wheel.

    Args:
        wheel: The wheel, for any machine.
        tree: The unpacked source distribution.
        folder: A folder to build in.

    Raises:
        AssertionError: It isn't so.
    """
    files = contents(wheel)
    wanted = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*")
        if path.is_file() and not set(path.parts) & set(NOT_PACKAGED) and path.suffix != ".pyc"
    }
    assert not wanted - set(files), f"not in the wheel: {sorted(wanted - set(files))}"
    assert not [name for name in files if name.startswith(("tests/", "docs/", "benchmarks/"))]
    (again,) = build(tree, folder / "again", "--wheel")
    assert contents(again) == files, "the source distribution builds another wheel"


def can_compile() -> bool:
    """Whether objects of the virtual device can be compiled here for a wheel."""
    return sys.platform == "linux" and shutil.which(os.environ.get("CXX") or "g++") is not None


def add_object(tree: Path) -> str:
    """Put the object for the installed PyTorch into a tree, and return its name there; the user's cache may have it."""
    from onebox.vgpu.native import build as native

    name = native.packaged().resolve().relative_to(SOURCE)
    path = tree / "src" / name
    path.parent.mkdir(exist_ok=True)
    shutil.copyfile(native.compiled(), path)
    return str(name)


def build_with_object(pure: Path, tree: Path) -> Path:
    """Build the wheel with the object for the installed PyTorch, beside the one for any machine.

    Args:
        pure: The wheel for any machine.
        tree: The unpacked source distribution, which gets the object.

    Returns:
        The wheel.

    Raises:
        AssertionError: It differs from the wheel for any machine in more than the object and the tag.
    """
    name = add_object(tree)
    (made,) = build(tree, tree / "dist", "--wheel")
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert made.name.endswith(f"-{python}-{python}-linux_{platform.machine()}.whl"), made.name
    before, after = contents(pure), contents(made)
    changed = {each.split(".dist-info/")[-1] for each in before.keys() | after if before.get(each) != after.get(each)}
    assert changed == {name, "RECORD", "WHEEL"}, f"other files than in {pure}: {sorted(changed)}"
    return Path(shutil.move(made, pure.parent))


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def install(wheel: Path, folder: Path, *, outer: bool) -> Path:
    """Install a wheel into a fresh environment.

    Args:
        wheel: The wheel.
        folder: The environment's folder.
        outer: Whether the environment uses the packages of this one.

    Returns:
        Its Python.
    """
    run([sys.executable, "-m", "venv", str(folder)], INSTALL_S)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if outer:
        (own,) = (folder / "lib").glob("python*/site-packages")
        (own / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # whose own .pth files are not read
        run([*pip, "--no-deps", "--no-index", str(wheel)], INSTALL_S)
    else:
        run([*pip, "-c", str(ROOT / "constraints.txt"), "torch"], INSTALL_S)
        run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], INSTALL_S)
    return python


def attempt(python: Path, folder: Path) -> list[str]:
    """Use an installed onebox from an empty folder.

    Args:
        python: The environment's Python.
        folder: The folder, which is created.

    Returns:
        What was done, a line for each.

    Raises:
        AssertionError: Something failed.
    """
    folder.mkdir()
    onebox = str(python.parent / "onebox")
    where = run([str(python), "-c", "import onebox; print(onebox.__file__)"], TRY_S, folder).strip()
    assert Path(where).is_relative_to(python.parents[1]), f"another onebox is used: {where}"
    version = run([onebox, "--version"], TRY_S, folder).strip()
    assert run([onebox, "env"], TRY_S, folder).strip()
    assert run([onebox, "completion", "bash"], TRY_S, folder).startswith("# bash completion of onebox")
    line = "train --data digits --model mlp --epochs 1 --pool cpu*2 --threads 1"
    trained = run([onebox, *line.split()], TRY_S, folder)
    assert "test accuracy" in trained and list(folder.glob("runs/*/summary.json"))
    return [f"{version} of {where}", f"onebox {line}: {trained.splitlines()[-1].strip()}"]


def attempt_object(python: Path, folder: Path) -> str:
    """Load the object of an installed onebox, with no compiler and an empty cache.

    Args:
        python: The environment's Python.
        folder: A folder, which is created.

    Returns:
        The object's path.

    Raises:
        AssertionError: It is not there, is not in the environment, or cannot be loaded.
    """
    folder.mkdir()
    nothing = {"PATH": str(folder), "CXX": "", "XDG_CACHE_HOME": str(folder / "cache")}
    path = run([str(python), "-c", LOAD], TRY_S, folder, **nothing).strip()
    assert Path(path).is_relative_to(python.parents[1]), f"another object is used: {path}"
    assert not (folder / "cache" / "onebox" / "device").exists(), "the cache is used"
    return path


def run(command: Sequence[str], within_s: float, folder: Path = ROOT, **variables: str) -> str:
    """Run a command without this tree in its path, with other variables, and return what it prints.

    Raises:
        AssertionError: It failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


if __name__ == "__main__":
    main()
