"""Evaluation: batches shared out over the replicas, scalars averaged over all samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from onebox.engine.batch import Batch, as_batch
from onebox.engine.compiler import Compiler, put_leaves
from onebox.engine.results import Evaluation
from onebox.errors import UsageError
from onebox.plan import Plan
from onebox.pool import Answer, Pool, raise_first
from onebox.wire.messages import Run, Scalars


def evaluate(
    batches: Iterable[tuple[Any, Any]],
    *,
    pool: Pool,
    prepare: Callable[[Batch], tuple[Compiler, Plan]],
    metrics: Sequence[str],
    in_flight: int,
) -> Evaluation:
    """Return the mean loss and metrics over batches.

    Args:
        batches: (inputs, targets) of each.
        pool: The pool.
        prepare: Returns the compiler and the plan, given a batch to learn from.
        metrics: Names of the metrics.
        in_flight: Batches that may be under way at once.

    Raises:
        UsageError: There is no batch.
        OneboxError: Something failed on a worker.
    """
    means = _Means(1 + len(metrics))
    pending: deque[tuple[int, Future[Answer]]] = deque()
    for inputs, targets in batches:
        batch = as_batch(inputs, targets)
        compiler, plan = prepare(batch)
        while len(pending) >= in_flight * len(plan.devices):
            means.add(*pending.popleft())
        chunks = replace(plan, micro_batch=None).micro_batches(batch.size)
        for worker, parts in zip(plan.devices, chunks, strict=True):
            for part in parts:
                routine = compiler.evaluation(batch, part.size)
                put, numbers, frames = put_leaves(pool, batch.slice(part.start, part.size))
                pending.append((part.size, pool.post(worker, [put, Run(routine, numbers)], frames, answer=True)))
    while pending:
        means.add(*pending.popleft())
    if not means.samples:
        raise UsageError("evaluate() was given no batch")
    loss, *values = (total / means.samples for total in means.totals)
    return Evaluation(loss=loss, metrics=dict(zip(metrics, values, strict=True)), samples=means.samples)


class _Means:
    """Sums of scalars, weighted by samples."""

    def __init__(self, count: int) -> None:
        self.totals = [0.0] * count
        self.samples = 0

    def add(self, samples: int, future: Future[Answer]) -> None:
        (answer,) = raise_first([future])
        (scalars,) = answer.results
        assert isinstance(scalars, Scalars)
        self.samples += samples
        for index, value in enumerate(scalars.values):
            self.totals[index] += samples * value
