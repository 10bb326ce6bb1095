"""Sharded tensors (``DTensor``) on virtual devices, where PyTorch has no counterpart on the CPU to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.cases import BIN, TORCHRUN, result_of

SCRIPT = Path(__file__).with_name("sharded.py")


@pytest.mark.long
def test_shards_draw_numbers_of_their_own_and_attend_as_the_whole() -> None:
    line = [str(BIN / "onebox"), "run", "--pool", "cpu*2", "--threads", "1", *TORCHRUN, "2", str(SCRIPT)]
    first, second = result_of("sharded tensors", line, {})["losses"]
    assert first["drawn"] == second["drawn"], "the ranks' generators go on in one state"
    for name in ("shards", "given", "copies"):
        values = first["drawn"][name]
        assert len(set(values)) == len(values), name
    weight = [value for row in first["drawn"]["weight"] for value in row]
    assert len(set(weight)) == len(weight)
    assert set(first["drawn"]["shards"]).isdisjoint([*first["drawn"]["copies"], *first["drawn"]["after"]])
    assert max(first["error"], second["error"]) < 1e-5
