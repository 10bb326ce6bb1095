"""Which tests are of which tier, and how many examples they have there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SEEN: list[int] = []
ASKED = 40


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(5))
def test_a_sample_of_cases_is_evenly_spread(case: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("long") is None) == (case in (0, 3))


@settings(max_examples=ASKED)
@given(st.integers())
def test_a_property(number: int) -> None:
    SEEN.append(number)


def test_a_property_has_a_quarter_of_its_examples_in_the_short_tier() -> None:
    usual = settings.default
    assert usual is not None
    assert (usual.max_examples, usual.derandomize) in ((25, True), (100, False))
    assert len(SEEN) in (0, ASKED * usual.max_examples // 100)
