"""Files beside the code: one version everywhere, a complete source distribution, pages whose paths exist."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import onebox

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'^__version__ = "(.+)"$', source.read_text(), re.MULTILINE) == [onebox.__version__]
    assert f"\nversion: {onebox.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{onebox.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def read_by_tests() -> set[str]:
    """Return the first part of each path in this repository that a test or its fixtures name."""
    pattern = r'(?:\b_?(?:ROOT|REPOSITORY|repository)|parents\[\d\])\)? / "([^"]+)"'
    texts = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]
    return {name.partition("/")[0] for text in texts for name in re.findall(pattern, text)}


def test_the_source_distribution_has_all_that_tests_read_and_make_runs() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    named = read_by_tests()
    assert {"README.md", "docs", "examples", "benchmarks", "pyproject.toml"} <= named
    always = {"pyproject.toml", "src"}  # the first is there by itself; of the second, below
    for name in (named | {"tests", "Makefile", "constraints.txt", "LICENSE", ".ci", "THREATS.md"}) - always:
        assert any(fnmatch.fnmatch(f"/{name}", pattern) for pattern in included), name
    assert "/src" in included
    for pattern in included:
        assert list(ROOT.glob(pattern.removeprefix("/"))), f"{pattern} names nothing"


def test_licence_files_are_there() -> None:
    assert PROJECT["project"]["license-files"] == ["LICENSE", "src/onebox/feed/data/NOTICE"]
    assert all((ROOT / name).is_file() for name in PROJECT["project"]["license-files"])


def test_every_row_of_the_threats_names_a_test_that_exists() -> None:
    """A file without a folder is in the folder of the one that was named before it in the same row."""
    rows = [line.split(" | ") for line in (ROOT / "THREATS.md").read_text().splitlines() if line.startswith("| ")]
    rows = [cells for cells in rows if cells != ["| wants", "holds by", "shown by |"]]
    assert len(rows) > 45 and {len(cells) for cells in rows} == {3}
    for *_, shown in rows:
        named = re.findall(r"`([\w./-]+)`", shown)
        assert any(path.startswith("tests/") or path == "benchmarks/security.py" for path in named), shown
        folder = ROOT
        for path in named:
            found = folder / path if "/" not in path else ROOT / path
            assert found.is_file() and found.suffix == ".py", f"{path} in {shown}"
            folder = found.parent


PAGES = [
    *("CONTRIBUTING.md", "CHANGELOG.md", "README.md", "THREATS.md", "examples/README.md"),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_links_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = re.findall(r"`((?:src|tests|benchmarks|docs)/[\w./-]*)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    for link in re.findall(r"\]\(([^):]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []
