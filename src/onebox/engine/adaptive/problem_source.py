"""Initial problem of adaptive replanning: given, or built from measurements of the first steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from onebox.engine.adaptive.controller import MakeProblem
from onebox.engine.adaptive.profile_scaling import scale_profile, slowdowns_together, with_measured_links
from onebox.engine.problem.estimate import estimate_links, estimate_profile
from onebox.engine.problem.planner_problem import allowed_sizes, make_problem
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import UsageError
from onebox.plan import Links, Plan
from onebox.plan.model.problem import Problem
from onebox.plan.replan.measurements import StepMeasurement
from onebox.pool import Pool


def problem_maker(
    pool: Pool,
    captures: Callable[[], Captures],
    optimizer: Optimizers,
    first: Callable[[], Batch | None],
    planned: Callable[[], Problem | None],
) -> MakeProblem:
    """Return the builder of the problem that a run's plan solves.

    A problem that was used for planning is the best: its segments were measured one by one. Without one, nothing is
    measured besides the run: the stage times of its first steps are divided among the segments in proportion to an
    earlier measurement or to counted operations.

    Args:
        pool: The pool.
        captures: Returns the captured model.
        optimizer: The user's optimizer.
        first: Returns a typical batch.
        planned: Returns the problem, if the plan comes from the planner.
    """

    def make(plan: Plan, steps: list[StepMeasurement]) -> Problem:
        given, batch = planned(), first()
        assert batch is not None
        size = min(batch.size, plan.micro_batch or max(part.size for part in plan.micro_batches(batch.size)))
        chosen = given is not None or plan.predicted is not None  # else its micro-batches are what the user wants
        regroupable = chosen and captures().regroupable(batch, size)
        if given is not None:
            present = tuple(device for device in given.devices if device.number in pool.present)
            now = replace(
                given,
                devices=present,
                batch=batch.size,
                micro_batches=tuple(each for each in given.micro_batches if each <= batch.size) or (batch.size,),
                free_shares=False,
                regroupable=regroupable,
            )
            return replace(now, together=slowdowns_together(now, plan, steps))
        devices = [device for device in pool.devices if device.number in pool.present]
        known = {size, batch.size} if regroupable else {size}
        profile, _ = estimate_profile(captures(), batch, sorted(known), optimizer, devices)
        links, sure = _links(pool)
        larger = [each for each in allowed_sizes(batch.size) if each > size] if regroupable else []
        problem = make_problem(
            scale_profile(profile, plan, steps, pool.devices, size),
            devices,
            with_measured_links(links, steps, sure),
            batch=batch.size,
            micro_batches=(size, *larger),
            updates=(plan.update,),
            sharded=plan.optimizer == "sharded",
        )
        # the times of steps include what workers lose to each other on common cores
        return replace(problem, free_shares=False, cores={}, regroupable=regroupable)

    return make


def _links(pool: Pool) -> tuple[Links, frozenset[tuple[int, int]]]:
    """Return the known links of a pool, and the set of links known with certainty because they are emulated."""
    known = estimate_links(pool.devices)
    latency_s = {a: dict(row) for a, row in known.latency_s.items()}
    bandwidth_bps = {a: dict(row) for a, row in known.bandwidth_bps.items()}
    sure = set()
    for (a, b), link in pool.links.items():
        latency_s[a][b] = link.latency_s
        if link.bandwidth_bps < math.inf:
            bandwidth_bps[a][b] = link.bandwidth_bps
            sure.add((a, b))
    return replace(known, latency_s=latency_s, bandwidth_bps=bandwidth_bps), frozenset(sure)


def check_adaptive(adaptive: bool | Problem, plan: Plan | None, pool: Pool, *, trace: bool) -> None:
    """Refuse adaptive replanning where it is not possible.

    Raises:
        UsageError: Replanning is not possible; the message gives the reason.
    """
    if not isinstance(adaptive, bool | Problem):
        raise UsageError(f"adaptive={adaptive!r}: allowed are True, False, and the problem that the plan was made for")
    if not adaptive:
        return
    if not trace:
        raise UsageError("adaptive needs the times that workers tell: leave trace=False out")
    if plan is not None and plan.split:
        raise UsageError("adaptive follows plans of whole layers; this one splits layers over several devices")
    if len(pool) < 2:
        raise UsageError("adaptive moves work between devices, and this pool has one")
