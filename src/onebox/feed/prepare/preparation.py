"""The work of the stages `read` and `process`, on the samples of a batch: reading, decoding, transforming, collating.

The result is a pure function of the source, the seed, the epoch and the samples' numbers, in every thread or process. A
sample that fails either raises an error, which names it and the stage, or is left out and recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onebox.errors import DataError, UsageError
from onebox.feed.collate import Collate, collate, find_mismatches, form_of
from onebox.feed.order import BatchSlice
from onebox.feed.pipeline.counters import size_of
from onebox.feed.seeding import Globals, generator_for, sample_seed, seeded
from onebox.feed.source import Source

OnError = Literal["stop", "skip"]
Where = Literal["read", "decode", "transform", "collate"]
Transform = Callable[..., Any]
ReportPhase = Callable[[Where], None]
"""Callback for the present stage of a sample, for error messages."""

_NOT_OF_DATA = (UsageError, MemoryError)
"""Errors that are not caused by a sample."""


@dataclass(frozen=True)
class SkippedSample:
    """A sample that was left out.

    Args:
        index: Index of the sample in the source; of a stream, in the epoch.
        name: Its name, such as its file.
        stage: The failed stage: read, decode, transform or collate.
        reason: The error.
    """

    index: int
    name: str
    stage: str
    reason: str

    def __str__(self) -> str:
        return f"sample {self.index} ({self.name}) failed in {self.stage}: {self.reason}"


@dataclass(frozen=True)
class PreparedBatch:
    """A batch that is ready, or in preparation.

    Args:
        number: Number of the batch in its epoch, from 0.
        end: Position in the order of the epoch after its last sample.
        batch: The collated or uploaded batch.
        skipped: The samples that were left out.
        samples: The indices of its samples; a batch without samples is not returned.
    """

    number: int
    end: int
    batch: Any
    skipped: tuple[SkippedSample, ...] = ()
    samples: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the batch; counted once a stage, without the numbers of its samples."""
        return size_of(self.batch)


