"""Reading ahead: a thread fetches the next items while the caller computes on this one.

Stages of a pipeline (read, process, upload) are Prefetch objects put one around the other.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

from onebox.errors import UsageError
from onebox.feed.checks import require_int

T = TypeVar("T")

THREAD_NAME = "onebox-feed"
STOP_TIMEOUT_S = 5.0  # how long close() waits for a source that is in the middle of an item


class Prefetch(Generic[T]):
    """Iterate over a source that a background thread reads ahead of the caller.

    The thread starts with the ``with`` block and is gone after it, however the block is left. Items come in
    the source's order; an error in the source is raised, with its own traceback, after the items that came
    before it.

    Args:
        source: Any iterable; it is iterated in the thread. A generator is closed there too.
        depth: Most items ready at a time. The thread takes no item from the source before there is room for
            it.

    Raises:
        UsageError: A depth below 1, or iteration outside of the ``with`` block.

    Example:
        >>> with Prefetch(range(3), depth=2) as ready:
        ...     print(list(ready))
        [0, 1, 2]
    """

    def __init__(self, source: Iterable[T], *, depth: int = 2) -> None:
        require_int("depth", depth, least=1)
        self._source = source
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = False  # the source has no more, or failed
        self._drained = False  # ... and the caller has been told
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._thread is not None or self._closed:
            raise UsageError("A Prefetch is entered once; make a new one around a new iterator.")
        self._thread = threading.Thread(target=self._produce, name=THREAD_NAME, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            raise UsageError("A Prefetch reads inside of its with block only: with Prefetch(...) as ready.")
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._closed and not self._drained:
                raise UsageError("This Prefetch was closed before its end; make a new one to read on.")
            self._drained = True
            error, self._error = self._error, None
        try:
            raise error or StopIteration
        finally:
            del error  # its traceback holds this frame: without this, a cycle that keeps the source's items alive

    def close(self) -> None:
        """Stop the thread and wait for it, at most 5 seconds. May be called again.

        What was read ahead is dropped. A source that hangs inside one item cannot be interrupted: then a
        RuntimeWarning says so, and the thread ends as soon as the source returns.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            stuck = f"The source of a Prefetch has been inside one item for {STOP_TIMEOUT_S:g} s"
            warnings.warn(f"{stuck}; its thread ends when the source returns.", RuntimeWarning, stacklevel=2)

    def _produce(self) -> None:
        """The thread: read while there is room, until the end, an error, or close()."""
        error: BaseException | None = None
        try:
            iterator = iter(self._source)
            try:
                while self._wait_for_room():
                    self._offer(next(iterator))
            except StopIteration:
                pass
            finally:
                if isinstance(iterator, Generator):
                    iterator.close()
        except BaseException as caught:  # whatever it is, it belongs to the consumer
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until another item may be read; False when none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            return not self._closed

    def _offer(self, item: T) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append(item)
            self._changed.notify_all()
