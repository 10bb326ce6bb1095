"""Concurrent stages, one item each: read | process | upload, ahead of the consumer.

One lock guards the state of all stages (:mod:`onebox.feed.pipeline.state`). Every waiting thread has its own condition,
and a change of the state wakes one worker of each stage that can go on: an item costs one hand-over a stage, and
nothing is polled. The only process of a stage has its next item before it has finished one, so that it does not wait
until a thread here gets the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from onebox.errors import UsageError
from onebox.feed.checks import require_int
from onebox.feed.pipeline.autotune import choose_concurrency
from onebox.feed.pipeline.counters import CONSUMER, StageCounters, StageTally, between, size_of
from onebox.feed.pipeline.fork_server import StageForkServer
from onebox.feed.pipeline.stages import StageFailure, StageSpec, stage_error, timeout_error
from onebox.feed.pipeline.state import PipelineState, WorkItem
from onebox.portable import usable_cores

__all__ = ["Pipeline", "StageSpec"]

THREAD_NAME = "onebox-feed"

STOP_S = 5.0
"""Bound of the wait for work in progress when a pipeline ends."""

WINDOW_S = 0.2
WINDOW_ITEMS = 8
"""Time, and items of the consumer, between two decisions of ``auto``."""


class Pipeline:
    """Run items through stages that work at the same time, and iterate over the results in the order of the items.

    Threads and processes start with the ``with`` block and are gone after it, however it is left. A generator as
    ``items`` is advanced and closed by threads of the first stage, one at a time; by a single one where that stage has
    a concurrency of 1.

    Args:
        items: Input of the first stage; an item is a batch, or becomes one. Errors name it by its attribute ``number``,
            where it has one, else by its position.
        stages: The stages, in order.
        ahead: The most results that are ready at a time.
        limit_bytes: Limit of the bytes ready and in progress together: tensors, arrays and bytes in the results of the
            stages. ``None`` for no limit except that on items.
        cores: Limit of the workers of all ``auto`` stages together; each has at least one. By default one less than
            this process may use.

    Raises:
        UsageError: An invalid value, two stages of one name, or iteration outside of the ``with`` block.

    Example:
        >>> with Pipeline(range(3), [StageSpec("process", lambda number: number**2, 2)]) as ready:
        ...     print(list(ready))
        [0, 1, 4]
    """

    def __init__(
        self,
        items: Iterable[Any],
        stages: Sequence[StageSpec],
        *,
        ahead: int = 2,
        limit_bytes: int | None = None,
        cores: int | None = None,
    ) -> None:
        require_int("ahead", ahead, least=1)
        if limit_bytes is not None:
            require_int("limit_bytes", limit_bytes, least=1)
        if cores is not None:
            require_int("cores", cores, least=1)
        names = [spec.name for spec in stages]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"The stages are {names}; there has to be one at least, and each with a name of its own.")
        self._items = items
        self._iterator: Iterator[Any] | None = None
        self._called: dict[int, int] = {}  # numbers of the items
        self._specs = tuple(stages)
        self._cores = cores if cores is not None else max(1, usable_cores() - 1)
        limits = [spec.begin if spec.concurrency == "auto" else spec.concurrency for spec in stages]
        self._early = {index for index, spec in enumerate(stages) if index and spec.by == "processes"}
        self._flow = PipelineState(limits, ahead=ahead, limit_bytes=limit_bytes, early=self._early)
        self._lock = threading.RLock()  # garbage collection, at any place, may close the pipeline that it runs in
        self._may_work = [threading.Condition(self._lock) for _ in stages]
        self._arrived = threading.Condition(self._lock)
        self._tallies = [*(StageTally(spec.name, spec.by) for spec in stages), StageTally(CONSUMER)]
        self._workers = [0] * len(limits)  # workers that are to stay
        self._leaving: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._fork_servers: dict[int, StageForkServer] = {}
        self._entered = self._closed = self._drained = False
        self._looked: tuple[float, tuple[StageCounters, ...]] = (0.0, ())

    # ---- the consumer

    def __enter__(self) -> Self:
        if self._entered or self._closed:
            raise UsageError("A Pipeline is entered once; make a new one around new items.")
        self._entered = True
        self._looked = time.perf_counter(), self.counters()
        try:
            for index, spec in enumerate(self._specs):  # before there are threads of its own
                if spec.by == "processes":
                    self._fork_servers[index] = StageForkServer(spec.work)
            self._start_workers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next result.

        Raises:
            DataError: The work of a stage failed at this item, or takes too long; this ends the pipeline.
            UsageError: The pipeline was not entered, or was closed before its end.
        """
        if not self._entered:
            raise UsageError("A Pipeline gives results inside of its with block only: with Pipeline(...) as ready.")
        with self._lock:
            self._tallies[-1].switch(self, "waiting", time.perf_counter())
            value = self._wait_for_result()
            self._tallies[-1].switch(self, "busy", time.perf_counter())
            self._wake()
        if not isinstance(value, StageFailure):
            self._adjust()
            return value
        error = value.error
        del value
        self._drained = True
        self.close()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: without this, a cycle keeps the items alive

    def counters(self) -> tuple[StageCounters, ...]:
        """Return the counters of each stage, and last those of the consumer."""
        with self._lock:
            now_s = time.perf_counter()
            limits = [*(self._flow.limit(index) for index in range(len(self._specs))), 1]
            return tuple(tally.counters(limit, now_s) for tally, limit in zip(self._tallies, limits, strict=True))

    def close(self) -> None:
        """End all threads and processes, and wait for them, at most 5 seconds; idempotent.

        Results that are ready are dropped. A thread that hangs inside its work cannot be interrupted: then a
        RuntimeWarning is issued, and it ends as soon as the work does.
        """
        with self._lock:
            self._closed = True
            self._flow.clear()
            self._tallies[-1].switch(self, None, time.perf_counter())
            self._wake()
        for server in self._fork_servers.values():
            server.stop()  # all of them at the same time
        for server in self._fork_servers.values():
            server.close()
        if threading.current_thread() in self._threads:  # possible within its own work, by garbage collection
            return
        end_s = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        stuck = next((thread.name for thread in self._threads if thread.is_alive()), None)
        if stuck is not None:
            problem = f"{stuck} has been inside one item for {STOP_S:g} s since the feed ended"
            warnings.warn(f"{problem}; the thread ends when the work on it returns.", RuntimeWarning, stacklevel=2)

    def _wait_for_result(self) -> Any:
        """Return the next result, or a failure in its place; with the lock held."""
        while not self._flow.is_ready:
            if self._drained or self._flow.is_over:
                self._drained = True
                self._tallies[-1].switch(self, None, time.perf_counter())
                raise StopIteration
            if self._closed:
                raise UsageError("This Pipeline was closed before its end; make a new one to read on.")
            place = self._flow.place(self._flow.handed)
            if place is None:  # work that begins from now on cannot be late before the shortest limit
                left_s = min(spec.timeout_s for spec in self._specs)
            else:
                spec, since_s = self._specs[place[0]], place[1]
                left_s = since_s + spec.timeout_s - time.perf_counter()
                if left_s <= 0.0:
                    return timeout_error(spec, self._number(self._flow.handed))
            self._arrived.wait(min(left_s, threading.TIMEOUT_MAX))
        self._called.pop(self._flow.handed, None)
        value = self._flow.hand_over()
        if not isinstance(value, StageFailure):
            self._tallies[-1].finished(0)
        return value

    def _number(self, place: int) -> int:
        """Return the number by which errors name an item."""
        return self._called.get(place, place)

    def _adjust(self) -> None:
        """Set the number of workers of the ``auto`` stages from their counters."""
        autos = [index for index, spec in enumerate(self._specs) if spec.concurrency == "auto"]
        begin_s, before = self._looked
        now_s = time.perf_counter()
        if not autos or now_s < begin_s + WINDOW_S or self._tallies[-1].items < before[-1].items + WINDOW_ITEMS:
            return
        after = self.counters()
        seen = between(before, after)
        chosen = choose_concurrency([*(seen[index] for index in autos), seen[-1]], now_s - begin_s, self._cores)
        self._looked = now_s, after
        with self._lock:
            for index in autos:
                self._flow.set_limit(index, chosen[self._specs[index].name])
            self._wake()
        self._start_workers()

    # ---- the workers

    def _start_workers(self) -> None:
        """Start workers up to each stage's limit."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for index, spec in enumerate(self._specs):
            with self._lock:
                missing = 0 if self._closed else max(0, self._flow.limit(index) - self._workers[index])
                self._workers[index] += missing
            for _ in range(missing):
                name = f"{THREAD_NAME}-{spec.name}"
                thread = threading.Thread(target=self._run, args=(index,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _run(self, index: int) -> None:
        """Run a worker of a stage."""
        me = threading.get_ident()
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave, index, me)
            begin, clock = stack.enter_context(self._worker(index))
            begun: deque[tuple[WorkItem, _Result]] = deque()
            since_s = 0.0
            while True:
                if not begun:
                    if (task := self._take(index, me)) is None:
                        return
                    since_s = clock()
                    begun.append((task, self._begin(index, task, begin)))
                if index in self._early and (task := self._take_early(index)) is not None:
                    begun.append((task, self._begin(index, task, begin)))
                task, result = begun.popleft()
                value, size_bytes = self._finish(index, task, result)
                cpu_s, since_s = clock() - since_s, clock()
                following = begun[0][0] if begun else None
                self._put_down(index, task, value, size_bytes, cpu_s, following=following)
                del task, result, value

    def _leave(self, index: int, me: int) -> None:
        """Deregister a worker; the last one of the first stage closes the items."""
        with self._lock:
            self._workers[index] -= me not in self._leaving
            self._leaving.discard(me)
            self._tallies[index].switch(me, None, time.perf_counter())
            is_last = index == 0 and self._workers[0] == 0
            iterator = self._iterator
            if is_last:
                self._iterator = iter(())
        if is_last and isinstance(iterator, Generator):
            iterator.close()

    @contextlib.contextmanager
    def _worker(self, index: int) -> Iterator[tuple[Callable[[Any], _Result], Callable[[], float]]]:
        """Yield the function that begins a stage's work, by this thread or a process, and its processor clock."""
        if index not in self._fork_servers:
            yield lambda item: partial(self._specs[index].work, item), time.thread_time
            return
        with contextlib.closing(self._fork_servers[index].child()) as child:
            yield child.begin, lambda: child.cpu_s

    def _take(self, index: int, me: int) -> WorkItem | None:
        """Wait for an item, and for room for its result; ``None`` if this worker is to end."""
        with self._lock:
            while True:
                stall_reason = self._flow.stall_reason(index)
                if self._closed or stall_reason == "over" or self._workers[index] > self._flow.limit(index):
                    self._workers[index] -= 1  # now, or others would end for the same reason
                    self._leaving.add(me)
                    return None
                now_s = time.perf_counter()
                if stall_reason is None:
                    self._tallies[index].switch(me, "busy", now_s)
                    task = self._flow.take(index, now_s)
                    self._wake()
                    return task
                self._tallies[index].switch(me, stall_reason, now_s)
                self._may_work[index].wait()

    def _take_early(self, index: int) -> WorkItem | None:
        """Return an item for after the present one, without waiting; ``None`` if there is none, or other workers may
        take it."""
        with self._lock:
            if self._closed or not self._flow.may_begin_early(index):
                return None
            task = self._flow.take(index, time.perf_counter())
            self._wake()
            return task

    def _begin(self, index: int, task: WorkItem, begin: Callable[[Any], _Result]) -> _Result:
        """Begin a stage's work on an item; return the function that finishes it."""
        item = task.value
        try:
            if isinstance(item, StageFailure):
                return lambda: item
            return begin(self._pull(task.number) if index == 0 else item)
        except _Exhausted:
            return lambda: _END
        except BaseException as error:  # every error belongs to the consumer
            failure = self._failure(index, task, error)
            return lambda: failure

    def _finish(self, index: int, task: WorkItem, result: _Result) -> tuple[Any, int]:
        """Return a stage's result for an item, and its bytes; ``_END`` if there is none."""
        try:
            made = result()
            return made, 0 if isinstance(made, StageFailure) else size_of(made)
        except BaseException as error:
            return self._failure(index, task, error), 0

    def _failure(self, index: int, task: WorkItem, error: BaseException) -> StageFailure:
        return stage_error(self._specs[index].name, self._number(task.number), error)

    def _pull(self, place: int) -> Any:
        """Take an item from the iterator; one thread at a time."""
        if self._iterator is None:
            self._iterator = iter(self._items)
        try:
            item = next(self._iterator)  # an error ends the items: the iterator is not advanced again
        except StopIteration:
            raise _Exhausted from None
        number = getattr(item, "number", None)
        with self._lock:
            if isinstance(number, int):
                self._called[place] = number
            self._flow.pulled()
            self._wake()
        return item

    def _put_down(
        self, index: int, task: WorkItem, value: Any, size_bytes: int, cpu_s: float, *, following: WorkItem | None
    ) -> None:
        """Record a stage's result and wake its successors; the work on the item that was taken early starts."""
        with self._lock:
            if following is not None:
                self._flow.restart(index, following, time.perf_counter())
            if value is _END:
                self._flow.ended(task)
            elif not self._closed:
                self._flow.finish(index, task, value, size_bytes)
                if not isinstance(value, StageFailure):
                    self._tallies[index].finished(size_bytes, cpu_s)
            self._wake()

    def _wake(self) -> None:
        """Wake one worker of each stage that can go on, which wakes another in its turn; with the lock held."""
        for index, condition in enumerate(self._may_work):
            stall_reason = self._flow.stall_reason(index)
            if self._closed or stall_reason == "over" or self._workers[index] > self._flow.limit(index):
                condition.notify_all()
            elif stall_reason is None:
                condition.notify()
        if self._closed or self._flow.is_ready or self._flow.is_over:
            self._arrived.notify_all()


_Result = Callable[[], Any]
"""Function that waits for the result of begun work, or computes it."""

_END = StageFailure(StopIteration())
"""Marker in place of a result: there was no item."""


class _Exhausted(Exception):
    """There are no more items."""
