"""The page of features: it is what the marks say, and no row of it loses its tests unnoticed."""

from __future__ import annotations

import pytest

from tests.features import FILE, INTRODUCTION, Refusal, marks, page, sources

TEST = '@pytest.mark.feature("Feed: Shuffle")\n@pytest.mark.feature("Pools: Open")\ndef test_both(): ...\n'
PAGE = f"""\
{INTRODUCTION}
## Feed

| feature | test |
|---|---|
| Shuffle | `tests/test_a.py::test_both` |

## Pools

| feature | test |
|---|---|
| ~~Close~~ | nobody did |
| Open | `tests/test_a.py::test_both`, `tests/test_b.py::test_both` |
"""


def test_the_page_is_what_the_marks_say() -> None:
    committed = FILE.read_text(encoding="utf-8")
    assert page(marks(sources()), committed) == committed, "python -m tests.features"


def test_marks_of_several_files_and_what_was_struck() -> None:
    shown = marks(
        [("tests/test_a.py", TEST), ("tests/test_b.py", TEST.partition("\n")[2]), ("tests/test_c.py", "x = 1")]
    )
    assert shown["Pools: Open"] == ["tests/test_a.py::test_both", "tests/test_b.py::test_both"]
    struck = "## Pools\n| ~~Close~~ | nobody did |"
    assert page(shown, struck) == page(shown, PAGE) == PAGE


@pytest.mark.parametrize("mark", ["", "()", "(name)", '("No area")', '("A: b", "A: c")', '("A: b | c")'])
def test_a_mark_that_is_not_one_literal_text_is_refused(mark: str) -> None:
    with pytest.raises(Refusal, match=r"tests/test_a\.py:1: a mark is"):
        marks([("tests/test_a.py", f"@pytest.mark.feature{mark}\ndef test_it(): ...\n")])


def test_a_row_that_loses_its_tests_is_refused_and_named() -> None:
    shown = {"Feed: Shuffle": ["tests/test_a.py::test_both"]}
    with pytest.raises(Refusal, match=r"^Pools: Open: no test has its mark any more; mark another one, or strike"):
        page(shown, PAGE)
    assert "| ~~Open~~ | it never did |" in page(shown, PAGE.replace("| Open | `", "| ~~Open~~ | it never did |\n`"))


def test_a_struck_row_has_a_reason_and_no_test() -> None:
    shown = {"Feed: Shuffle": ["a"], "Pools: Open": ["b"], "Pools: Close": ["c"]}
    with pytest.raises(Refusal, match=r"^Pools: Close: is struck, but"):
        page(shown, PAGE)
    with pytest.raises(Refusal, match=r"^Pools: Keep: is struck without"):
        page(shown, "## Pools\n| ~~Keep~~ |  |")


def test_a_feature_has_few_tests() -> None:
    with pytest.raises(Refusal, match=r"^Pools: Open: more than 3 tests"):
        page({"Pools: Open": [f"tests/test_a.py::test_{each}" for each in range(4)]}, "")
