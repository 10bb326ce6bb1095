"""A training step that is executed in pieces, each with one action of the schedule, and can be ended after any of them.

A worker runs a routine to its end. Where even one step may take longer than there is time, the client stores and runs
the routine's pieces one after the other instead, and looks at the clock in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future

from onebox.engine.data.batch_transfer import worker_batches
from onebox.engine.planning.partial_profile import TimeLimit
from onebox.engine.session import TrainingSession
from onebox.engine.steps.results import StepTrace, TraceEvent
from onebox.engine.workload.batch import Batch
from onebox.errors import OneboxError
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire.protocol.instructions import Free, OptimizerStep, Step
from onebox.wire.protocol.requests import Define, Routine, Run, SetNumerics

STEP = -1
"""Number of the step in its events: it comes before those of the session."""


class PiecewiseStep:
    """A step of one device before the first of its session.

    Args:
        pool: The pool.
        session: A session of one device, whose plan is not yet on it.
        batch: The batch.
        numerics: The numeric settings of the session.

    Raises:
        DeviceMemoryError: A step needs more memory than the device has.
        OneboxError: A worker failed.
    """

    def __init__(self, pool: Pool, session: TrainingSession, batch: Batch, numerics: Sequence[SetNumerics]) -> None:
        batch = session.captures.stamped(batch)
        installed = session.set_up(batch)
        compiled = installed.step(batch)
        ((self._device, self._routine),) = compiled.routines.items()
        (self._part,) = worker_batches(pool, batch, compiled, session.uploads.packing).values()
        self._pool = pool
        self._numerics = tuple(numerics)
        self._number = pool.new_number()
        self._ends = ends_of(self._routine.steps, [label.action is not None for label in self._routine.labels])
        self._replies: list[WorkerReply] = []
        self._pending: Future[WorkerReply] | None = None

    @property
    def done(self) -> bool:
        """True if all of it was executed."""
        return len(self._replies) == len(self._ends)

    def begin_piece(self) -> None:
        """Send the next piece."""
        place = len(self._replies)
        first = self._ends[place - 1] if place else 0
        steps = self._routine.steps[first : self._ends[place]]
        routine = Define(self._number, Routine(steps, len(self._part.bindings)))
        run = Run(self._number, self._part.bindings, trace=True)
        put = () if place else self._part.instructions
        message = [*put, routine, *self._numerics, run, Free((), (self._number,))]
        frames = () if place else self._part.frames
        self._pending = self._pool.post(self._device, message, frames, answer=True)

    @property
    def pending(self) -> Future[WorkerReply]:
        """The reply to the piece that was sent last."""
        assert self._pending is not None
        return self._pending

    def end_piece(self, reply: WorkerReply) -> None:
        """Take the reply to a piece."""
        self._replies.append(reply)

    def end(self) -> None:
        """Free the batch, if the step was not executed to its end; what it computed is freed with the session."""
        if self._pending is not None and not self.done:
            with contextlib.suppress(OneboxError):  # the pool may be broken
                self._pool.post(self._device, [Free(self._part.bindings, ())])

    def events(self) -> list[TraceEvent]:
        """Return what the device did."""
        times = tuple(each for reply in self._replies for each in reply.times_ns)
        memory = tuple(each for reply in self._replies for each in reply.used_bytes)
        labels = self._routine.labels[: len(times) // 2]
        return StepTrace(step=STEP, workers={self._device: (labels, times, memory)}).events()


def ends_of(steps: Sequence[Step], computes: Sequence[bool]) -> tuple[int, ...]:
    """Return the end of each piece of a routine: before each action but the first, and before the optimizer's step.

    Args:
        steps: The instructions.
        computes: Whether each of them is an action.

    Example:
        >>> ends_of([Free(()), Free(()), Free(()), Free(())], [False, True, False, True])
        (3, 4)
    """
    begins = [
        number
        for number, (step, action) in enumerate(zip(steps, computes, strict=True))
        if action or isinstance(step, OptimizerStep)
    ]
    return (*begins[1:], len(steps))


def run_pieces(steps: Sequence[PiecewiseStep], limit: TimeLimit) -> bool:
    """Execute steps of several devices at once, piece by piece, until they or the time end.

    Returns:
        Whether they were executed to their end.

    Raises:
        OneboxError: A worker failed.
    """
    try:
        while not limit.over and not all(step.done for step in steps):
            under_way = [step for step in steps if not step.done]
            for step in under_way:
                step.begin_piece()
            for step, reply in zip(under_way, raise_first([step.pending for step in under_way]), strict=True):
                step.end_piece(reply)
        return all(step.done for step in steps)
    finally:
        for step in steps:
            step.end()
