"""Evaluation: forward passes through the stages; scalars are averaged over all samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.data.batch_transfer import WorkerBatch
from onebox.engine.steps.results import Evaluation
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.loss_reduction import normalisers
from onebox.errors import OperatorError, UsageError
from onebox.pool import Pool, WorkerReply, raise_first
from onebox.wire.protocol.requests import Run, SetNumerics
from onebox.wire.protocol.responses import Scalars


def evaluate(
    batches: Iterable[Batch],
    *,
    pool: Pool,
    prepare: Callable[[Batch, bool], CompiledStep],
    parts: Callable[[Batch, CompiledStep], Mapping[int, WorkerBatch]],
    metrics: Sequence[str],
    fault: Callable[[CompiledStep, Mapping[int, Mapping[int, float]]], UsageError | None],
    numerics: Sequence[SetNumerics],
    in_flight: int,
    retry: Callable[[Callable[[], None]], None],
    poisoning: Callable[[str], AbstractContextManager[None]],
) -> Evaluation:
    """Return the loss and the mean of each metric over batches.

    Args:
        batches: The batches.
        pool: The pool.
        prepare: Returns the routines that evaluate a batch, given whether it has been given this one before.
        parts: Returns the transfer of each worker's part of a batch.
        metrics: Names of the metrics.
        fault: Returns the reason why a result of a batch was no mean over its micro-batches, given the results of each.
        numerics: Instructions before each run that set precision and determinism.
        in_flight: Most batches in flight.
        retry: Calls a function, again after each recovery from a loss.
        poisoning: Returns the context of messages that only some workers may have received if it is interrupted.

    Raises:
        UsageError: There is no batch, or the loss or a metric is no mean over samples.
        OneboxError: Something failed on a worker.
    """
    means, pending = _Means(1 + len(metrics)), deque[_Asked]()

    def restarted(action: Callable[[], None]) -> Callable[[], None]:
        """Return an action that sends the batches in flight again after a failure."""

        def attempt() -> None:
            try:
                action()
            except Exception as error:
                if isinstance(error, OperatorError):
                    error.steps = ()
                for asked in pending:
                    asked.futures = None
                raise

        return attempt

    def begin() -> None:
        for asked in pending:
            if asked.futures is None:
                asked.compiled = prepare(asked.batch, asked.compiled is not None)
                with poisoning("an evaluation"):
                    asked.futures = _post(pool, asked.compiled, parts(asked.batch, asked.compiled), numerics)

    def finish() -> None:
        begin()
        first = pending[0]
        assert first.compiled is not None
        assert first.futures is not None
        told = means.add(first.batch, first.compiled, raise_first(first.futures))
        wrong = fault(first.compiled, told) if first.compiled.measures else None
        if wrong is not None:
            raise wrong
        pending.popleft()

    for each in batches:
        batch = each.kept()
        while len(pending) >= in_flight:
            retry(restarted(finish))
        pending.append(_Asked(batch))
        retry(restarted(begin))
    while pending:
        retry(restarted(finish))
    if not means.samples:
        raise UsageError("evaluate() was given no batch")
    values = (total / means.samples for total in means.totals[1:])
    return Evaluation(loss=means.loss, metrics=dict(zip(metrics, values, strict=True)), samples=means.samples)


@dataclass
class _Asked:
    """A batch in flight.

    Args:
        batch: The batch.
        compiled: Its evaluation routines; ``None`` until they are available.
        futures: The workers' replies; ``None`` until the batch is sent, or when it must be sent again.
    """

    batch: Batch
    compiled: CompiledStep | None = None
    futures: list[Future[WorkerReply]] | None = None


def _post(
    pool: Pool, compiled: CompiledStep, parts: Mapping[int, WorkerBatch], numerics: Sequence[SetNumerics]
) -> list[Future[WorkerReply]]:
    futures = []
    for worker, part in parts.items():
        run = Run(compiled.routines[worker].number, part.bindings)
        futures.append(pool.post(worker, [*part.instructions, *numerics, run], part.frames, answer=True))
    return futures


class _Means:
    """Sums of scalars: the loss weighted by its divisor, metrics weighted by samples."""

    def __init__(self, count: int) -> None:
        self.totals = [0.0] * count
        self.samples = 0
        self._divisor = 0.0
        self._summed = False

    @property
    def loss(self) -> float:
        """Loss over all batches; NaN for a mean over nothing."""
        if self._summed:
            return self.totals[0]
        return self.totals[0] / self._divisor if self._divisor else float("nan")

    def add(
        self, batch: Batch, compiled: CompiledStep, answers: Sequence[WorkerReply]
    ) -> Mapping[int, Mapping[int, float]]:
        """Add the results of a batch; return the further ones, for each micro-batch."""
        others: dict[int, dict[int, float]] = {}
        self.samples += sum(part.size for part in compiled.micro_batches)
        divisors = normalisers(compiled.reduction, batch, compiled.micro_batches)
        self._divisor, self._summed = self._divisor + sum(divisors), compiled.reduction == "sum"
        for routine, answer in zip(compiled.routines.values(), answers, strict=True):
            values = [value for result in answer.results if isinstance(result, Scalars) for value in result.values]
            for (micro_batch, index), value in zip(routine.results, values, strict=True):
                if index >= len(self.totals):
                    others.setdefault(index, {})[micro_batch] = value
                    continue
                weight = compiled.micro_batches[micro_batch].size if index else divisors[micro_batch]
                self.totals[index] += weight * value if weight else 0.0  # a mean over nothing is NaN
        return others
