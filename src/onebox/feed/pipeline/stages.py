"""Definition of a pipeline's stages, and failures in place of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from onebox.errors import DataError, OneboxError, UsageError
from onebox.feed.checks import require_int
from onebox.feed.pipeline.counters import CONSUMER, WorkerKind


@dataclass(frozen=True)
class StageSpec:
    """A stage: its work and its workers.

    Args:
        name: Name for display: ``read``, ``process``, ``upload``.
        work: Function from an item to a result; called concurrently by threads, or in processes.
        concurrency: Number of concurrent items; ``auto`` follows the counters.
        by: Threads, or processes where the work holds the GIL; ``fork_server.py`` documents the items and results that
            can be sent to these.
        timeout_s: Time limit of the work for an item, after which the pipeline ends with an error.
        describe: Returns a description of an item, by its number, for the error of the time limit.
        begin: Initial number of concurrent items for ``auto``, such as that of an earlier pipeline.

    Raises:
        UsageError: A value is invalid.
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
    """A failure in place of a result."""

    error: BaseException


def stage_error(stage: str, number: int, error: BaseException) -> StageFailure:
    """Return the consumer's error for a failure in a stage, which names stage and item."""
    where = f"{stage} failed at item {number}"
    if not isinstance(error, Exception):
        return StageFailure(error)
    if isinstance(error, OneboxError):
        error.add_note(where)
        return StageFailure(error)
    kind = getattr(error, "kind", type(error).__name__)  # its type in a child process
    failure = DataError(": ".join(part for part in (where, kind, str(error)) if part), sample=number)
    failure.__cause__ = error
    return StageFailure(failure)


def timeout_error(spec: StageSpec, number: int) -> StageFailure:
    """Return the consumer's error for work that exceeds its time limit."""
    problem = f"{spec.name} has been inside {spec.describe(number)} for {spec.timeout_s:g} s"
    todo = "look for what it waits for, or allow more by timeout_s"
    return StageFailure(DataError(f"{problem}: {todo}.", sample=number))
