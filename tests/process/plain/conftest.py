"""Each test of cases runs for every case of its module and every way that the case is for."""

from __future__ import annotations

import pytest

from tests.process.plain.case import CASES, WAYS
from tests.process.plain.pending import pending


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each case and way."""
    if not {"case", "way"} <= set(metafunc.fixturenames):
        return
    made = []
    for case in CASES:
        if case.module != metafunc.module.__name__:
            continue
        for way in WAYS:
            if way in case.expected:
                topic = pending(case.name, way)
                marks = [] if topic is None else [pytest.mark.xfail(strict=True, reason=topic)]
                made.append(pytest.param(case, way, id=f"{case.name}-{way}", marks=marks))
    metafunc.parametrize(("case", "way"), made)
