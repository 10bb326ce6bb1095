"""Values: numbers and channels that the routines of all workers for one job share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onebox.engine.compile.batch_job import BatchJob
from onebox.graph import Port


class ValueNumbers:
    """Numbers and channels of values, their producers and readers.

    In windows a micro-batch with a negative number belongs to the previous step: its values have other numbers and the
    same channels.

    Args:
        job: The job.
        new: Returns an unused number.
        ranks: For each worker, its rank in its replica.
    """

    def __init__(self, job: BatchJob, new: Callable[[], int], ranks: Mapping[int, int]) -> None:
        self._job = job
        self._ranks = ranks
        self._new = new
        self._count = len(job.micro_batches)
        self._numbers: dict[tuple[Port, int], int] = {}
        self._channels: dict[tuple[Port, int, int], int] = {}
        self._makers: dict[int, dict[Port, int]] = {}
        for size, parts in job.models.items():
            phases = parts.programs.phases.items()
            outputs = ((port, phase.stage) for phase, part in phases for port in part.outputs)
            self._makers[size] = {port: stage for port, stage in outputs if port.kind == "value"}
        self._readers: dict[tuple[Port, int], set[int]] = {}
        for worker, row in job.schedule.rows.items():
            for action in row:
                for port in job.part(worker, action).inputs:
                    if port.kind == "value":
                        key = (port, action.micro_batch % self._count)
                        self._readers.setdefault(key, set()).add(worker)

    def number(self, port: Port, micro_batch: int) -> int:
        """Return the buffer of a value of a micro-batch, or of its weight, result, or leaf."""
        key = (port, micro_batch % self._count if port.kind == "weight" else micro_batch)
        if key not in self._numbers:
            self._numbers[key] = self._new()
        return self._numbers[key]

    def channel(self, port: Port, micro_batch: int, target: int) -> int:
        """Return the channel on which a value travels to a worker."""
        return self._channels.setdefault((port, micro_batch % self._count, target), len(self._channels))

    def maker(self, port: Port, micro_batch: int, reader: int) -> int:
        """Return the worker that computes a value, or its shard, for a reader."""
        stage = self.stage_of(port, micro_batch)
        replica = self._job.routes[stage][micro_batch]
        return reader if reader in replica else replica[self._ranks.get(reader, 0) % len(replica)]

    def stage_of(self, port: Port, micro_batch: int) -> int:
        """Return the stage that computes a value."""
        return self._makers[self._job.micro_batches[micro_batch].size][port]

    def readers(self, port: Port, micro_batch: int) -> set[int]:
        """Return the workers that read a value."""
        return self._readers.get((port, micro_batch % self._count), set())
