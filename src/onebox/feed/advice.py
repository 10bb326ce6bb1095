"""Which stage bounds a run, what would help, and how many workers each stage should have; pure.

The consumer takes an item every so often, as long as it never waits: that is its cycle. A stage keeps up with ``n``
workers if the time that an item spends in its work, divided by ``n``, is no longer than the cycle. More workers than
that gain nothing, fewer make the consumer wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onebox.feed.counters import CONSUMER, StageCounters

SPARE = 0.4
"""A stage gives up a worker only where the others would be busy for less than this share of their time.

One that grows does so when its workers are busy all the time. Times that are 20 % off in either direction, those of the
stage and those of the consumer, make a ratio between 0.67 and 1.5 of the true one: between the thresholds, a factor of
2.5, it never crosses both (1.5 / 0.67 = 2.25), so noise does not make a stage grow and shrink by turns.
"""

MOST = 64
"""Workers of a stage that ``choose`` and the advice stop at."""


def choose(counters: Sequence[StageCounters], wall_s: float, cores: int) -> dict[str, int]:
    """Say how many workers each stage should have.

    Each keeps what it has unless it is too slow for the consumer, or has far too many; the slowest stage comes first
    where cores are short.

    Args:
        counters: What stages did for a while, the consumer among them (see :func:`onebox.feed.counters.between`).
        wall_s: How long that was.
        cores: How many workers they may have together; each stage has one in any case.

    Returns:
        dict: From the name of a stage, without the consumer, to a number of workers.
    """
    stages = [each for each in counters if each.name != CONSUMER]
    consumer = next((each for each in counters if each.name == CONSUMER), None)
    workers = {each.name: max(1, min(each.concurrency, MOST)) for each in stages}
    if consumer is None or consumer.items < 1 or wall_s <= 0.0:
        return _within(workers, cores)
    cycle_s = max(consumer.busy_s / consumer.items, 1e-6)
    needed = {each.name: _item_s(each) / cycle_s for each in stages}
    pace = max(1.0, *(needed[name] / count for name, count in workers.items())) if workers else 1.0
    for name, count in workers.items():
        enough = math.floor(needed[name] / (SPARE * pace)) + 1
        workers[name] = max(1, min(count, enough))
    workers = _within(workers, cores)
    while sum(workers.values()) < cores:
        slowest = max(workers, key=lambda name: needed[name] / workers[name], default=None)
        if slowest is None or needed[slowest] <= workers[slowest] or workers[slowest] >= MOST:
            break
        workers[slowest] += 1
    return workers


def bound_line(counters: Sequence[StageCounters], wall_s: float) -> str:
    """Say in one line which stage bounds a run, and what would help.

    Args:
        counters: What stages did, the consumer among them.
        wall_s: How long that was.

    Example:
        >>> def stage(name, items, busy_s):
        ...     return StageCounters(name=name, by="threads", concurrency=1, items=items, busy_s=busy_s, waiting_s=0.0,
        ...                          blocked_s=0.0, bytes=0)
        >>> bound_line([stage("process", 60, 9.8), stage("compute", 60, 3.0)], 10.0)
        'bound by process (98 % busy): 4 threads would do'
    """
    consumer = next((each for each in counters if each.name == CONSUMER), None)
    if consumer is None or consumer.items < 1 or wall_s <= 0.0:
        return "bound by nothing: no batch has come yet"
    slowest = max(counters, key=lambda each: each.busy_s / max(1, each.concurrency))
    share = min(1.0, slowest.busy_s / max(1, slowest.concurrency) / wall_s)
    said = f"bound by {slowest.name} ({100 * share:.0f} % busy)"
    if slowest.name == CONSUMER:
        return f"{said}: batches are there in time"
    cycle_s = max(consumer.busy_s / consumer.items, 1e-6)
    enough = math.ceil(_item_s(slowest) / cycle_s - 1e-9)
    if enough <= slowest.concurrency:
        return f"{said}: {slowest.concurrency} {slowest.by} keep up, nearly"
    if enough > MOST:
        return f"{said}: more {slowest.by}, or less work for each batch, would help"
    return f"{said}: {enough} {slowest.by} would do"


def _within(workers: dict[str, int], cores: int) -> dict[str, int]:
    """Take workers away where there are too many together, from whoever has the most."""
    workers = dict(workers)
    while sum(workers.values()) > max(cores, len(workers)):
        workers[max(workers, key=lambda name: workers[name])] -= 1
    return workers


def _item_s(stage: StageCounters) -> float:
    """Time that an item spends in the work of a stage."""
    return stage.busy_s / max(1, stage.items)
