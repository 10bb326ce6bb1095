"""Sample ids: numbers for objects as long as they live, to distinguish samples of different sources."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

SAMPLE_BITS = 40
"""Bits of an id for the sample's own number; the namespace has the others except the sign."""

_NUMBERS = itertools.count(1)
_known: dict[tuple[int, ...], int] = {}


def namespace(*things: object) -> int:
    """Return a number for some objects together: the same one for the same objects, as long as they all live.

    Objects without weak references, such as lists, get a new number each time: another object may later have their
    address.
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
    """Return unique ids of samples, given their own numbers."""
    return tuple((space << SAMPLE_BITS) + sample for sample in samples)
