"""Randomness of samples: a pure function of (seed, epoch, sample), in every worker.

There are two ways to draw numbers. A transform with a parameter ``generator`` gets one that is seeded for the sample.
The generators of the process, ``random``, ``numpy.random`` and ``torch``, are also seeded for the sample: in a
dedicated process that is all; where threads share them, one sample at a time is prepared, and they are restored
afterwards.
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
"""Purposes of seeds: reading and processing are seeded separately, so that different workers may do them."""

Globals = Literal["untouched", "owned", "shared"]
"""Use of the process's generators: nothing draws from them; only this process does; other threads do, too."""

_KEEPER = threading.Lock()
_NUMPY_SEEDS = 1 << 32  # number of seeds of numpy.random.seed
_TORCH_SEEDS = 1 << 63


def sample_seed(part: SeedPurpose, seed: int, epoch: int, index: int) -> int:
    """Return 64 bits for one sample of one epoch.

    Args:
        part: The stage that uses them.
        seed: Seed of the feed.
        epoch: Number of the epoch, from 0.
        index: Index of the sample, from 0.
    """
    return mix(part, seed, epoch, index)


def generator_for(seed: int) -> torch.Generator:
    """Return a new generator for a sample."""
    return torch.Generator().manual_seed(seed % _TORCH_SEEDS)


def takes_generator(work: Callable[..., Any]) -> bool:
    """Return whether a callable has a parameter ``generator`` that can be given by name."""
    try:
        found = inspect.signature(work).parameters.get("generator")
    except (TypeError, ValueError):  # some C callables have no signature
        return False
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


@contextlib.contextmanager
def seeded(seed: int, how: Globals) -> Iterator[None]:
    """Seed the generators of the process for a sample inside the ``with`` block.

    Args:
        seed: Seed of the sample.
        how: ``untouched`` does nothing, ``owned`` seeds them, ``shared`` seeds them while no other thread is in such a
            block and restores them.
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
    """Call a function and return whether it drew from the generators of the process, which are restored.

    Raises:
        Exception: Any error of the function.
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
    np.random.seed(seed % _NUMPY_SEEDS)  # the generator of transforms that take no other
    torch.default_generator.manual_seed(seed % _TORCH_SEEDS)  # torch.manual_seed would also seed those of devices
