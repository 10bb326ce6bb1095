"""Input of lowering: the numbers that all routines share, and the work on a batch. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.engine.partition.phase_programs import PhaseProgram, PhasePrograms
from onebox.engine.partition.sharding_spec import Members
from onebox.graph import ModelPrograms, Port
from onebox.plan import Action, MicroBatch, Routes, Schedule
from onebox.wire import Program, TensorSpec


@dataclass(frozen=True, kw_only=True)
class BufferNumbers:
    """Buffer numbers shared by all routines of a trainer and all workers.

    Args:
        state: Numbers of parameters and buffers, by name.
        optimizer: Number of the optimizer's definition.
        groups: Number of each communication group.
        new: Returns an unused number.
        previous: Numbers of trained parameters before the latest update, by name; empty if steps are exact.
        ahead: Numbers of trained parameters as predicted after the next update; empty without predictions.
        program: Returns the number of a program, given its cost on an emulated device; ``None`` if each routine numbers
            its own.
    """

    state: Mapping[str, int]
    optimizer: int
    groups: Mapping[Members, int]
    new: Callable[[], int]
    previous: Mapping[str, int] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    program: Callable[[Program, float], int] | None = None


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """Work on one batch.

    Args:
        micro_batches: The micro-batches.
        routes: The workers that compute each micro-batch.
        schedule: The schedule; for windows, the table of a steady-state window.
        models: The parts for each micro-batch size.
        constants: For each micro-batch size, the buffers of the model's constants.
        leaves: Tensors of inputs and targets.
        summed: Whether the loss of the batch is the sum of the micro-batches' losses, not their mean over samples.
    """

    micro_batches: Sequence[MicroBatch]
    routes: Routes
    schedule: Schedule
    models: Mapping[int, PhasePrograms]
    constants: Mapping[int, Mapping[str, int]]
    leaves: int
    summed: bool = False

    @property
    def batch(self) -> int:
        """Samples of the batch."""
        return sum(part.size for part in self.micro_batches)

    def part(self, worker: int, action: Action) -> PhaseProgram:
        """Return the part that a worker runs in an action."""
        return self.models[self.micro_batches[action.micro_batch].size].of(worker, action.stage, action.kind)

    def rows(self, port: Port, micro_batch: int) -> tuple[int, ...]:
        """Return the rows of each chunk of a value; empty if it is sent whole."""
        return self.models[self.micro_batches[micro_batch].size].rows(port)

    def programs(self, micro_batch: int) -> ModelPrograms:
        """Return the programs of the stages for a micro-batch."""
        return self.models[self.micro_batches[micro_batch].size].programs

    def weight(self, micro_batch: int) -> float:
        """Return the weight of a micro-batch's loss, if it is the same for all batches."""
        return 1.0 if self.summed else self.micro_batches[micro_batch].size / self.batch

    def loss(self, micro_batch: int) -> TensorSpec:
        """Return the spec of a micro-batch's loss."""
        for part in self.programs(micro_batch).phases.values():
            if Port("result", 0) in part.outputs:
                return part.specs()[Port("result", 0)]
        raise AssertionError("a model without a loss")
