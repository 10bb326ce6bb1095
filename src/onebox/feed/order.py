"""The order of samples, and the position of a run in it.

The order is a pure function of (seed, epoch): no generator's state has to be saved. A run that stopped anywhere resumes
there, and gets the batches of the uninterrupted run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from onebox.errors import UsageError
from onebox.feed.checks import require_int


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run in its data: the part of a checkpoint from which the next batch follows.

    Args:
        epoch: Number of the epoch, from 0.
        index: Number of the next batch in it, from 0.
        seed: Seed of the order.
        samples: Number of earlier samples of the epoch, so that a run with another batch size can resume; ``None`` for
            ``index`` batches of the run's size.

    Raises:
        UsageError: A field that is not an integer, or a negative epoch, index or number of samples.

    Example:
        >>> position = Position(epoch=1, index=3, seed=0)
        >>> Position.from_dict(position.to_dict()) == position
        True
    """

    epoch: int
    index: int
    seed: int
    samples: int | None = None

    def __post_init__(self) -> None:
        require_int("epoch", self.epoch, least=0)
        require_int("index", self.index, least=0)
        require_int("seed", self.seed)
        if self.samples is not None:
            require_int("samples", self.samples, least=0)

    def to_dict(self) -> dict[str, int]:
        """Return the fields as plain numbers, for a JSON manifest; without ``samples`` where unknown."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Position:
        """Return the position that :meth:`to_dict` wrote.

        Raises:
            UsageError: A field is missing, unknown or wrong.
        """
        known = {field.name for field in fields(cls)}
        if not known - {"samples"} <= set(values) <= known:
            raise UsageError(f"A position came with {sorted(values)}; its fields are {sorted(known)}.")
        return cls(**values)


def epoch_order(count: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """Return the indices of samples in the order of an epoch.

    Args:
        count: Samples.
        seed: Determines, with the epoch, the order.
        epoch: Number of the epoch, from 0.
        shuffle: A new order each epoch; otherwise 0, 1, 2, ... always.

    Returns:
        Tensor: ``int64 [count]``, the same on every call.

    Raises:
        UsageError: A negative epoch.

    Example:
        >>> epoch_order(4, seed=0, epoch=0, shuffle=False)
        tensor([0, 1, 2, 3])
    """
    require_int("epoch", epoch, least=0)
    if not shuffle:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(mix("order", seed, epoch))
    return torch.randperm(count, generator=generator)


def batch_count(samples: int, size: int, *, drop_last: bool) -> int:
    """Return the number of batches.

    Args:
        samples: Number of samples.
        size: Samples of a batch.
        drop_last: Whether a smaller last one is left out.
    """
    full, rest = divmod(samples, size)
    return full if drop_last or not rest else full + 1


@dataclass(frozen=True)
class BatchSlice:
    """The samples of one batch.

    Args:
        number: Number of the batch in its epoch, from 0.
        first: Position of its first sample in the order of the epoch, from 0.
        indices: Its samples' indices.
    """

    number: int
    first: int
    indices: tuple[int, ...]


def batch_slices(order_N: Tensor, size: int, *, number: int, first: int, drop_last: bool) -> Iterator[BatchSlice]:
    """Cut the order of an epoch into batches.

    Args:
        order_N: The indices of the samples.
        size: Samples of a batch.
        number: Number of the first batch.
        first: Position of its first sample.
        drop_last: Whether to leave out a smaller last one.
    """
    for begin in range(first, len(order_N), size):
        indices = tuple(order_N[begin : begin + size].tolist())
        if len(indices) < size and drop_last:
            return
        yield BatchSlice(number, begin, indices)
        number += 1


def mix(purpose: str, *numbers: int) -> int:
    """Return 64 bits from any integers, the same in every process (unlike ``hash()``).

    Args:
        purpose: Purpose of the bits, which are different for each.
        numbers: The integers.
    """
    text = " ".join([f"onebox.feed.{purpose}", *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
