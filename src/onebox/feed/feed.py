"""The feed: batches in a repeatable order, read, processed and uploaded while the devices compute on earlier ones."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

from onebox.errors import UsageError
from onebox.feed.adapt import as_source
from onebox.feed.checks import require_int
from onebox.feed.collate import Collate
from onebox.feed.order import Position, batch_count
from onebox.feed.pipeline.autotune import bottleneck_line
from onebox.feed.pipeline.counters import StageCounters
from onebox.feed.pipeline.runner import Pipeline
from onebox.feed.prepare.epoch_builder import Concurrency, EpochBuilder
from onebox.feed.prepare.preparation import OnError, Transform
from onebox.feed.prepare.randomness import ProcessBy
from onebox.feed.prepare.skip_log import SkipLog
from onebox.feed.sample_ids import namespace
from onebox.padding import Buckets
from onebox.portable import usable_cores


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


class Feed:
    """Batches of a data set, epoch after epoch, prepared while the devices compute.

    Each batch is read, then processed (decoded, transformed, collated), then uploaded; each stage works on a later
    batch than the one after it. The batches are the same to the bit for every concurrency and kind of worker, and a run
    that resumes from any position gets the batches of an uninterrupted one.

    Args:
        source: The data: a :class:`~onebox.feed.Source` or :class:`~onebox.feed.Stream`, or anything that
            :func:`~onebox.feed.as_source` accepts: any PyTorch data set or loader, an iterable of batches, and more.
        batch_size: Samples in a batch; none for a stream whose items are batches.
        seed: Determines, with the epoch, the order of the samples, and, with the sample, its random numbers.
        shuffle: Whether to use a new order each epoch, rather than the source's own. A stream has its own order.
        drop_last: Whether to leave out the last batch of an epoch where it is smaller than the others.
        transform: Applied to the first of a pair (inputs, targets), or else to the whole sample. One that has a
            parameter ``generator`` gets a ``torch.Generator`` seeded for the sample; one that draws from ``random``,
            ``numpy.random`` or ``torch`` finds these seeded for it.
        collate: Makes a batch of a list of samples; ``None`` for ``torch.utils.data.default_collate``.
        pad: Pads samples to the bucket of the longest of their batch, so that they may be of several lengths; with a
            ``collate``, and where the source has batches, pads the batch.
        read: Number of batches that are read at once; ``auto`` tunes it.
        process: Number of batches that are processed at once; ``auto`` tunes it.
        process_by: ``threads``; ``processes`` where Python code takes most of the time of processing; ``auto`` uses
            processes where samples draw from the generators of this process. Threads share those: they are seeded and
            restored for one sample at a time, and nothing else may draw from them meanwhile.
        ahead: The most batches that are ready.
        limit_bytes: Limit of the memory of batches in preparation.
        on_error: Handling of a sample that cannot be read, decoded, transformed or collated: ``stop`` with an error
            that names it, or ``skip`` it. Its batch is then shorter, and is left out if nothing remains.
        max_skipped: The most samples that an epoch may skip; ``None`` for no limit.
        timeout_s: Time limit of a stage for a batch in seconds.
        upload: Called with the inputs and targets of a batch ahead of its step, such as ``trainer.upload``; its result
            replaces the batch.
        cores: Cores that ``auto`` may use; ``None`` for those that this process may.

    Attributes:
        source: The data as a source or stream.
        seed: As given.
        skipped: The samples left out so far.
        position: Position of the run, after the last batch that was returned.

    Raises:
        UsageError: An argument is wrong.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> feed = Feed(TensorDataset(torch.arange(5), torch.arange(5)), batch_size=2, shuffle=False)
        >>> for inputs, targets in feed.epoch(0):
        ...     print(inputs.tolist(), feed.position.to_dict())
        [0, 1] {'epoch': 0, 'index': 1, 'seed': 0, 'samples': 2}
        [2, 3] {'epoch': 0, 'index': 2, 'seed': 0, 'samples': 4}
        [4] {'epoch': 0, 'index': 3, 'seed': 0, 'samples': 5}
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        transform: Transform | None = None,
        collate: Collate | None = None,
        pad: Buckets | None = None,
        read: Concurrency = "auto",
        process: Concurrency = "auto",
        process_by: ProcessBy = "auto",
        ahead: int = 2,
        limit_bytes: int | None = None,
        on_error: OnError = "stop",
        max_skipped: int | None = 100,
        timeout_s: float = 300.0,
        upload: Callable[[Any, Any], Any] | None = None,
        cores: int | None = None,
    ) -> None:
        for name, number, least in (("ahead", ahead, 1), ("max_skipped", max_skipped, 0), ("cores", cores, 1)):
            if number is not None:
                require_int(name, number, least=least)
        self._recipe = EpochBuilder(
            source=as_source(source),
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            transform=transform,
            collate=collate,
            pad=pad,
            read=read,
            process=process,
            process_by=process_by,
            on_error=on_error,
            timeout_s=timeout_s,
            upload=upload,
            space=namespace(source, transform),
        )
        self.source, self.seed = self._recipe.source, seed
        self._ahead, self._limit_bytes, self._cores = ahead, limit_bytes, cores
        self.skipped = SkipLog(limit=max_skipped)
        self.position = self._at(0, 0, 0)
        self._pending: Position | None = None
        self._running: Callable[[], Epoch | None] = lambda: None
        self._last: tuple[tuple[StageCounters, ...], float] | None = None

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises:
            TypeError: The source is a stream of unknown length.
        """
        count = len(self.source)  # type: ignore[arg-type]  # a stream may have none
        return (
            count if self._recipe.batched else batch_count(count, self._recipe.size, drop_last=self._recipe.drop_last)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def epoch(self, epoch: int, start: int | None = None) -> Epoch:
        """Begin an epoch; an active one ends.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of its first batch, from 0; ``None`` for the position given to :meth:`resume`, else 0.

        Returns:
            Epoch: An iterator over pairs of inputs and targets (or over batches in their own form, or as uploaded),
                which ends its threads and processes when it is exhausted, closed, left as a ``with`` block, or
                garbage-collected.

        Raises:
            UsageError: A negative epoch, or a start outside of the epoch.
        """
        require_int("epoch", epoch, least=0)
        pending, self._pending = self._pending, None
        if start is not None:
            require_int("start", start, least=0)
            begin = Position(epoch=epoch, index=start, seed=self.seed)
        elif pending is not None and pending.epoch == epoch:
            begin = pending
        else:
            begin = Position(epoch=epoch, index=0, seed=self.seed)
        return self._begin(begin)

    def resume(self, position: Position) -> None:
        """Make the next epoch begin at the position of an earlier run, in the epoch of :attr:`position`.

        Args:
            position: The position. Its number of samples counts: the batch size may have changed.

        Raises:
            UsageError: It has another seed, or is outside of the data.
        """
        if position.seed != self.seed:
            came = f"the position is of a run with seed {position.seed}, and this feed has seed {self.seed}"
            raise UsageError(f"{came}; give the feed the seed of the run that goes on")
        first = self._first(position)
        self.close()
        self._pending = position
        self.position = self._at(position.epoch, position.index, first)

    def report(self) -> str:
        """Describe the bottleneck of the feed in the last epoch, the remedy, and the samples left out."""
        if self._last is None:
            return "no batch has been asked for yet"
        line = bottleneck_line(*self._last, self._cores or usable_cores())
        return f"{line}; {self.skipped}" if self.skipped.in_epoch else line

    @property
    def counters(self) -> tuple[StageCounters, ...]:
        """Counters of each stage in the last epoch; empty before the end of the first."""
        return self._last[0] if self._last else ()

    def close(self) -> None:
        """End the active epoch, if any, with its threads and processes. Idempotent."""
        running = self._running()
        if running is not None:
            running.close()

    # ---- an epoch

    def _begin(self, begin: Position) -> Epoch:
        first = self._first(begin)
        self.close()
        self.position = self._at(begin.epoch, begin.index, first)
        running = Epoch(self._batches(begin.epoch, begin.index, first))
        self._running = weakref.ref(running)
        return running

    def _batches(self, epoch: int, number: int, first: int) -> Generator[Any, None, None]:
        """Run the pipeline of an epoch; closing the generator in any way ends it."""
        self.skipped.begin()
        handed_out, began_s = 0, time.monotonic()
        begun = self._recipe.begin(epoch, number, first)
        try:
            with Pipeline(
                begun.items, begun.stages, ahead=self._ahead, limit_bytes=self._limit_bytes, cores=self._cores
            ) as ready:
                try:
                    for prepared in ready:
                        if prepared is None:  # the end of a stream
                            break
                        self.skipped.add(prepared.skipped)
                        held = [prepared.batch]
                        if prepared.samples:
                            self.position = self._at(epoch, prepared.number + 1, prepared.end)
                            handed_out += 1
                            del prepared  # the batch belongs to the consumer
                            yield held.pop()
                finally:
                    self._last = ready.counters(), time.monotonic() - began_s
                    self._recipe.reached = {each.name: each.concurrency for each in self._last[0]}
        finally:
            begun.close()
        self.skipped.end(handed_out)
        self.position = self._at(epoch + 1, 0, 0)

    def _at(self, epoch: int, index: int, first: int) -> Position:
        samples = None if self._recipe.batched else first
        return Position(epoch=epoch, index=index, seed=self.seed, samples=samples)

    def _first(self, position: Position) -> int:
        """Return the number of the source's items before a position.

        Raises:
            UsageError: The position is beyond its end.
        """
        first = position.samples
        if first is None or self._recipe.batched:
            first = position.index * self._recipe.size
        if self._recipe.stream is not None:
            return first
        count = len(self.source)  # type: ignore[arg-type]
        if position.samples is not None and first > count:
            raise UsageError(f"the position is after {first} samples of an epoch, and the source has {count}")
        if position.index > len(self) and position.samples is None:
            raise UsageError(
                f"start is {position.index}; the epoch has {len(self)} batches, so at most that is allowed."
            )
        return min(first, count)
