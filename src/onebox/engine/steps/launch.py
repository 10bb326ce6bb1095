"""A training step on its way: what it is given, and the messages that bring each worker its part."""

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
    """What a training step is given; enough to do it again.

    Args:
        number: The step, part of the seed of everything random in it.
        batch: Its batch.
        options: The optimizer's options of each parameter group.
        loss: What the user got for it.
        parcel: The batch as it was uploaded ahead, if it was.
        changes: What was changed by hand in the state before it.
    """

    number: int
    batch: Batch
    options: tuple[Options, ...]
    loss: StepLoss
    parcel: BatchTransfer | None = None
    changes: StateChanges | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the batch, and of changes by hand."""
        return self.batch.nbytes + (self.changes.size_bytes if self.changes else 0)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What is the same for all steps of a trainer.

    Args:
        seed: The run's seed.
        trace: Whether workers time their instructions.
        check_every: Every so many steps replicas compare hashes; 0 for never.
        in_flight: Steps that may be under way at once.
        max_norm: For clipping; 0 for none.
        staleness: How many steps old the weights may be that a step is computed with.
        delay: What is done about gradients that are late because of it, in all parameter groups or in each.
        warm_up: So many steps come before the first that is computed with older weights.
        overlap: Whether exact steps overlap: what is left of the update of one comes in the next, where it is needed.
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
        uploads: What brings batches to the workers.
        settings: What is the same for all steps.
        work: The step.
        compiled: Its routines.
        checks: What each worker is asked when replicas are compared.
        changed: The optimizer's options, if they are others than those of the step before.
        window: Which of the routines, where steps overlap.
        optimizer: Which the options are for, where the routines may not step it.

    Returns:
        The answers to come, and the bytes of each worker that are no step's while it computes this one: a worker takes
        what it gets in order, so that they are the same from its first instruction to its last.

    Raises:
        OneboxError: The pool is broken or closed; some workers may have got their part.
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
