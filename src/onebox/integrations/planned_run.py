"""Options and resources of a :class:`onebox.Trainer` that runs the steps of another framework's trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Literal, TypedDict

from torch import Tensor

from onebox.engine.trainer import PlanArgument
from onebox.engine.workload.loss_reduction import LossReduction, Weighted
from onebox.padding import Buckets
from onebox.plan.model.problem import Problem
from onebox.plan_names import LossyPart
from onebox.pool import Pool, open_pool
from onebox.trainer_options import Engine, Recovery, Staging, StaleGradients


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


def loss_as_it_is(loss: Tensor, _: Any) -> Tensor:
    """Return the loss that a captured module has computed."""
    return loss


def targets_for(options: PlannedOptions, targets: Any) -> Any:
    """Return targets of a batch where a loss reduction is to read them; ``None`` where nothing reads them."""
    return targets if isinstance(options.get("loss_reduction"), Weighted) else None
