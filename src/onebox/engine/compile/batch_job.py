"""What a lowering works from: the numbers that all routines share, and what is to be done with a batch. Pure data."""

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
    """Buffer numbers that all routines of a trainer share; a number means the same on every worker.

    Args:
        state: Of parameters and buffers, by name.
        optimizer: The optimizer's definition.
        groups: Of each set of workers that exchange something.
        new: Makes a number that nothing else has.
        previous: Of trained parameters as they were before the newest update, by name; none where steps are exact.
        ahead: Of what they are expected to be after the next one; none where nothing is expected.
        program: Returns the number of a program, given what it costs a device that computes nothing; ``None`` where
            each routine has its own.
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
    """What is to be done with a batch.

    Args:
        micro_batches: Its parts.
        routes: Who computes them.
        schedule: In which order; in windows, the table of a steady one.
        models: The parts for each size of a micro-batch.
        constants: For each size, the buffers of the model's constants.
        leaves: Tensors of inputs and targets.
        summed: Whether the loss of the batch is the sum of those of its parts, not their mean over samples.
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
        """Return what a worker runs in an action."""
        return self.models[self.micro_batches[action.micro_batch].size].of(worker, action.stage, action.kind)

    def rows(self, port: Port, micro_batch: int) -> tuple[int, ...]:
        """Return the rows of each chunk of a value that is sent in chunks; nothing where it is sent whole."""
        return self.models[self.micro_batches[micro_batch].size].rows(port)

    def programs(self, micro_batch: int) -> ModelPrograms:
        """Return the programs of the stages for a micro-batch."""
        return self.models[self.micro_batches[micro_batch].size].programs

    def weight(self, micro_batch: int) -> float:
        """Return the weight of a micro-batch's loss in that of the batch, where it is the same for all batches."""
        return 1.0 if self.summed else self.micro_batches[micro_batch].size / self.batch

    def loss(self, micro_batch: int) -> TensorSpec:
        """Return what the loss of a micro-batch is."""
        for part in self.programs(micro_batch).phases.values():
            if Port("result", 0) in part.outputs:
                return part.specs()[Port("result", 0)]
        raise AssertionError("a model without a loss")
