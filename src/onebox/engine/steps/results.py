"""Results that arrive later: the loss of a step, and what an evaluation found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from onebox.engine.compile.routine import InstructionLabel, StepRoutine
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.workload.late_number import LateNumber
from onebox.engine.workload.loss_reduction import total_of
from onebox.errors import OneboxError, OperatorError, ReplicasParted, UsageError
from onebox.plan import Action
from onebox.pool import WorkerReply, raise_first
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import Digest, Scalars


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """What a finished step says.

    Args:
        loss: Mean loss over the batch.
        gradient_norm: 2-norm of all gradients before clipping; ``None`` without clipping.
    """

    loss: float
    gradient_norm: float | None


def step_values(
    step: int,
    weights: Sequence[float],
    routines: Mapping[int, StepRoutine],
    answers: Sequence[WorkerReply],
    checks: Mapping[int, Sequence[tuple[Members, Ask]]],
) -> StepValues:
    """Put together what the workers answered to a step.

    Args:
        step: Its number.
        weights: Of the loss of each part of the batch.
        routines: What each worker ran.
        answers: What each answered, in the same order.
        checks: Whose hashes must be equal, for each worker, in the order in which it was asked.

    Raises:
        ReplicasParted: Some are not.
    """
    total, norm = 0.0, None
    digests: dict[Members, set[bytes]] = {}
    for (worker, routine), answer in zip(routines.items(), answers, strict=True):
        scalars = [value for result in answer.results if isinstance(result, Scalars) for value in result.values]
        losses = scalars[len(scalars) - len(routine.results) :]
        total += total_of(losses, [weights[micro_batch] for micro_batch, _ in routine.results])
        norm = scalars[0] if len(scalars) > len(losses) else norm
        hashes = [result.value for result in answer.results if isinstance(result, Digest)]
        for (members, _), digest in zip(checks.get(worker, ()) if hashes else (), hashes, strict=True):
            digests.setdefault(members, set()).add(digest)
    if any(len(found) > 1 for found in digests.values()):
        raise ReplicasParted(
            f"after step {step} the replicas are no longer bit-identical; resume from the last checkpoint, and "
            "look for faulty memory or an operator that is not deterministic"
        )
    return StepValues(loss=total, gradient_norm=norm)


class StepLoss(LateNumber):
    """The loss of a training step: a number that arrives later. Asking for it waits.

    It can be used wherever a ``float`` can: ``loss < best``, ``total += loss``, ``f"{loss:.3f}"``, ``np.mean(losses)``,
    ``scheduler.step(loss)``. Each of these waits for the step to end; keep the losses, and look at them later, where
    steps are to overlap. Where the very type ``float`` is looked for, convert it: ``json.dumps(log, default=float)``,
    ``torch.tensor([float(loss) for loss in losses])`` (or ``torch.stack(losses)``).

    Args:
        step: The step.
        failed: Called when it has failed; returns when the step is on its way again, else raises why it is not.
        drain: Lets the gradients be applied, and waits for it, where that would come with the next step.
    """

    def __init__(
        self, step: int, failed: Callable[[Exception], None], drain: Callable[[], None] = lambda: None
    ) -> None:
        self.step = step
        self._failed = failed
        self._drain = drain
        self._norm: float | None = None
        self._norm_comes = False
        self._update: Callable[[], object] | None = None
        self._futures: list[Future[WorkerReply]] = []
        self._finish: Callable[[list[WorkerReply]], StepValues] | None = None
        self._values: StepValues | None = None
        self._error: BaseException | None = None

    def expect(self, futures: list[Future[WorkerReply]], finish: Callable[[list[WorkerReply]], StepValues]) -> None:
        """Wait for these answers from now on; a step that has been read stays as it was.

        Args:
            futures: What the workers answer.
            finish: Puts it together.
        """
        if self._values is None:
            self._futures, self._finish = futures, finish

    def expect_norm(self) -> None:
        """Expect the norm of the gradients when these are applied, which is not in the step's own answers."""
        self._norm_comes, self._update = self._norm is None, None

    def expect_update(self, wait: Callable[[], object]) -> None:
        """Take note of what waits until the gradients have been applied, and :meth:`updated` has been called."""
        self._update = wait if self._norm_comes else None

    def updated(self, norm: float | None) -> None:
        """Take note that the gradients have been applied, and of their norm."""
        self._norm, self._norm_comes, self._update = norm, False, None

    @property
    def ended(self) -> bool:
        """Whether its values are known."""
        return self._values is not None

    @property
    def done(self) -> bool:
        """Whether the step has ended."""
        return self._values is not None or all(future.done() for future in self._futures)

    def values(self) -> StepValues:
        """Wait for the step to end.

        Raises:
            OneboxError: The step failed.
        """
        if self._error is not None:
            raise self._error
        while self._values is None:
            assert self._finish is not None
            try:
                self._values = self._finish(raise_first(self._futures))
            except Exception as error:
                self._try_again(error)
        self._futures, self._finish = [], None
        return self._values

    def _try_again(self, error: Exception) -> None:
        try:
            self._failed(error)
        except Exception as final:
            self._error = final
            raise

    def item(self) -> float:
        """Wait for the step to end and return its loss, the mean over the samples of the batch."""
        return self.values().loss

    @property
    def gradient_norm(self) -> float | None:
        """The 2-norm of all gradients before clipping; ``None`` without ``clip_grad_norm``. Waits.

        Where steps overlap, it is known with the next one. Asked for before that has begun, it ends the overlap.
        """
        values = self.values()
        while self._norm_comes:
            if self._update is not None:
                self._update()
                continue
            self._drain()
            if self._norm_comes and self._update is None:
                raise UsageError(f"the gradients of step {self.step} have not been applied, and the trainer is closed")
        return values.gradient_norm if self._norm is None else self._norm

    def __repr__(self) -> str:
        return f"StepLoss(step={self.step}, {self.item() if self._values else 'not asked for yet'})"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found.

    Args:
        loss: Mean loss over all samples.
        metrics: Mean of each metric over all samples, by name.
        samples: How many samples.
    """

    loss: float
    metrics: Mapping[str, float]
    samples: int


@dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """Something that a worker did, for a timeline.

    Args:
        worker: Its number.
        track: ``compute``; ``transfer``: from the moment that something is handed over, or asked for, until it has
            arrived; or ``other``: what an engine does beside.
        name: What it did.
        step: The training step in whose window it was: where steps overlap, what is left of one is in the window of the
            next, and so is what is left of the last one.
        start_ns: When it began, on the monotonic clock.
        end_ns: When it ended.
        action: The action of the plan's schedule that was computed, if it was one, with the number that its micro-batch
            has in its own step.
        late: Whether that is the step before.
        peak_bytes: The most bytes that the worker had in use meanwhile, by its own accounting.
        used_bytes: Those in use after it.
    """

    worker: int
    track: str
    name: str
    step: int
    start_ns: int
    end_ns: int
    action: Action | None = None
    late: bool = False
    peak_bytes: int = 0
    used_bytes: int = 0

    @property
    def begun(self) -> int:
        """The step that the action's micro-batch is of."""
        return self.step - self.late


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """When the workers did what in one step, and what memory it took.

    Args:
        step: The training step; of what was left of one, and not done in the window of the next, that next one all the
            same.
        workers: For each worker, what its instructions are, start and end of each, and peak and use of memory of each.
        micro_batches: How many a step has; those of the step before have negative numbers, -1 is its last one.
    """

    step: int
    workers: Mapping[int, tuple[Sequence[InstructionLabel], tuple[int, ...], tuple[int, ...]]]
    micro_batches: int = 0

    def events(self) -> list[TraceEvent]:
        """Return what happened."""
        return [
            TraceEvent(
                worker=worker,
                track=label.track,
                name=label.name,
                step=self.step,
                start_ns=times[2 * index],
                end_ns=times[2 * index + 1],
                action=self._in_its_step(label.action),
                late=label.action is not None and label.action.micro_batch < 0,
                peak_bytes=memory[2 * index],
                used_bytes=memory[2 * index + 1],
            )
            for worker, (labels, times, memory) in self.workers.items()
            for index, label in enumerate(labels)
        ]

    def _in_its_step(self, action: Action | None) -> Action | None:
        """Return an action with the number that its micro-batch has in its own step."""
        if action is None or action.micro_batch >= 0:
            return action
        return action._replace(micro_batch=action.micro_batch + self.micro_batches)


