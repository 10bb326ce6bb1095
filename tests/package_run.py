"""Wheel and source distribution, built, installed into a fresh environment, and tried there: ``make package``.

    python -m tests.package_run [--dist FOLDER] [--outer]

With ``--outer`` the fresh environment uses the packages of the one that runs this, except onebox, and nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import os
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


def main() -> None:
    """Build, install and try; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="folder of the two distributions")
    parser.add_argument("--outer", action="store_true", help="use the packages of this environment, download nothing")
    options = parser.parse_args()
    wheel, sdist = build(ROOT, options.dist)
    print(f"built {wheel} and {sdist}")
    with tempfile.TemporaryDirectory(prefix="onebox-package-") as folder:
        check_contents(wheel, sdist, Path(folder))
        print("the source distribution builds the same wheel; all files are there")
        python = install(wheel, Path(folder) / "venv", outer=options.outer)
        for line in attempt(python, Path(folder) / "elsewhere"):
            print(line)


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


def check_contents(wheel: Path, sdist: Path, folder: Path) -> None:
    """Require that the wheel has all files of the source, and that the source distribution builds the same wheel.

    Args:
        wheel: The wheel.
        sdist: The source distribution.
        folder: A folder to unpack into.

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
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (tree,) = (folder / "unpacked").iterdir()
    (again,) = build(tree, folder / "again", "--wheel")
    assert contents(again) == files, "the source distribution builds another wheel"


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


def run(command: Sequence[str], within_s: float, folder: Path = ROOT) -> str:
    """Run a command without this tree in its path, and return what it prints.

    Raises:
        AssertionError: It failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


if __name__ == "__main__":
    main()
