"""Numbers that stand for things as long as these last, to tell samples of one source from those of another."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

SAMPLE_BITS = 40
"""A sample's own number has so many bits of its name at most; what it is a sample of has the others but the sign."""

_NUMBERS = itertools.count(1)
_known: dict[tuple[int, ...], int] = {}


def namespace(*things: object) -> int:
    """Return a number for some things together: the same for the same things, as long as all of them last.

    Things that nobody can watch for their end, such as lists, have another number each time: something else may come to
    lie where they were.
    """
    key = tuple(map(id, things))
    if key not in _known:
        number = next(_NUMBERS) % (1 << (63 - SAMPLE_BITS))
        try:
            for thing in things:
                if thing is not None:
                    weakref.finalize(thing, _known.pop, key, None).atexit = False
        except TypeError:
            return number
        _known[key] = number
    return _known[key]


def sample_ids(space: int, samples: Iterable[int]) -> tuple[int, ...]:
    """Return what tells samples from all others, given their own numbers."""
    return tuple((space << SAMPLE_BITS) + sample for sample in samples)