@dataclass(frozen=True)
class RawBatch:
    """Samples that were read.

    Args:
        cut: The batch's place in the epoch.
        samples: The samples; empty where they are read by the stage that processes them.
        skipped: The samples that could not be read.
        batch: The whole batch, from a source that can read one.
    """

    cut: BatchSlice
    samples: tuple[tuple[int, Any], ...] | None
    skipped: tuple[SkippedSample, ...] = ()
    batch: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the samples."""
        return size_of(self.batch) + sum(size_of(value) for _, value in self.samples or ())


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The processing of samples.

    Args:
        decode: Decodes read data, given its index, too.
        name: Returns the origin of a sample.
        read: Reads a sample, given its index.
        transform: Maps a sample's input, the first of a pair, to the model's input; a sample that is not a pair as a
            whole.
        transform_takes_generator: Whether it gets a generator for each sample, by keyword.
        collate: Makes a batch of a list of samples; ``None`` for PyTorch's default.
        seed: Seed of the feed.
        epoch: Number of the epoch.
        on_error: Handling of a sample that fails.
        globals: Use of the process's random generators.
        whole: Reads samples as a collated batch, if the source can.
        late: Whether samples are read by the stage that processes them, because reading also draws random numbers.
    """

    read: Callable[[int], Any]
    decode: Callable[[Any, int], Any]
    name: Callable[[int], str]
    transform: Transform | None
    transform_takes_generator: bool
    collate: Collate | None
    seed: int
    epoch: int
    on_error: OnError
    globals: Globals
    late: bool = False
    whole: Callable[[Sequence[int]], Any] | None = None
    at: dict[int, int] = field(default_factory=dict, compare=False)
    """The present sample of each thread of this process."""

    def read_batch(self, cut: BatchSlice) -> RawBatch:
        """Read the samples of a batch: the work of the stage `read`."""
        if self.whole is not None:
            return RawBatch(cut, (), batch=self.whole(cut.indices))
        return RawBatch(cut, None) if self.late else self._read(cut)

    def process_batch(self, raw: RawBatch) -> PreparedBatch:
        """Decode, transform and collate the samples of a batch: the work of the stage `process`."""
        end = raw.cut.first + len(raw.cut.indices)
        if raw.batch is not None:
            return PreparedBatch(raw.cut.number, end, raw.batch, samples=raw.cut.indices)
        if raw.samples is None:
            raw = self._read(raw.cut)
        skipped = list(raw.skipped)
        samples = self._each(raw.samples or (), self.process, skipped)
        batch = self._collate(samples, skipped) if samples else None
        gone = {one.index for one in skipped}
        had = tuple(index for index, _ in samples if index not in gone)
        return PreparedBatch(raw.cut.number, end, batch, tuple(skipped), had)

    def read_one(self, index: int, report: ReportPhase = lambda where: None) -> Any:
        """Read a sample, seeded for it.

        Args:
            index: Index of the sample.
            report: Callback for the present stage.
        """
        report("read")
        if self.globals == "untouched":
            return self.read(index)
        with seeded(sample_seed("read", self.seed, self.epoch, index), self.globals):
            return self.read(index)

    def process(self, raw: Any, index: int, report: ReportPhase = lambda where: None) -> Any:
        """Decode and transform a sample, seeded for it.

        Args:
            raw: The read data.
            index: Index of the sample.
            report: Callback for the present stage.
        """
        if self.globals == "untouched":
            return self._make(raw, index, report)
        with seeded(sample_seed("process", self.seed, self.epoch, index), self.globals):
            return self._make(raw, index, report)

    def _make(self, raw: Any, index: int, report: ReportPhase) -> Any:
        report("decode")
        sample = self.decode(raw, index)
        if self.transform is None:
            return sample
        report("transform")
        named = {}
        if self.transform_takes_generator:
            named["generator"] = generator_for(sample_seed("process", self.seed, self.epoch, index))
        if isinstance(sample, tuple | list) and len(sample) == 2:
            return self.transform(sample[0], **named), sample[1]
        return self.transform(sample, **named)

    def _read(self, cut: BatchSlice) -> RawBatch:
        skipped: list[SkippedSample] = []
        todo = ((index, None) for index in cut.indices)
        samples = self._each(todo, lambda _, index, report: self.read_one(index, report), skipped)
        return RawBatch(cut, tuple(samples), tuple(skipped))

    def _each(
        self,
        todo: Iterable[tuple[int, Any]],
        work: Callable[[Any, int, ReportPhase], Any],
        skipped: list[SkippedSample],
    ) -> list[tuple[int, Any]]:
        """Apply a function to each sample and return the results; failures that may be skipped are recorded.

        The overhead for a sample must be small, because reading or decoding a small one takes some µs.
        """
        where: list[Where] = []
        done, report, at, thread = [], where.append, self.at, threading.get_ident()
        try:
            for index, value in todo:
                at[thread] = index
                try:
                    done.append((index, work(value, index, report)))
                except _NOT_OF_DATA:
                    raise
                except Exception as error:
                    self._fail(index, where[-1], error, skipped)
        finally:
            at.pop(thread, None)
        return done

    def _fail(self, index: int, where: Where, error: Exception, skipped: list[SkippedSample]) -> None:
        """Record the failure of a sample, or raise it."""
        failed = SkippedSample(index, self.named(index), where, _error_text(error))
        if self.on_error == "stop":
            raise self._error(failed, error) from error
        skipped.append(failed)

    def _collate(self, samples: list[tuple[int, Any]], skipped: list[SkippedSample]) -> Any:
        """Collate the batch; where that fails for samples with other forms, without these."""
        try:
            return collate([value for _, value in samples], self.collate)
        except _NOT_OF_DATA:
            raise
        except Exception as error:
            places, usual = find_mismatches([value for _, value in samples])
            if not places:
                first, last = samples[0][0], samples[-1][0]
                what = f"a batch of {len(samples)} samples, {first} to {last}, each {form_of(samples[0][1])}"
                raise DataError(f"{what}, failed in collate: {_error_text(error)}", sample=first) from error
            like = next(index for place, (index, _) in enumerate(samples) if place not in places)
            for place in places:
                index, value = samples[place]
                reason = f"it is {form_of(value)}; sample {like} ({self.named(like)}) of its batch is {usual}"
                skipped.append(SkippedSample(index, self.named(index), "collate", reason))
            if self.on_error == "stop":
                raise self._error(skipped[-len(places)], error) from error
            odd = set(places)
            return self._collate([pair for place, pair in enumerate(samples) if place not in odd], skipped)

    def describe(self, indices: Sequence[int]) -> str:
        """Describe the samples of a batch, and those that this process is working on."""
        now = next((index for index in list(self.at.values()) if index in indices), None)
        if now is not None:
            return f"sample {now} ({self.named(now)})"
        more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
        return f"the batch of sample {indices[0]} ({self.named(indices[0])}){more}"

    def named(self, index: int) -> str:
        """Return the origin of a sample; never raises."""
        try:
            return self.name(index)
        except Exception as error:  # a failure here must not hide the error whose message needs the name
            return f"without a name: {_error_text(error)}"

    def _error(self, failed: SkippedSample, error: Exception) -> DataError:
        path = getattr(error, "path", None)
        todo = "mend or remove it, or leave such samples out by on_error='skip'"
        return DataError(f"{failed}; {todo}", path=path or failed.name, sample=failed.index)


def preparation_of(source: Source, **options: Any) -> Preparation:
    """Return the preparation of a source's samples; ``options`` are the other fields of :class:`Preparation`."""
    return Preparation(read=source.read, decode=source.decode, name=source.name, **options)


def _error_text(error: Exception) -> str:
    problem = str(error).strip()
    if isinstance(error, DataError):
        return problem
    return f"{type(error).__name__}: {problem}" if problem else type(error).__name__
