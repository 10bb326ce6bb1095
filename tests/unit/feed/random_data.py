"""Samples whose randomness can be looked at: sources, streams and transforms for the tests of the feed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebox.errors import DataError


class Numbers:
    """A source of pairs (number, number).

    Args:
        count: How many.
        broken: Those that cannot be had, with the place where that shows: ``read``, ``decode`` or ``shape``.
        noisy: Whether decoding draws from the generators of the process.
    """

    def __init__(self, count: int, broken: dict[int, str] | None = None, *, noisy: bool = False) -> None:
        self.count, self.broken, self.noisy = count, broken or {}, noisy

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> bytes:
        if self.broken.get(index) == "read":
            raise OSError(5, "Input/output error")
        return index.to_bytes(4, "little")

    def decode(self, raw: bytes, index: int) -> tuple[Tensor, int]:
        if self.broken.get(index) == "decode":
            raise DataError(f"file-{index}.jpg is cut off", path=f"file-{index}.jpg")
        value = float(int.from_bytes(raw, "little"))
        noise = torch.rand(()).item() if self.noisy else 0.0
        return torch.full((3 if self.broken.get(index) == "shape" else 2,), value + noise, dtype=torch.float64), index

    def name(self, index: int) -> str:
        return f"file-{index}.jpg"


class Counting:
    """A stream of pairs (number, number); how many come differs by epoch."""

    batched = False

    def __init__(self, count: int) -> None:
        self.count = count

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        for number in range(self.count + epoch):
            yield torch.tensor(1000.0 * epoch + number, dtype=torch.float64), number

    def name(self, index: int) -> str:
        return f"item {index}"


def own_generator(x: Tensor, *, generator: torch.Generator) -> Tensor:
    """Add noise from a generator of one's own."""
    return x + torch.rand((), generator=generator, dtype=torch.float64)


def all_globals(x: Tensor) -> Tensor:
    """Add noise from all generators of the process."""
    return x + random.random() + np.random.rand() + torch.rand((), dtype=torch.float64)


def plain(x: Tensor) -> Tensor:
    """Nothing is random."""
    return x * 2


def refuses(x: Tensor) -> Tensor:
    """Cannot take every fifth number."""
    if int(x.flatten()[0]) % 5 == 4:
        raise ValueError("this one is odd")
    return x
