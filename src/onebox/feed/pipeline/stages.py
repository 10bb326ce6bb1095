"""What the stages of a pipeline are to do, and what comes in the place of a result that could not be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from onebox.errors import DataError, OneboxError, UsageError
from onebox.feed.checks import require_int
from onebox.feed.pipeline.counters import CONSUMER, WorkerKind


@dataclass(frozen=True)
class StageSpec:
    """What a stage does, and by how many.

    Args:
        name: For people: ``read``, ``process``, ``upload``.
        work: Makes a result of an item; called by several threads, or in several processes, at once.
        concurrency: How many items at a time; ``auto`` follows the counters.
        by: Threads, or processes where the work holds the interpreter's lock; ``processes.py`` says what items and
            results of these may be.
        timeout_s: How long the work may take for an item until the pipeline ends with an error.
        describe: Says of an item, by its number, what it is, while the work on it takes too long.
        begin: How many items at a time ``auto`` begins with, such as those of an earlier pipeline.

    Raises:
        UsageError: A value that is not allowed.
    """

    name: str
    work: Callable[[Any], Any]
    concurrency: int | Literal["auto"] = 1
    by: WorkerKind = "threads"
    timeout_s: float = 300.0
    describe: Callable[[int], str] = "item {}".format
    begin: int = 1

    def __post_init__(self) -> None:
        if not self.name or self.name == CONSUMER:
            raise UsageError(f"A stage is called {self.name!r}; allowed is any name but {CONSUMER!r}, the consumer's.")
        if self.concurrency != "auto":
            require_int(f"the concurrency of {self.name}", self.concurrency, least=1)
        require_int(f"what {self.name} begins with", self.begin, least=1)
        if self.by not in ("threads", "processes"):
            raise UsageError(f"{self.name} is by {self.by!r}; allowed are 'threads' and 'processes'.")
        if not self.timeout_s > 0:
            raise UsageError(f"The time limit of {self.name} is {self.timeout_s} s; it has to be above 0.")


@dataclass(frozen=True, eq=False)
class StageFailure:
    """What comes in the place of a result that could not be made."""

    error: BaseException


def stage_error(stage: str, number: int, error: BaseException) -> StageFailure:
    """Return what an error in the work of a stage is to the consumer: one that names stage and item."""
    where = f"{stage} failed at item {number}"
    if not isinstance(error, Exception):
        return StageFailure(error)
    if isinstance(error, OneboxError):
        error.add_note(where)
        return StageFailure(error)
    kind = getattr(error, "kind", type(error).__name__)  # what it was in a process of its own
    told = DataError(": ".join(part for part in (where, kind, str(error)) if part), sample=number)
    told.__cause__ = error
    return StageFailure(told)


def timeout_error(spec: StageSpec, number: int) -> StageFailure:
    """Return what the consumer is told of work that takes too long."""
    said = f"{spec.name} has been inside {spec.describe(number)} for {spec.timeout_s:g} s"
    todo = "look for what it waits for, or allow more by timeout_s"
    return StageFailure(DataError(f"{said}: {todo}.", sample=number))
