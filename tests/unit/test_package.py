"""The package's metadata, as it is installed; the recipe of conda and the file that builds wheels agree with it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from trove_classifiers import classifiers

import onebox
from hatch_build import Tag
from tests.kit.supported import TORCH_MINORS

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
RECIPE = ROOT / "recipe" / "recipe.yaml"
CONDA_NAMES = {"torch": "pytorch"}
"""Names of distributions that differ in conda-forge."""


def test_installed_metadata_are_those_of_the_project() -> None:
    """They are as old as the installation; ``make`` renews it where pyproject.toml has changed."""
    found = distribution("onebox")
    assert found.version == onebox.__version__
    assert found.metadata["Name"] == "onebox"
    assert found.metadata["Summary"] == PROJECT["description"]
    assert SpecifierSet(found.metadata["Requires-Python"]) == SpecifierSet(PROJECT["requires-python"])
    assert found.metadata["License-Expression"] == PROJECT["license"]
    assert found.metadata["Description-Content-Type"] == "text/markdown"
    urls = dict(each.split(", ") for each in found.metadata.get_all("Project-URL") or ())
    assert urls == PROJECT["urls"]
    scripts = {each.name: each.value for each in found.entry_points if each.group == "console_scripts"}
    assert scripts == PROJECT["scripts"]


def test_classifiers_exist() -> None:
    assert set(PROJECT["classifiers"]) <= set(classifiers)
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in PROJECT["classifiers"]
    assert "Typing :: Typed" in PROJECT["classifiers"] and (ROOT / "src" / "onebox" / "py.typed").is_file()


def test_licences_and_urls() -> None:
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    assert {"Homepage", "Source", "Documentation", "Changelog", "Issues"} == set(PROJECT["urls"])
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())


def test_the_readme_renders() -> None:
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render((ROOT / PROJECT["readme"]).read_text())
    assert html.count("<h1>") == 1
    assert "```" not in html and "](" not in html, "a code block or a link is not closed"


@pytest.mark.parametrize(("files", "changes"), [((), {}), (("a.so",), {"pure_python": False, "infer_tag": True})])
def test_a_wheel_is_for_any_machine_unless_it_has_objects(
    files: tuple[str, ...], changes: dict[str, bool], tmp_path: Path
) -> None:
    built = tmp_path / "src" / "onebox" / "vgpu" / "native" / "built"
    built.mkdir(parents=True)
    for name in files:
        (built / name).touch()
    data: dict[str, Any] = {"pure_python": True, "infer_tag": False}
    Tag(str(tmp_path), {}, None, None, "", "wheel").initialize("standard", data)
    assert data == {"pure_python": True, "infer_tag": False} | changes


def test_objects_are_built_for_every_supported_torch() -> None:
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["objects"]
    assert job["env"]["TORCH"].split() == TORCH_MINORS
    least = PROJECT["requires-python"].removeprefix(">=").replace(".", "")
    assert job["strategy"]["matrix"]["python"][0] == f"cp{least}-cp{least}"
    assert "/src/onebox/vgpu/native/built" in PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"]


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    return found


def resolved(text: str, context: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ (\w+) \}\}", lambda match: context[match[1]], text)


@pytest.mark.feature("Installation: Check the recipe of conda")
def test_the_recipe_needs_what_the_project_needs(recipe: dict[str, Any]) -> None:
    context = recipe["context"]
    wanted = [Requirement(each) for each in PROJECT["dependencies"]]
    needs = {CONDA_NAMES.get(each.name, each.name): each.specifier for each in wanted}
    given = dict(resolved(each, context).split(" ", 1) for each in recipe["requirements"]["run"])
    python = SpecifierSet(given.pop("python"))
    assert python == SpecifierSet(PROJECT["requires-python"])
    assert {name: SpecifierSet(text) for name, text in given.items()} == needs
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    host = {resolved(each, context).replace(" ", "") for each in recipe["requirements"]["host"]}
    assert set(backend) <= host


def test_the_recipe_says_what_the_project_says(recipe: dict[str, Any]) -> None:
    assert recipe["schema_version"] == 1
    assert recipe["context"]["version"] == onebox.__version__
    assert recipe["package"]["name"] == PROJECT["name"]
    assert recipe["build"]["noarch"] == "python"
    assert recipe["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in PROJECT["scripts"].items()]
    about = recipe["about"]
    assert (about["license"], about["license_file"]) == (PROJECT["license"], PROJECT["license-files"])
    assert about["summary"] == PROJECT["description"] and about["homepage"] == PROJECT["urls"]["Homepage"]
    assert (RECIPE.parent / recipe["source"]["path"] / "pyproject.toml").is_file()


def test_every_variable_of_the_recipe_is_known(recipe: dict[str, Any]) -> None:
    """``PYTHON`` is the build tool's own."""
    named = set(re.findall(r"\$\{\{ (\w+) \}\}", RECIPE.read_text()))
    assert named <= {*recipe["context"], "PYTHON"}
