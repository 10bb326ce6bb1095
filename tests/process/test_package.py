"""The package as users get it: built, installed into a fresh environment, and used from outside the sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import package_run


class Built(NamedTuple):
    """The wheel for any machine, and the tree of the source distribution, unpacked."""

    wheel: Path
    tree: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both distributions, whose contents are right."""
    folder = tmp_path_factory.mktemp("package")
    wheel, sdist = package_run.build(package_run.ROOT, folder / "dist")
    tree = package_run.unpack(sdist, folder / "unpacked")
    package_run.check_contents(wheel, tree, folder)
    return Built(wheel, tree)


@pytest.mark.feature("Installation: Install a wheel or source distribution")
def test_wheel_and_source_distribution_install_and_run(built: Built, tmp_path: Path) -> None:
    assert built.wheel.name.endswith("-py3-none-any.whl")
    python = package_run.install(built.wheel, tmp_path / "venv", outer=True)
    said = package_run.attempt(python, tmp_path / "elsewhere")
    assert said[0].startswith("onebox ")


@pytest.mark.long  # compiles the device, unless another test of it has
@pytest.mark.timeout(1200)
@pytest.mark.feature("Installation: Install a wheel that has the virtual device's object")
def test_the_object_in_a_wheel_needs_no_compiler(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not package_run.can_compile():
        pytest.skip("there is no C++ compiler, or this is not Linux")
    # the object of all tests, as in tests/unit/vgpu/native/test_native.py
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(sys.prefix) / "cache"))
    wheel = package_run.build_with_object(built.wheel, built.tree)
    python = package_run.install(wheel, tmp_path / "venv", outer=True)
    path = package_run.attempt_object(python, tmp_path / "elsewhere")
    assert Path(path).parent.name == "built"