_BEHIND_ACTIONS = ("accumulate", "free")
"""What is done right behind an action, and belongs to it."""


def locate(error: OperatorError, labels_of: Callable[[int, int], Sequence[InstructionLabel]]) -> None:
    """Let an error say what of a step failed, as far as that is known.

    Args:
        error: The error.
        labels_of: Returns what the instructions of a worker's routine are, given the two numbers.
    """
    if error.instruction is None:
        return
    routine, place = error.instruction
    labels = () if error.worker is None else labels_of(error.worker, routine)
    if 0 <= place < len(labels):
        before = (label.action for label in reversed(labels[: place + 1]) if label.action is not None)
        own = labels[place].action or (next(before, None) if labels[place].name in _BEHIND_ACTIONS else None)
        error.located(labels[place].name, own.stage if own else None)


@contextlib.contextmanager
def poison_on_interrupt(what: str, fail: Callable[[Exception], None]) -> Iterator[None]:
    """Let something be told to all devices, or fail for good where it is interrupted and some may have been told only.

    Args:
        what: What that is.
        fail: Takes what every later call is to say; errors of onebox itself are left to the caller.
    """
    try:
        yield
    except OneboxError:
        raise
    except BaseException:  # such as KeyboardInterrupt
        fail(interruption_error(what))
        raise


def interruption_error(what: str) -> ReplicasParted:
    """Return the error of what has been begun by some devices and not by others, such as by KeyboardInterrupt.

    Args:
        what: What that is.
    """
    return ReplicasParted(
        f"{what} was interrupted when some devices had it and others not; make another trainer, or resume from the "
        "last checkpoint"
    )
