"""Results that arrive later: losses of steps, and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import fx

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.compile.routine import InstructionLabel, StepRoutine
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.workload.late_number import LateNumber
from onebox.engine.workload.loss_reduction import total_of
from onebox.errors import OperatorError, ReplicasParted, UsageError
from onebox.graph import Phase
from onebox.graph.capture.locate import layer_of_node, place_of_node
from onebox.plan import Action
from onebox.pool import WorkerReply, raise_first
from onebox.wire.protocol.instructions import Ask, Call
from onebox.wire.protocol.responses import Digest, LinkTraffic, Scalars


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """Values of a completed step.

    Args:
        loss: Mean loss over the batch.
        gradient_norm: 2-norm of all gradients before clipping; ``None`` without clipping.
        results: Further results of each micro-batch, by number of the result and of the micro-batch.
        fault: Reason why the loss is no mean over samples, which only the step has shown; it is applied all the same.
    """

    loss: float
    gradient_norm: float | None
    results: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    fault: UsageError | None = None


def step_values(
    step: int,
    weights: Sequence[float],
    routines: Mapping[int, StepRoutine],
    answers: Sequence[WorkerReply],
    checks: Mapping[int, Sequence[tuple[Members, Ask]]],
) -> StepValues:
    """Combine the workers' replies to a step.

    Args:
        step: Its number.
        weights: Loss weight of each micro-batch.
        routines: Routine of each worker.
        answers: Reply of each worker, in the same order.
        checks: For each worker, the groups whose hashes must be equal, in the order of the requests.

    Raises:
        ReplicasParted: Some hashes differ.
    """
    total, norm = 0.0, None
    others: dict[int, dict[int, float]] = {}
    digests: dict[Members, set[bytes]] = {}
    for (worker, routine), answer in zip(routines.items(), answers, strict=True):
        scalars = [value for result in answer.results if isinstance(result, Scalars) for value in result.values]
        told = scalars[len(scalars) - len(routine.results) :]
        places = dict(zip(routine.results, told, strict=True))
        losses = {micro_batch: value for (micro_batch, number), value in places.items() if not number}
        total += total_of(list(losses.values()), [weights[micro_batch] for micro_batch in losses])
        for (micro_batch, number), value in places.items():
            if number:
                others.setdefault(number, {})[micro_batch] = value
        norm = scalars[0] if len(scalars) > len(told) else norm
        hashes = [result.value for result in answer.results if isinstance(result, Digest)]
        for (members, _), digest in zip(checks.get(worker, ()) if hashes else (), hashes, strict=True):
            digests.setdefault(members, set()).add(digest)
    if any(len(found) > 1 for found in digests.values()):
        raise ReplicasParted(
            f"after step {step} the replicas are no longer bit-identical; resume from the last checkpoint, and "
            "look for faulty memory or an operator that is not deterministic"
        )
    return StepValues(loss=total, gradient_norm=norm, results=others)


Retry = Callable[[Callable[[], StepValues]], StepValues]
"""Calls a function until it succeeds or cannot be repeated."""


class StepLoss(LateNumber):
    """The loss of a training step: a number that arrives later. Reading it waits.

    It can be used wherever a ``float`` can: ``loss < best``, ``total += loss``, ``f"{loss:.3f}"``, ``np.mean(losses)``,
    ``scheduler.step(loss)``. Each of these waits for the step to end; to let steps overlap, keep the losses and read
    them later. Where the exact type ``float`` is required, convert it: ``json.dumps(log, default=float)``,
    ``torch.tensor([float(loss) for loss in losses])`` (or ``torch.stack(losses)``).

    :meth:`onebox.Trainer.step` makes it.
    """

    def __init__(self, step: int, retry: Retry, drain: Callable[[], None] = lambda: None) -> None:
        """Begin without a value.

        Args:
            step: The step.
            retry: Calls a function; if it fails, restarts the step and calls the function again, or raises the error.
            drain: Applies the gradients and waits for that, if it would happen in the next step.
        """
        self.step = step
        self._retry = retry
        self._drain = drain
        self._norm: float | None = None
        self._norm_comes = False
        self._update: Callable[[], object] | None = None
        self._futures: list[Future[WorkerReply]] = []
        self._finish: Callable[[list[WorkerReply]], StepValues] | None = None
        self._values: StepValues | None = None
        self._error: BaseException | None = None
        self._told = False

    def expect(self, futures: list[Future[WorkerReply]], finish: Callable[[list[WorkerReply]], StepValues]) -> None:
        """Set the replies to wait for; a step whose values have been read is not changed.

        Args:
            futures: The workers' replies.
            finish: Combines them.
        """
        if self._values is None:
            self._futures, self._finish = futures, finish

    def expect_norm(self) -> None:
        """Expect the gradient norm when the gradients are applied; it is not in the step's own replies."""
        self._norm_comes, self._update = self._norm is None, None

    def expect_update(self, wait: Callable[[], object]) -> None:
        """Set the function that waits until the gradients have been applied and :meth:`updated` has been called."""
        self._update = wait if self._norm_comes else None

    def updated(self, norm: float | None) -> None:
        """Record that the gradients have been applied, with their norm."""
        self._norm, self._norm_comes, self._update = norm, False, None

    @property
    def ended(self) -> bool:
        """True if its values are known."""
        return self._values is not None

    @property
    def failed(self) -> bool:
        """True if its error has been raised."""
        return self._error is not None

    @property
    def done(self) -> bool:
        """Return whether the step has ended."""
        return self._values is not None or all(future.done() for future in self._futures)

    @property
    def pending(self) -> tuple[Future[WorkerReply], ...]:
        """The workers' replies that its values wait for."""
        return tuple(self._futures)

    def values(self) -> StepValues:
        """Wait for the step to end.

        Raises:
            OneboxError: The step failed.
        """
        if self._error is not None:
            raise self._error
        if self._values is None:
            try:
                self._values = self._retry(self._read)
            except Exception as error:
                self._error = error
                raise
        self._futures, self._finish = [], None
        return self._values

    def _read(self) -> StepValues:
        """Wait for the replies and combine them; both are others after the step has been restarted."""
        assert self._finish is not None
        try:
            return self._finish(raise_first(self._futures))
        except OperatorError as error:
            if error.kept and not error.steps:
                error.steps = (self.step,)
            elif error.kept and error.steps != (self.step,):
                which = " and ".join(map(str, error.steps))
                own = "" if self.step in error.steps else f"; step {self.step} was made, but its loss is not known"
                error.add_note(f"Left out: step {which}, of which a part was computed with step {self.step}{own}.")
            raise

    def item(self) -> float:
        """Wait for the step to end and return its loss, the mean over the samples of the batch.

        Raises:
            UsageError: The step has shown that the loss is no mean over samples.
            OneboxError: The step failed.
        """
        values = self.values()
        if values.fault is not None:
            self._told = True
            raise values.fault
        return values.loss

    @property
    def untold_fault(self) -> UsageError | None:
        """The fault of the step if it has ended with one, and nobody has read it."""
        return self._values.fault if self._values is not None and not self._told else None

    def tell_fault(self) -> None:
        """Raise the fault of the step that nobody has read, once.

        Raises:
            UsageError: There is one.
        """
        if (fault := self.untold_fault) is not None:
            self._told = True
            raise fault

    @property
    def gradient_norm(self) -> float | None:
        """The 2-norm of all gradients before clipping; ``None`` without ``clip_grad_norm``. Waits.

        Where steps overlap, it is computed in the next step. Reading it before that has begun ends the overlap.
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
    """Result of an evaluation.

    Args:
        loss: Mean loss over all samples.
        metrics: Mean of each metric over all samples, by name.
        samples: Number of samples.
    """

    loss: float
    metrics: Mapping[str, float]
    samples: int


@dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """Activity of a worker, for a timeline.

    Args:
        worker: Its number.
        track: ``compute``; ``transfer``: from the send or the request until arrival; or ``other``: further work of the
            engine.
        name: Description.
        step: The training step of its window: where steps overlap, the rest of a step is in the window of the next, and
            so is the rest of the last step.
        start_ns: Beginning, on the monotonic clock.
        end_ns: End.
        action: The action of the plan's schedule, if it is one, with the number of the micro-batch in its own step.
        late: Whether the action belongs to the previous step.
        peak_bytes: Peak bytes in use on the worker during it, by the worker's own count.
        used_bytes: Bytes in use after it.
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
        """Number of the step that the action's micro-batch belongs to."""
        return self.step - self.late


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Times and memory of the workers' instructions in one step.

    Args:
        step: The training step; for the rest of a step that is drained, the number of the next step.
        workers: For each worker, the label, start, end, and memory peak and use of each instruction.
        micro_batches: Number of micro-batches per step; those of the previous step have negative numbers, -1 is its
            last one.
        traffic: What connections between hosts carried meanwhile, by their source and target.
    """

    step: int
    workers: Mapping[int, tuple[Sequence[InstructionLabel], tuple[int, ...], tuple[int, ...]]]
    micro_batches: int = 0
    traffic: Mapping[tuple[int, int], LinkTraffic] = field(default_factory=dict)

    def events(self) -> list[TraceEvent]:
        """Return the events."""
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
        """Return an action with the number of its micro-batch in its own step."""
        if action is None or action.micro_batch >= 0:
            return action
        return action._replace(micro_batch=action.micro_batch + self.micro_batches)


_BEHIND_ACTIONS = ("accumulate", "free")
"""Operations right after an action that belong to it."""


def locate(error: OperatorError, find: Callable[[int, int], tuple[CompiledStep, StepRoutine] | None]) -> None:
    """Add to an error the location of the failure in the step, and in the model, as far as it is known.

    Args:
        error: The error.
        find: Returns a worker's routine and its step, given the two numbers.
    """
    if error.instruction is None or error.worker is None:
        return
    number, place = error.instruction
    found = find(error.worker, number)
    if found is None or not 0 <= place < len(found[1].labels):
        return
    compiled, routine = found
    label = routine.labels[place]
    before = (one.action for one in reversed(routine.labels[: place + 1]) if one.action is not None)
    own = label.action or (next(before, None) if label.name in _BEHIND_ACTIONS else None)
    node = _node(error, compiled, routine, place)
    line = None if node is None else place_of_node(node)
    error.located(
        label.name,
        own.stage if own else None,
        "" if node is None else layer_of_node(node),
        None if line is None else (str(line), line.text),
    )


def _node(error: OperatorError, compiled: CompiledStep, routine: StepRoutine, place: int) -> fx.Node | None:
    """Return the node of the graph whose operator has failed: the pieces of an action's program have its nodes in
    order, and others may be between them.
    """
    action, programs, names = routine.labels[place].action, routine.programs, list[str]()
    if action is None or error.index < 0:
        return None
    for index, (step, label) in enumerate(zip(routine.steps[: place + 1], routine.labels, strict=False)):
        if isinstance(step, Call) and label.action == action:
            end = error.index + 1 if index == place else None
            names += [operator.name for operator in programs[step.program].operators[:end]]
    model = compiled.models.get(compiled.micro_batches[action.micro_batch].size)
    phase = None if model is None else model.phases.get(Phase(action.stage, action.kind))
    if phase is None or not names or names[-1] != error.operator:
        return None
    return phase.node(error.operator, names.count(error.operator))
