"""Which test files are nearest to what has changed."""

from __future__ import annotations

import pytest

from tests.nearest import changed_files, chosen, distances, imports, main

SOURCES = {
    "pack": "from pack.inner import Thing\nfrom pack.other import Else",
    "pack.inner": "class Thing: pass",
    "pack.other": "import pack.base\nclass Else: pass",
    "pack.base": "from math import pi",
    "tests.test_thing": "from pack import Thing",
    "tests.test_else": "from pack import Else as E\nfrom pack import inner",
}


def test_a_name_that_a_package_hands_on_leads_to_its_module() -> None:
    edges = imports(SOURCES)
    assert edges["tests.test_thing"] == {"pack.inner"}
    assert edges["tests.test_else"] == {"pack.inner", "pack.other"}
    assert edges["pack.other"] == {"pack.base"} and not edges["pack.base"]


def test_distances_are_the_fewest_imports() -> None:
    far = distances(imports(SOURCES), {"pack.base"})
    assert far == {"pack.base": 0, "pack.other": 1, "pack": 2, "tests.test_else": 2}
    assert distances({"a": {"b"}, "b": {"a"}}, {"a"}) == {"a": 0, "b": 1}


def test_the_nearest_are_chosen_as_long_as_there_is_time() -> None:
    far = {"changed": 0, "near": 1, "slow": 1, "far": 2, "farther": 3}
    seconds = {"changed": 100.0, "near": 3.0, "slow": 8.0, "far": 2.0, "farther": 4.0}
    assert chosen(far, seconds, 9.0) == ["changed", "near", "far", "farther"]


def test_a_branch_that_there_is_not_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="'no-such-branch' is no commit or branch"):
        changed_files("no-such-branch")
    assert main(["no-such-branch"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and len(printed.err.splitlines()) == 1
    assert main(["a", "b"]) == 2
