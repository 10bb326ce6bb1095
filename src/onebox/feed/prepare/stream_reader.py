"""Reader of one epoch of a stream in batches; items before a resumed position are read and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onebox.errors import DataError, OneboxError
from onebox.feed.order import BatchSlice
from onebox.feed.prepare.preparation import RawBatch
from onebox.feed.source import Stream


class StreamReader:
    """Reads an epoch of a stream, in its own order; used by one thread at a time.

    Args:
        stream: The stream.
        epoch: Number of the epoch.
        seed: Seed of the feed.
        size: Items of a batch; 1 where items are batches.
        number: Number of the first batch.
        first: Items before it.
        drop_last: Whether to leave out a smaller last batch.
    """

    def __init__(
        self, stream: Stream, epoch: int, seed: int, *, size: int, number: int, first: int, drop_last: bool
    ) -> None:
        self._stream, self._epoch, self._seed = stream, epoch, seed
        self._size, self._drop_last = size, drop_last
        self._start, self._first = number, first
        self._items: Iterator[Any] | None = None
        self._seen: list[Any] = []
        self._count = 0
        self._ended = False
        self._failed: Exception | None = None

    def tasks(self) -> Iterator[BatchSlice]:
        """Yield the batches to read, first those to drop; endless, since the length of the stream is unknown."""
        for begin in range(0, self._first, self._size):
            yield BatchSlice(-1, begin, tuple(range(begin, min(begin + self._size, self._first))))
        number, begin = self._start, self._first
        while not self._ended:
            yield BatchSlice(number, begin, tuple(range(begin, begin + self._size)))
            number, begin = number + 1, begin + self._size

    def indices(self, batch: int) -> list[int]:
        """Return the numbers of the items of a batch; for one that is dropped, that of the next item."""
        if batch < 0:
            return [self._count]
        begin = self._first + (batch - self._start) * self._size
        return list(range(begin, begin + self._size))

    def read(self, cut: BatchSlice) -> RawBatch | None:
        """Read the items of a batch: the work of the stage `read`.

        Returns:
            The items; none for a batch that is dropped; ``None`` at the end of the stream.
        """
        values: list[Any] = []
        while len(values) < len(cut.indices) and not self._ended:
            found = self._next()
            self._count += len(found)
            values += found
        if not values or (len(values) < len(cut.indices) and self._drop_last):
            return None
        had = BatchSlice(cut.number, cut.first, cut.indices[: len(values)])
        return RawBatch(had, () if cut.number < 0 else tuple(zip(had.indices, values, strict=True)))

    def peek(self) -> list[Any]:
        """Return the next item, which is read again later; empty at the end.

        Raises:
            OneboxError: It cannot be read; a later read raises the same error.
        """
        try:
            self._seen = self._next()
        except Exception as error:
            self._failed = error
            raise
        return self._seen

    def close(self) -> None:
        """Close the stream; a thread that hangs inside it closes it when it returns."""
        items, self._items, self._ended = self._items, None, True
        close = getattr(items, "close", None)
        if callable(close) and not getattr(items, "gi_running", False):
            close()

    def _next(self) -> list[Any]:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._seen:
            seen, self._seen = self._seen, []
            return seen
        if self._items is None:
            self._items = iter(self._stream.begin(self._epoch, self._seed))
        try:
            return [next(self._items)]
        except StopIteration:
            self._ended = True
            return []
        except OneboxError:
            raise
        except Exception as error:
            where = self._stream.name(self._count)
            problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise DataError(f"{where} cannot be read: {problem}", path=where, sample=self._count) from error
