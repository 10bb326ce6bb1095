"""Random programs of views and writes on virtual devices against the CPU; see :mod:`.aliasing`.

The long run is ``python benchmarks/aliasing.py``.
"""

from __future__ import annotations

import os

import pytest

from onebox.vgpu import attach
from tests.kit.pools import Pools
from tests.process.plain.aliasing import Writer, fuzzed

FIRST = int(os.environ.get("ONEBOX_FUZZ_SEED", "0"))
FEW, MORE, MANY = 30, 100, 1000


def test_a_seed_gives_one_program() -> None:
    first, again = Writer(FIRST).write(), Writer(FIRST).write()
    assert first.text() == again.text()
    assert Writer(FIRST + 1).write().text() != first.text()


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(FIRST, FIRST + FEW), marks=pytest.mark.short),
        pytest.param(range(FIRST + FEW, FIRST + MORE), marks=pytest.mark.long),
        pytest.param(range(FIRST + MORE, FIRST + MANY), marks=pytest.mark.soak),
    ],
    ids=["few", "more", "many"],
)
def test_aliases_are_what_they_are_on_the_cpu(seeds: range, pools: Pools) -> None:
    attach(pools(2))
    counts, reports = fuzzed(seeds)
    assert not reports, "\n\n".join(reports[:3])
    assert counts["equal"] > len(seeds) // 3, counts
