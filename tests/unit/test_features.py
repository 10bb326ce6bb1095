"""The page of features: it is what the marks say, and no row of it loses its tests unnoticed."""

from __future__ import annotations

import re

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


STRUCK = PAGE.replace("| Shuffle | `tests/test_a.py::test_both`", "| ~~Shuffle~~ | it never did")
BOTH = {"Feed: Shuffle": ["tests/test_a.py::test_it"], "Pools: Open": ["tests/test_b.py::test_it"]}


def test_a_struck_row_needs_no_test() -> None:
    assert "| ~~Shuffle~~ | it never did |\n" in page({"Pools: Open": BOTH["Pools: Open"]}, STRUCK)


@pytest.mark.parametrize(
    ("shown", "committed", "said"),
    [
        ({"Feed: Shuffle": ["a"]}, PAGE, "Pools: Open: no test has its mark; mark another one, or strike the row"),
        (BOTH, STRUCK, "Feed: Shuffle: is struck, but a test has its mark"),
        (BOTH, PAGE.replace("nobody did", ""), "Pools: Close: is struck without a reason"),
        (BOTH, PAGE.replace("nobody did |", ""), "Pools: | ~~Close~~ | : no test has its mark"),
        ({**BOTH, "Pools: Open": ["a", "b", "c", "d"]}, PAGE, "Pools: Open: more than 3 tests"),
    ],
)
def test_what_would_lose_a_row_is_refused_and_named(shown: dict[str, list[str]], committed: str, said: str) -> None:
    with pytest.raises(Refusal, match=re.escape(said)):
        page(shown, committed)
