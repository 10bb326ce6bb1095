"""Covering arrays: few runs in which every two settings of different kinds meet, instead of the full product."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Setting = tuple[str, str]
"""A kind of setting, and its value."""

Run = dict[str, str]
"""From each kind of setting to its value."""

TRIES = 12
"""Runs that are made up at a time, of which the one with the most new pairs is taken."""


def covering_array(kinds: Mapping[str, Sequence[str]], refused: Callable[[Run], bool]) -> list[Run]:
    """Return a covering array of strength two, the same each time.

    It is made greedily: of some runs that are made up with a pair that no run has yet, the one with the most such pairs
    comes next. Pairs of which no run is allowed are left out.

    Args:
        kinds: The values of each kind of setting.
        refused: Says of some of a run's settings, which may be all, that no run has them together.
    """
    missing = {pair: None for pair in _pairs(kinds) if completed(dict(pair), kinds, refused) is not None}
    draw, found = random.Random(0), []
    while missing:
        tries = [_made_up(list(missing), kinds, refused, draw) for _ in range(TRIES)]
        found.append(max(tries, key=lambda run: sum(pair in missing for pair in pairs_of(run))))
        for pair in pairs_of(found[-1]):
            missing.pop(pair, None)
    return [{kind: run[kind] for kind in kinds} for run in found]


def pairs_of(run: Run) -> list[tuple[Setting, Setting]]:
    """Return every two settings of a run, in the order of their kinds' names."""
    return list(itertools.combinations(sorted(run.items()), 2))


def _pairs(kinds: Mapping[str, Sequence[str]]) -> list[tuple[Setting, Setting]]:
    found = []
    for one, other in itertools.combinations(sorted(kinds), 2):
        found += [((one, a), (other, b)) for a, b in itertools.product(kinds[one], kinds[other])]
    return found


def completed(run: Run, kinds: Mapping[str, Sequence[str]], refused: Callable[[Run], bool]) -> Run | None:
    """Return a run that has the given settings and is allowed; ``None`` where there is none."""
    if refused(run):
        return None
    left = [kind for kind in kinds if kind not in run]
    if not left:
        return run
    options = (completed({**run, left[0]: value}, kinds, refused) for value in kinds[left[0]])
    return next((full for full in options if full is not None), None)


def _made_up(
    missing: Sequence[tuple[Setting, Setting]],
    kinds: Mapping[str, Sequence[str]],
    refused: Callable[[Run], bool],
    draw: random.Random,
) -> Run:
    """Return a run with one of the missing pairs, and of each other kind the value that adds most of them."""
    wanted = set(missing)
    run = dict(draw.choice(missing))
    for kind in draw.sample(list(kinds), len(kinds)):
        if kind in run:
            continue
        values = draw.sample(list(kinds[kind]), len(kinds[kind]))
        values.sort(key=lambda value, k=kind: -sum(_pair((k, value), each) in wanted for each in run.items()))
        allowed = (value for value in values if completed({**run, kind: value}, kinds, refused) is not None)
        run[kind] = next(allowed)
    return run


def _pair(one: Setting, other: Setting) -> tuple[Setting, Setting]:
    return (one, other) if one < other else (other, one)
