"""An epoch of a feed: the iterator over its batches."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self


class Epoch:
    """The batches of an epoch, one after the other.

    Nothing runs before the first is requested. The threads and processes that prepare batches end when the epoch is
    exhausted, after :meth:`close`, after a ``with`` block, and when this object is garbage-collected.

    Args:
        batches: Generator of the batches; closing it ends its threads and processes.
    """

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the epoch with its threads and processes. Idempotent."""
        self._batches.close()
