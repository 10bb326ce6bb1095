"""What is random about a sample: a pure function of (seed, epoch, sample), whoever prepares it.

There are two ways to draw numbers. Who takes a ``generator`` gets one that is seeded for the sample. Who draws from the
generators of the process, which are ``random``, ``numpy.random`` and ``torch``, finds them seeded for the sample: in a
process that does nothing else that is all; where threads share them, one sample at a time is prepared, and they are put
back afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from onebox.feed.order import mix

SeedPurpose = Literal["read", "process"]
"""Reading and processing are seeded apart, so that they may be done by different workers."""

Globals = Literal["untouched", "owned", "shared"]
"""The generators of the process: nobody draws from them; this process may do so alone; others do, too."""

_KEEPER = threading.Lock()
_NUMPY_SEEDS = 1 << 32  # of numpy.random.seed
_TORCH_SEEDS = 1 << 63


def sample_seed(part: SeedPurpose, seed: int, epoch: int, index: int) -> int:
    """64 bits for one sample of one epoch.

    Args:
        part: What of its preparation they are for.
        seed: Of the feed.
        epoch: Number of the epoch, from 0.
        index: Of the sample, from 0.
    """
    return mix(part, seed, epoch, index)


def generator_for(seed: int) -> torch.Generator:
    """Return a generator of its own for a sample."""
    return torch.Generator().manual_seed(seed % _TORCH_SEEDS)


def takes_generator(work: Callable[..., Any]) -> bool:
    """Whether a callable has a parameter ``generator`` that can be given by name."""
    try:
        found = inspect.signature(work).parameters.get("generator")
    except (TypeError, ValueError):  # of some callables of C there is no signature
        return False
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


@contextlib.contextmanager
def seeded(seed: int, how: Globals) -> Iterator[None]:
    """Let the generators of the process be seeded for a sample inside of the ``with`` block.

    Args:
        seed: Of the sample.
        how: ``untouched`` does nothing, ``owned`` seeds them, ``shared`` seeds them while no other thread is in here
            and puts them back.
    """
    if how == "untouched":
        yield
    elif how == "owned":
        _seed_all(seed)
        yield
    else:
        with _KEEPER, _kept():
            _seed_all(seed)
            yield


def draws(work: Callable[[], object]) -> bool:
    """Call something and tell whether it drew from the generators of the process, which are put back.

    Raises:
        Exception: What it raises.
    """
    with _KEEPER, _kept() as before:
        work()
        return not _same(before, _states())


@contextlib.contextmanager
def _kept() -> Iterator[tuple[Any, ...]]:
    before = _states()
    try:
        yield before
    finally:
        python, numpys, torchs = before
        random.setstate(python)
        np.random.set_state(numpys)
        torch.default_generator.set_state(torchs)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    numpys = zip(before[1], after[1], strict=True)
    same_numpys = all(np.array_equal(one, other) for one, other in numpys)
    return bool(before[0] == after[0] and same_numpys and torch.equal(before[2], after[2]))


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)  # the generator that transforms use which take no other
    torch.default_generator.manual_seed(seed % _TORCH_SEEDS)  # torch.manual_seed would reach those of devices, too
