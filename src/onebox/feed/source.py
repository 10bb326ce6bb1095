"""What the feed reads from: samples that can be asked for in any order, or a stream in an order of its own.

Both are protocols: what is in ``sources`` has their methods, and so may anything of a user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """Samples that can be read in any order. Methods are called by several threads, or processes, at once."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, index: int) -> Any:
        """Read a sample as it lies on the disk (the `read` stage): bytes where it is a file.

        Args:
            index: Which, from 0.

        Raises:
            DataError: It cannot be read.
        """
        ...

    def decode(self, raw: Any, index: int) -> Any:
        """Make the sample of what :meth:`read` gave (the `process` stage): tensors, nested in tuples and dicts.

        Args:
            raw: What was read.
            index: Which sample, from 0.

        Raises:
            DataError: It is damaged.
        """
        ...

    def name(self, index: int) -> str:
        """Say for people where a sample comes from: the file, and the place in it where that holds several."""
        ...


@runtime_checkable
class Stream(Protocol):
    """Samples, or batches, that come in an order of their own and can be read from the beginning only.

    Attributes:
        batched: Whether whole batches come.
    """

    batched: bool

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Begin an epoch; the iterator is used by one thread, which closes it, if it has ``close``, at the end.

        Args:
            epoch: Number of the epoch, from 0.
            seed: Of the feed; a stream that is shuffled shuffles by it and the epoch.
        """
        ...

    def name(self, index: int) -> str:
        """Say for people where the item with a number of an epoch comes from."""
        ...
