"""An epoch of a feed, as who trains sees it."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self


class Epoch:
    """The batches of an epoch, one after the other.

    Nothing runs before the first is asked for. The threads and processes that prepare batches are gone when there is
    none left, after :meth:`close`, after a ``with`` block, and when nobody has this object any more.

    Args:
        batches: Makes them; closing it ends what it has begun.
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
        """End it, with what it has begun. Idempotent."""
        self._batches.close()
