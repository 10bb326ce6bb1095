"""Autotuning: the bottleneck stage, advice about it, and the number of workers of each stage. Pure.

The cycle is the time in which a consumer that never waits takes one item. A stage keeps up with ``n`` workers if its
time for an item, divided by ``n``, is no longer than the cycle. More workers gain nothing, fewer make the consumer
wait.

Workers that compute need a core each. Those that wait, for a disk or a network, do not; the processor time of the whole
stage tells them apart. That of a single worker does not: where threads wait for the GIL, each computes the less the
more there are, while together they always fill about one core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onebox.feed.pipeline.counters import CONSUMER, StageCounters

SPARE = 0.4
"""A stage gives up a worker only if the others would be busy for less than this share of their time.

A stage grows when its workers are always busy. Errors of 20 % in the times of the stage and of the consumer give a
ratio between 0.67 and 1.5 of the true one, a factor of 1.5 / 0.67 = 2.25. The thresholds are a factor of 2.5 apart, so
noise does not make a stage grow and shrink by turns.
"""

WAITING = 0.25
STILL_WAITING = 0.6
"""Limit of the cores that a waiting stage takes: up to here it may grow beyond the number of cores, and stays a waiting
stage. A factor of 2.4 between the limits, as above; the second is below the cores that threads waiting for the GIL
take, 0.67 with that noise."""

LOCKED = (0.6, 1.3)
"""Cores that the busy workers of a stage take together where they wait for the GIL."""

MOST = 16
"""Limit of a stage's workers, or the number of cores if that is greater: each worker may hold a batch."""

SENSIBLE = 64
"""Limit of the workers that the advice suggests."""


def choose_concurrency(counters: Sequence[StageCounters], wall_s: float, cores: int) -> dict[str, int]:
    """Choose the number of workers of each stage.

    A stage keeps its workers unless it is too slow for the consumer, or has far too many; the slowest stage comes first
    where cores are short.

    Args:
        counters: Counters of the stages over an interval, including the consumer (see
            :func:`onebox.feed.pipeline.counters.between`).
        wall_s: Length of the interval.
        cores: Limit of all workers together; each stage has at least one, and the workers of a waiting stage count as
            one.

    Returns:
        dict: Number of workers by name of the stage, without the consumer.
    """
    stages = {each.name: each for each in counters if each.name != CONSUMER}
    consumer = next((each for each in counters if each.name == CONSUMER), None)
    most = max(MOST, cores)
    workers = {name: max(1, min(each.concurrency, most)) for name, each in stages.items()}
    if consumer is None or consumer.items < 1 or wall_s <= 0.0 or not stages:
        return _within(workers, stages, cores)
    cycle_s = max(consumer.busy_s / consumer.items, 1e-6)
    needed = {name: _item_s(each) / cycle_s for name, each in stages.items()}
    pace = max(1.0, *(needed[name] / count for name, count in workers.items()))
    for name, count in workers.items():
        enough = math.floor(needed[name] / (SPARE * pace)) + 1
        workers[name] = max(1, min(count, enough))
    workers = _within(workers, stages, cores)
    while True:
        slowest = max(workers, key=lambda name: needed[name] / workers[name])
        more = workers | {slowest: workers[slowest] + 1}
        fits = _cores(more, stages, WAITING) <= max(cores, len(workers))
        if needed[slowest] <= workers[slowest] or workers[slowest] >= most or not fits:
            return workers
        workers = more


def bottleneck_line(counters: Sequence[StageCounters], wall_s: float, cores: int | None = None) -> str:
    """Describe in one line the bottleneck stage of a feed and its remedy, if it is slower than what takes its batches.

    Args:
        counters: Counters of the stages, including the consumer.
        wall_s: Length of the interval.
        cores: Available cores; ``None`` where unknown.

    Example:
        >>> def stage(name, items, busy_s):
        ...     return StageCounters(name=name, by="threads", concurrency=1, items=items, busy_s=busy_s, waiting_s=0.0,
        ...                          blocked_s=0.0, bytes=0)
        >>> bottleneck_line([stage("process", 60, 9.8), stage("compute", 60, 3.0)], 10.0)
        'bound by process (98 % busy): 4 threads would do'
    """
    consumer = next((each for each in counters if each.name == CONSUMER), None)
    if consumer is None or consumer.items < 1 or wall_s <= 0.0:
        return "bound by nothing: no batch has come yet"
    slowest = max((consumer, *counters), key=lambda each: _busy_share(each, wall_s))
    if slowest is consumer:
        return "the feed keeps up: batches are there in time"
    problem = f"bound by {slowest.name} ({100 * _busy_share(slowest, wall_s):.0f} % busy)"
    cycle_s = max(consumer.busy_s / consumer.items, 1e-6)
    by, item_s = slowest.by, _item_s(slowest)
    is_locked = by == "threads" and slowest.concurrency > 1 and LOCKED[0] <= _load(slowest) <= LOCKED[1]
    if is_locked:
        problem, by, item_s = f"{problem}, its threads take turns", "processes", slowest.cpu_s / max(1, slowest.items)
    enough = max(1, math.ceil(item_s / cycle_s - 1e-9))
    if enough <= slowest.concurrency and not is_locked:
        return f"{problem}: {slowest.concurrency} {by} keep up, nearly"
    computes = is_locked or (slowest.busy_s > 0.0 and slowest.cpu_s / slowest.busy_s > STILL_WAITING)
    # Threads that wait for cores look like those that wait for a disk; what they compute needs its cores all the same.
    core_count = enough if computes else math.ceil(slowest.cpu_s / max(1, slowest.items) / cycle_s - 1e-9)
    if cores is not None and core_count > cores:
        return (
            f"{problem}: it would take {core_count} cores, and may use {cores}; store prepared data, make the "
            "transforms lighter, or use a host with more cores"
        )
    if enough > SENSIBLE:
        return f"{problem}: more {by}, or less work for each batch, would help"
    return f"{problem}: {enough} {by} would do"


def _cores(workers: dict[str, int], stages: dict[str, StageCounters], waiting: float) -> int:
    """Return the cores that workers need: one each, or one for all of a stage that takes no more than ``waiting``."""
    total = 0
    for name, count in workers.items():
        load = _load(stages[name]) * count / max(1, stages[name].concurrency)
        total += 1 if 0.0 < load <= waiting else count
    return total


def _within(workers: dict[str, int], stages: dict[str, StageCounters], cores: int) -> dict[str, int]:
    """Reduce the workers of the largest computing stages until the cores suffice."""
    workers = dict(workers)
    while (need := _cores(workers, stages, STILL_WAITING)) > max(cores, len(workers)):
        fewer = {name: workers | {name: count - 1} for name, count in workers.items() if count > 1}
        helping = [name for name, less in fewer.items() if _cores(less, stages, STILL_WAITING) < need]
        workers = fewer[max(helping, key=lambda name: workers[name])]
    return workers


def _load(stage: StageCounters) -> float:
    """Return the cores that a stage takes while all its workers are busy; 0 where unknown."""
    return stage.concurrency * min(1.0, stage.cpu_s / stage.busy_s) if stage.busy_s > 0.0 else 0.0


def _item_s(stage: StageCounters) -> float:
    """Return the time of a stage's work on an item."""
    return stage.busy_s / max(1, stage.items)


def _busy_share(stage: StageCounters, wall_s: float) -> float:
    """Return the fraction of time in which a stage's workers are busy."""
    return min(1.0, stage.busy_s / max(stage.busy_s + stage.waiting_s + stage.blocked_s, wall_s))
