"""Which stage bounds a run, what would help, and how many workers each stage should have; pure.

The consumer takes an item every so often, as long as it never waits: that is its cycle. A stage keeps up with ``n``
workers if the time that an item spends in its work, divided by ``n``, is no longer than the cycle. More workers than
that gain nothing, fewer make the consumer wait.

Workers that compute need a core each. Those that wait, for a disk or a network, do not: what tells them apart is the
processors' time that the whole stage takes. It is no use to look at that of one worker: where threads wait for the
interpreter's lock, each computes the less the more there are, while together they always fill about one core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onebox.feed.pipeline.counters import CONSUMER, StageCounters

SPARE = 0.4
"""A stage gives up a worker only where the others would be busy for less than this share of their time.

One that grows does so when its workers are busy all the time. Times that are 20 % off in either direction, those of the
stage and those of the consumer, make a ratio between 0.67 and 1.5 of the true one: between the thresholds, a factor of
2.5, it never crosses both (1.5 / 0.67 = 2.25), so noise does not make a stage grow and shrink by turns.
"""

WAITING = 0.25
STILL_WAITING = 0.6
"""Cores that a stage takes, at most, to be one that waits: until there it may grow beyond the cores, and until there it
stays one. A factor of 2.4, as above; and the second is below what threads take that wait for the interpreter's lock,
0.67 with that noise."""

LOCKED = (0.6, 1.3)
"""Cores that the workers of a stage take, all of them busy, where they wait for the interpreter's lock."""

MOST = 16
"""Workers of a stage, where there are not more cores than that: each may hold a batch."""

SENSIBLE = 64
"""Workers that the advice does not go beyond."""


def choose_concurrency(counters: Sequence[StageCounters], wall_s: float, cores: int) -> dict[str, int]:
    """Say how many workers each stage should have.

    Each keeps what it has unless it is too slow for the consumer, or has far too many; the slowest stage comes first
    where cores are short.

    Args:
        counters: What stages did for a while, the consumer among them (see
            :func:`onebox.feed.pipeline.counters.between`).
        wall_s: How long that was.
        cores: How many workers they may have together; each stage has one in any case, and the workers of one that
            only waits count as one.

    Returns:
        dict: From the name of a stage, without the consumer, to a number of workers.
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
    """Say in one line which stage bounds a run, and what would help.

    Args:
        counters: What stages did, the consumer among them.
        wall_s: How long that was.
        cores: Those that there are, for what computes; ``None`` where that is not known.

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
    said = f"bound by {slowest.name} ({100 * _busy_share(slowest, wall_s):.0f} % busy)"
    if slowest is consumer:
        return f"{said}: batches are there in time"
    cycle_s = max(consumer.busy_s / consumer.items, 1e-6)
    by, item_s = slowest.by, _item_s(slowest)
    is_locked = by == "threads" and slowest.concurrency > 1 and LOCKED[0] <= _load(slowest) <= LOCKED[1]
    if is_locked:
        said, by, item_s = f"{said}, its threads take turns", "processes", slowest.cpu_s / max(1, slowest.items)
    enough = max(1, math.ceil(item_s / cycle_s - 1e-9))
    if enough > SENSIBLE:
        return f"{said}: more {by}, or less work for each batch, would help"
    if enough <= slowest.concurrency and not is_locked:
        return f"{said}: {slowest.concurrency} {by} keep up, nearly"
    computes = is_locked or (slowest.busy_s > 0.0 and slowest.cpu_s / slowest.busy_s > STILL_WAITING)
    if cores is not None and computes and enough > cores:
        return f"{said}: {enough} {by} would do, on as many cores; it may use {cores}"
    return f"{said}: {enough} {by} would do"


def _cores(workers: dict[str, int], stages: dict[str, StageCounters], waiting: float) -> int:
    """Return the cores that workers need: one each, or one for all of a stage that takes no more than ``waiting``."""
    total = 0
    for name, count in workers.items():
        load = _load(stages[name]) * count / max(1, stages[name].concurrency)
        total += 1 if 0.0 < load <= waiting else count
    return total


def _within(workers: dict[str, int], stages: dict[str, StageCounters], cores: int) -> dict[str, int]:
    """Take workers away where they need too many cores, from whoever computes with the most."""
    workers = dict(workers)
    while (need := _cores(workers, stages, STILL_WAITING)) > max(cores, len(workers)):
        fewer = {name: workers | {name: count - 1} for name, count in workers.items() if count > 1}
        helping = [name for name, less in fewer.items() if _cores(less, stages, STILL_WAITING) < need]
        workers = fewer[max(helping, key=lambda name: workers[name])]
    return workers


def _load(stage: StageCounters) -> float:
    """Cores that the workers of a stage take while all of them are busy; 0 where that is not known."""
    return stage.concurrency * min(1.0, stage.cpu_s / stage.busy_s) if stage.busy_s > 0.0 else 0.0


def _item_s(stage: StageCounters) -> float:
    """Time that an item spends in the work of a stage."""
    return stage.busy_s / max(1, stage.items)


def _busy_share(stage: StageCounters, wall_s: float) -> float:
    """Part of their time in which the workers of a stage work."""
    return min(1.0, stage.busy_s / max(stage.busy_s + stage.waiting_s + stage.blocked_s, wall_s))
