"""Options and resources of a :class:`onebox.Trainer` that runs the steps of another framework's trainer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Any, Literal, TypedDict

from torch import Tensor

from onebox.engine import StepLoss, Trainer
from onebox.engine.trainer import PlanArgument
from onebox.engine.workload.loss_reduction import LossReduction, Weighted
from onebox.errors import OneboxError, OperatorError, UsageError
from onebox.padding import Buckets
from onebox.plan.model.problem import Problem
from onebox.plan_names import LossyPart
from onebox.pool import Pool, open_pool
from onebox.trainer_options import Engine, Recovery, Staging, StaleGradients

_LOG = logging.getLogger("onebox")


class PlannedOptions(TypedDict, total=False):
    """Arguments of :class:`onebox.Trainer` that users choose; the framework's own settings determine the others."""

    plan: PlanArgument | None
    adaptive: bool | Problem
    loss_reduction: LossReduction
    pad: Buckets | None
    stale: StaleGradients | None
    lossy: Collection[LossyPart]
    recovery: Recovery | Literal["auto"] | None
    staging: Staging
    engine: Engine
    guards: bool


class SameInEachStep:
    """An object of a framework while a step is captured: only what is the same in each step can be read.

    Args:
        of: The object.
        allowed: Names of the attributes that can be read.
        reader: The function that is captured, and the name that it reads the object by, for the error.
        holder: Where a value that changes may be kept instead, for the error.
    """

    def __init__(self, of: Any, allowed: Collection[str], reader: tuple[str, str], holder: str) -> None:
        self._of, self._allowed, self._reader, self._holder = of, allowed, reader, holder

    def __getattr__(self, name: str) -> Any:
        if name in self._allowed:
            return getattr(self._of, name)
        function, place = self._reader
        raise UsageError(
            f"{function} reads {place}.{name}, but is captured once and not called with each step: give what changes "
            f"as part of the batch, or as an attribute of the {self._holder} sets"
        )


@contextlib.contextmanager
def pool_for_run(pool: Pool | str | None) -> Iterator[Pool]:
    """Return the pool of a run: a given one, which stays open, or one that is opened for the run.

    Args:
        pool: A pool, or a specification as for :func:`onebox.open`; ``None`` for its default.

    Raises:
        UsageError: The specification is wrong, or names a missing device.
        PoolError: The pool could not be opened.
    """
    if isinstance(pool, Pool):
        yield pool
        return
    with open_pool(*(() if pool is None else (pool,))) as opened:
        yield opened


def trainer_arguments(options: PlannedOptions) -> dict[str, Any]:
    """Return options as arguments of a trainer of a module that computes the loss itself, from inputs alone.

    Where a micro-batch has nothing that the loss is a mean over, a trainer would replace its targets; these are among
    the inputs here, and their loss would be no number. So it is refused.
    """
    found: dict[str, Any] = dict(options)
    if isinstance(reduction := options.get("loss_reduction"), Weighted):
        found["loss_reduction"] = Weighted(lambda targets: _positive(reduction.of(targets)))
    return found


def _positive(normaliser: float) -> float:
    if not normaliser:
        raise UsageError(
            "the normaliser of loss_reduction=Weighted(...) is 0 for a micro-batch: its loss is a mean over nothing; "
            "let the plan have larger micro-batches, or leave such samples out"
        )
    return normaliser


def told_step(trainer: Trainer, inputs: Any, targets: Any) -> StepLoss:
    """Begin a step; with the first one log the plan, which the framework's own trainer does not show."""
    planned = trainer.plan is not None
    loss = trainer.step(inputs, targets)
    if not planned and trainer.plan is not None:
        used, of = len(trainer.plan.devices), len(trainer.pool)
        _LOG.warning("steps run on %d of %d devices: %s", used, of, trainer.plan.describe())
    return loss


def close_after_error(trainer: Trainer | None) -> None:
    """Bring weights and the optimizer's state at an error, as far as workers still have them, and close the trainer.

    As after an error in the framework's own steps, users may save the model then, or train on.
    """
    if trainer is None:
        return
    try:
        while True:
            try:
                trainer.pull()
                break
            except OperatorError as error:  # of a step behind the one that failed, once for each
                if not error.kept:
                    raise
        trainer.close()
    except OneboxError as error:
        _LOG.warning("the model in this process has older weights: %s", str(error).splitlines()[0])


def loss_as_it_is(loss: Tensor, _: Any) -> Tensor:
    """Return the loss that a captured module has computed."""
    return loss


def targets_for(options: PlannedOptions, targets: Any) -> Any:
    """Return targets of a batch where a loss reduction is to read them; ``None`` where nothing reads them."""
    return targets if isinstance(options.get("loss_reduction"), Weighted) else None
