"""Values of the launch of a training step: settings, inputs, programs, and the launched step."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.compile.update.async_window import Window
from onebox.engine.data.batch_transfer import BatchTransfer
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.state.transfer import StateChanges
from onebox.engine.steps.results import StepLoss
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.index_ranges import IndexRange
from onebox.pool import WorkerReply
from onebox.wire.protocol.instructions import GroupDelays, Options
from onebox.wire.protocol.requests import SetNumerics


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """Inputs of a training step, sufficient to repeat it.

    Args:
        number: Number of the step, part of the seed of its random operators.
        batch: Its batch.
        options: The optimizer's options for each parameter group.
        loss: The loss object returned to the user.
        parcel: The upload of the batch, if it was uploaded ahead.
        changes: User changes of the state before it.
        check_nan: Whether a gradient that is not a number fails it: PyTorch's anomaly detection was on.
    """

    number: int
    batch: Batch
    options: tuple[Options, ...]
    loss: StepLoss
    parcel: BatchTransfer | None = None
    changes: StateChanges | None = None
    check_nan: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the batch and of user changes."""
        return self.batch.nbytes + (self.changes.size_bytes if self.changes else 0)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings shared by all steps of a trainer.

    Args:
        seed: The run's seed.
        trace: Whether workers time their instructions.
        check_every: Interval, in steps, at which replicas compare hashes; 0 for never.
        in_flight: Most steps in flight.
        max_norm: Gradient clipping norm; 0 for none.
        staleness: Age, in steps, of the weights that a step may be computed with.
        delay: Treatment of the gradients that are late as a result, for all parameter groups or for each.
        warm_up: Number of steps before the first one with older weights.
        overlap: Whether exact steps overlap: the rest of a step's update is done in the next step, where it is needed.
        numerics: Instructions before each run that set precision and determinism.
    """

    seed: int
    trace: bool
    check_every: int
    in_flight: int
    max_norm: float
    staleness: int = 0
    delay: GroupDelays = "none"
    warm_up: int = 0
    overlap: bool = False
    numerics: tuple[SetNumerics, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedStep:
    """Everything that steps with batches of one shape need of the plan in use, looked up once for each step.

    Args:
        installed: The installed plan.
        compiled: The routines, which the workers have.
        compared: Whether the loss of each batch must be checked; see
            :class:`~onebox.engine.steps.loss_check.MeanLossCheck`.
        ranges: The ranges of its integers.
    """

    installed: InstalledPlan
    compiled: CompiledStep
    compared: bool = False
    ranges: tuple[IndexRange, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class LaunchedStep:
    """A step of which every worker has its part.

    Args:
        work: The step.
        prepared: Its programs.
        window: The kind of window, where steps overlap.
        beside: Bytes on each worker that belong to no step while it computes this one: a worker processes messages in
            order, so that they are the same from the step's first instruction to its last.
        answers: The workers' pending replies.
    """

    work: StepRequest
    prepared: PreparedStep
    window: Window
    beside: Mapping[int, int]
    answers: Mapping[int, Future[WorkerReply]]
