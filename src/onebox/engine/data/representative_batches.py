"""Representative batches of a run, for shapes and memory requirements."""

from __future__ import annotations

from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload.batch import Batch


class RepresentativeBatches:
    """The largest training batch so far, by bytes, the latest one, and the largest evaluation batch."""

    def __init__(self) -> None:
        self._largest: Batch | None = None
        self._newest: Batch | None = None
        self._evaluated: Batch | None = None

    def add(self, batch: Batch, *, steps: bool) -> None:
        """Record a batch.

        Args:
            batch: The batch.
            steps: Whether it is a training batch; else it is an evaluation batch.
        """
        if steps:
            self._largest, self._newest = _larger(self._largest, batch), batch
        else:
            self._evaluated = _larger(self._evaluated, batch)

    @property
    def trains(self) -> bool:
        """True if there is a training batch."""
        return self._largest is not None

    @property
    def largest(self) -> Batch | None:
        """The largest training batch, or else the largest evaluation batch."""
        return self._largest or self._evaluated

    @property
    def samples(self) -> int:
        """Samples of the largest training batch, the typical size; 0 if there is none."""
        return self._largest.size if self._largest else 0

    def require_room(self, ready: InstalledPlan) -> None:
        """Require that every kind of batch so far still fits, and prepare for another batch like the latest.

        Raises:
            DeviceMemoryError: A step or an evaluation needs more memory than a device has, or may use.
        """
        for batch in (self._largest, self._newest):
            if batch is not None:
                ready.step(batch)
        if self._evaluated is not None:
            ready.at_once(self._evaluated, stepped=True)


def _larger(one: Batch | None, other: Batch) -> Batch:
    return one if one is not None and one.nbytes >= other.nbytes else other
