"""Batches that stand for the others of a run."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from onebox.engine.data.representative_batches import RepresentativeBatches
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload.batch import Batch, as_batch
from onebox.errors import DeviceMemoryError


def batch(samples: int, length: int = 8) -> Batch:
    return as_batch(torch.zeros(samples, length), torch.zeros(samples))


class Room:
    """Something that is ready for batches of some lengths, and remembers what it was asked for."""

    def __init__(self, longest: int) -> None:
        self.asked: list[tuple[str, int]] = []
        self._longest = longest

    def step(self, batch: Batch) -> None:
        self._ask("step", batch)

    def at_once(self, batch: Batch, *, stepped: bool) -> bool:
        assert stepped
        self._ask("evaluation", batch)
        return True

    def _ask(self, what: str, batch: Batch) -> None:
        length = batch.leaves[0].shape[1]
        self.asked.append((what, length))
        if length > self._longest:
            raise DeviceMemoryError(f"{length} is too long")


def test_an_evaluation_or_a_short_batch_that_comes_first_stands_for_nothing_for_long() -> None:
    found = RepresentativeBatches()
    assert (found.largest, found.samples, found.trains) == (None, 0, False)
    baseline, tail, usual = batch(256), batch(3), batch(32)
    found.add(baseline, steps=False)
    assert (found.largest, found.samples, found.trains) == (baseline, 0, False)
    found.add(tail, steps=True)
    assert (found.largest, found.samples, found.trains) == (tail, 3, True)
    found.add(usual, steps=True)
    found.add(tail, steps=True)
    assert (found.largest, found.samples) == (usual, 32)


def test_all_that_has_fitted_has_to_fit() -> None:
    found = RepresentativeBatches()
    for length in (16, 64, 32):
        found.add(batch(4, length), steps=True)
    found.add(batch(4, 48), steps=False)
    room = Room(64)
    found.require_room(cast(InstalledPlan, room))
    assert room.asked == [("step", 64), ("step", 32), ("evaluation", 48)]
    for longest in (40, 63):
        with pytest.raises(DeviceMemoryError, match="64 is too long"):
            found.require_room(cast(InstalledPlan, Room(longest)))
    found.add(batch(4, 80), steps=False)
    with pytest.raises(DeviceMemoryError, match="80 is too long"):
        found.require_room(cast(InstalledPlan, room))
