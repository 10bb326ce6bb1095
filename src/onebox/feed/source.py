"""Interfaces of data: samples in any order, or a stream in its own order.

Both are protocols: classes in ``sources`` implement them, and so may a user's class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """Samples that can be read in any order. Methods are called concurrently by threads or processes."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, index: int) -> Any:
        """Read a sample as stored (the `read` stage): bytes where it is a file.

        Args:
            index: Index of the sample, from 0.

        Raises:
            DataError: It cannot be read.
        """
        ...

    def decode(self, raw: Any, index: int) -> Any:
        """Decode the result of :meth:`read` (the `process` stage) to tensors, nested in tuples and dicts.

        Args:
            raw: The read data.
            index: Index of the sample, from 0.

        Raises:
            DataError: It is damaged.
        """
        ...

    def name(self, index: int) -> str:
        """Return the origin of a sample: its file, and the place in the file where that holds several."""
        ...


@runtime_checkable
class Stream(Protocol):
    """Samples, or batches, that come in their own order and can be read from the beginning only.

    Attributes:
        batched: Whether its items are batches.
    """

    batched: bool

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch; the iterator is used by one thread, which closes it, if it has ``close``, at the end.

        Args:
            epoch: Number of the epoch, from 0.
            seed: Seed of the feed; a shuffled stream depends on it and the epoch.
        """
        ...

    def name(self, index: int) -> str:
        """Return the origin of the item with a number of an epoch."""
        ...
