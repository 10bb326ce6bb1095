"""The package as users get it: built, installed into a fresh environment, and used from outside the sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import package_run


@pytest.mark.feature("Installation: Install a wheel or source distribution")
def test_wheel_and_source_distribution_install_and_run(tmp_path: Path) -> None:
    wheel, sdist = package_run.build(package_run.ROOT, tmp_path / "dist")
    package_run.check_contents(wheel, sdist, tmp_path)
    python = package_run.install(wheel, tmp_path / "venv", outer=True)
    said = package_run.attempt(python, tmp_path / "elsewhere")
    assert said[0].startswith("onebox ")
