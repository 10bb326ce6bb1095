"""The page on launchers: its table is made from the cases that are tested, with the versions of the tested packages."""

from __future__ import annotations

from pathlib import Path

from tests.launchers.cases import CASES, pinned_versions, table

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "launchers.md").read_text()


def test_the_table_has_the_cases() -> None:
    assert table(pinned_versions()) in PAGE


def test_the_titles_of_cases_are_their_own() -> None:
    assert len({case.title for case in CASES}) == len(CASES) > 20
