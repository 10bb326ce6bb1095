"""Optional packages: one function imports them, its error says what to install, and pyproject.toml lists the same."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import onebox
from onebox import extras
from onebox.errors import MissingExtra, UsageError
from onebox.extras import PACKAGES, import_extra

ROOT = Path(__file__).parents[2]
SOURCE = Path(onebox.__file__).parent
OPTIONAL = {package.module for package in PACKAGES}
NAMED = re.compile(rf"\b(?:{'|'.join(sorted(OPTIONAL))})\b")
"""What a module that imports one of them has in its text; to parse all takes seconds."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def distributions(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def test_the_extras_are_those_of_the_project(project: dict[str, Any]) -> None:
    declared = project["optional-dependencies"]
    listed: dict[str, set[str]] = {}
    for package in PACKAGES:
        listed.setdefault(package.extra, set()).add(package.distribution)
    assert {extra: distributions(declared[extra]) for extra in declared.keys() - {"all", "docs", "test"}} == listed
    (every,) = map(Requirement, declared["all"])
    assert (every.name, every.extras) == ("onebox", set(listed))
    assert {"onebox[all]", "onebox[docs]"} <= set(declared["test"])


def test_what_is_always_installed_is_little(project: dict[str, Any]) -> None:
    always = {"torch", "numpy", "pyzmq", "msgspec", "safetensors", "psutil", "tyro", "rich"}
    assert distributions(project["dependencies"]) == always


def test_the_tested_versions_are_of_what_is_needed(project: dict[str, Any]) -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = distributions(pins)
    needed = distributions([*project["dependencies"], *chain(*project["optional-dependencies"].values())])
    assert needed - {"onebox"} <= pinned
    assert not pinned & {"scikit-learn", "scipy", "joblib", "threadpoolctl"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.module)
def test_a_missing_package_is_one_line_with_its_remedy(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package.module, None)
    with pytest.raises(MissingExtra) as caught:
        import_extra(package.module, "A feature")
    remedy = f"pip install 'onebox[{package.extra}]'"
    assert str(caught.value) == f"A feature needs {package.distribution}, which is not installed: {remedy}"
    assert (caught.value.package, caught.value.extra) == (package.distribution, package.extra)
    assert isinstance(caught.value, UsageError)


def test_a_package_that_is_broken_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchdata.py").write_text("import a_library_that_is_not_here\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchdata"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match=r"cannot be imported \(No module named 'a_library_that_is_not_here'\): pip"):
        import_extra("torchdata", "A feature")


def test_what_is_installed_is_returned() -> None:
    assert import_extra("PIL.Image", "A feature") is sys.modules["PIL.Image"]


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(extras) == doctest.TestResults(failed=0, attempted=1)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each import that is executed, so not those for a type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, str(node.module)
        elif not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from imports(node)


def offences(tree: ast.AST) -> list[tuple[int, str]]:
    return [(line, name) for line, name in imports(tree) if name.partition(".")[0] in OPTIONAL]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import matplotlib.figure", 1),
        ("def f():\n    from PIL import Image", 1),
        ("try:\n    import ray\nexcept ImportError:\n    pass", 1),
        ("if TYPE_CHECKING:\n    from PIL import Image", 0),
        ("from onebox.extras import import_extra\nimport_extra('ray', 'x')", 0),
    ],
)
def test_the_look_at_imports_finds_them(text: str, found: int) -> None:
    assert len(offences(ast.parse(text))) == found


def test_nothing_else_imports_them() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 50
    texts = {str(path): text for path in paths if NAMED.search(text := path.read_text())}
    assert {path: found for path, text in texts.items() if (found := offences(ast.parse(text)))} == {}


def test_names_are_of_modules_that_exist() -> None:
    assert all(importlib.util.find_spec(package.module) is not None for package in PACKAGES)
