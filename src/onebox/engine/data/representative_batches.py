"""Batches of a run that stand for all the others: what they look like, and what has to fit."""

from __future__ import annotations

from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload.batch import Batch


class RepresentativeBatches:
    """The largest batch that was trained with so far, by its bytes, the newest, and the largest that was evaluated."""

    def __init__(self) -> None:
        self._largest: Batch | None = None
        self._newest: Batch | None = None
        self._evaluated: Batch | None = None

    def add(self, batch: Batch, *, steps: bool) -> None:
        """Take note of a batch.

        Args:
            batch: The batch.
            steps: Whether it is one to train with; else it is one to evaluate.
        """
        if steps:
            self._largest, self._newest = _larger(self._largest, batch), batch
        else:
            self._evaluated = _larger(self._evaluated, batch)

    @property
    def trains(self) -> bool:
        """Whether there has been a batch to train with."""
        return self._largest is not None

    @property
    def largest(self) -> Batch | None:
        """The largest batch that was trained with, or else evaluated."""
        return self._largest or self._evaluated

    @property
    def samples(self) -> int:
        """Samples of the largest batch that was trained with, as most batches have; 0 where there was none."""
        return self._largest.size if self._largest else 0

    def require_room(self, ready: InstalledPlan) -> None:
        """Require that what has fitted so far fits, and get ready for another batch like the newest.

        Raises:
            DeviceMemoryError: A step or an evaluation would need more than a device has, or may take.
        """
        for batch in (self._largest, self._newest):
            if batch is not None:
                ready.step(batch)
        if self._evaluated is not None:
            ready.at_once(self._evaluated, stepped=True)


def _larger(one: Batch | None, other: Batch) -> Batch:
    return one if one is not None and one.nbytes >= other.nbytes else other
