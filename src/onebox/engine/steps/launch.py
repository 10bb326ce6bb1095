"""Launch of a training step: its inputs, and the messages with each worker's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.compile.update.async_window import Window
from onebox.engine.data.batch_transfer import BatchTransfer
from onebox.engine.data.prefetch import BatchPrefetcher
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.state.transfer import StateChanges
from onebox.engine.steps.results import StepLoss
from onebox.engine.workload.batch import Batch
from onebox.pool import Pool, WorkerReply
from onebox.wire.protocol.instructions import Ask, GroupDelays, Options
from onebox.wire.protocol.requests import Run


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
    """

    number: int
    batch: Batch
    options: tuple[Options, ...]
    loss: StepLoss
    parcel: BatchTransfer | None = None
    changes: StateChanges | None = None

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


def launch(
    pool: Pool,
    uploads: BatchPrefetcher,
    settings: StepSettings,
    work: StepRequest,
    compiled: CompiledStep,
    checks: Mapping[int, Sequence[tuple[Members, Ask]]],
    changed: tuple[Options, ...],
    *,
    window: Window = "steady",
    optimizer: int = 0,
) -> tuple[dict[int, Future[WorkerReply]], dict[int, int]]:
    """Send each worker its part of a step.

    Args:
        pool: The pool.
        uploads: The uploads of batches.
        settings: Settings shared by all steps.
        work: The step.
        compiled: Its routines.
        checks: Requests to each worker for comparing replicas.
        changed: The optimizer's options, if they differ from those of the previous step.
        window: The kind of window, where steps overlap.
        optimizer: The optimizer of the options, if the routines may not contain it.

    Returns:
        The pending replies, and the bytes on each worker that belong to no step while it computes this one: a worker
            processes messages in order, so that they are the same from the step's first instruction to its last.

    Raises:
        OneboxError: The pool is broken or closed; some workers may have received their part.
    """
    every = settings.check_every
    check = bool(every) and (work.number + 1) % every == 0

    answers: dict[int, Future[WorkerReply]] = {}
    with uploads.bringing(work.batch, compiled, work.parcel) as parts:
        beside = {worker: uploads.beside_bytes(worker) for worker in compiled.routines}
        for worker, routine in compiled.of(window).items():
            part = parts[worker]
            run = Run(routine.number, part.bindings, work.number, settings.seed, changed, settings.trace, optimizer)
            asks = [ask for _, ask in checks.get(worker, ())] if check else []
            answers[worker] = pool.post(worker, [*part.instructions, run, *asks], part.frames, answer=True)
    return answers, beside
