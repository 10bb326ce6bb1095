"""Construction of epochs: the source and options of a feed, and the stages made from them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from onebox.errors import UsageError
from onebox.feed.checks import require_int
from onebox.feed.collate import Collate, padded
from onebox.feed.order import batch_slices, epoch_order
from onebox.feed.pipeline.stages import StageSpec
from onebox.feed.prepare.preparation import OnError, Preparation, PreparedBatch, Transform
from onebox.feed.prepare.randomness import PROBED, ProcessBy, RandomnessProfile, choose_workers, profile_randomness
from onebox.feed.prepare.stream_reader import StreamReader
from onebox.feed.sample_ids import sample_ids
from onebox.feed.seeding import takes_generator
from onebox.feed.source import Source, Stream
from onebox.padding import Buckets, require_buckets

Concurrency = int | Literal["auto"]
Workers = Literal["threads", "processes"]


@dataclass(frozen=True)
class EpochStages:
    """An epoch that can be run.

    Args:
        items: The batches to read.
        stages: The stages.
        close: To be called after the last read.
    """

    items: Iterable[Any]
    stages: tuple[StageSpec, ...]
    close: Callable[[], None]


@dataclass(kw_only=True)
class EpochBuilder:
    """The source and the options of a feed; documented in :class:`onebox.feed.Feed`.

    Attributes:
        space: A number that identifies the source and the preparation of its samples.
        stream: The source, if it is a stream.
        batched: Whether the items of the source are batches.

    Raises:
        UsageError: An option is invalid.
    """

    source: Source | Stream
    batch_size: int | None
    seed: int
    shuffle: bool
    drop_last: bool
    transform: Transform | None
    collate: Collate | None
    pad: Buckets | None
    read: Concurrency
    process: Concurrency
    process_by: ProcessBy
    on_error: OnError
    timeout_s: float
    upload: Callable[[Any, Any], Any] | None
    space: int
    reached: dict[str, int] = field(default_factory=dict)
    """Workers of each ``auto`` stage at the end of the last epoch: the next begins with them."""
    stream: Stream | None = field(init=False)
    batched: bool = field(init=False)
    _randomness: RandomnessProfile | None = None

    def __post_init__(self) -> None:
        self.stream = self.source if isinstance(self.source, Stream) else None  # checking a protocol takes 20 µs
        self.batched = self.stream is not None and self.stream.batched
        require_int("seed", self.seed)
        require_buckets(self.pad)
        for name, value, allowed in (
            ("process_by", self.process_by, ("threads", "processes", "auto")),
            ("on_error", self.on_error, ("stop", "skip")),
        ):
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
        for name, number in (("read", self.read), ("process", self.process)):
            if number != "auto":
                require_int(name, number, least=1)
        for name, work in (("transform", self.transform), ("collate", self.collate), ("upload", self.upload)):
            if work is not None and not callable(work):
                raise UsageError(f"{name} is a {type(work).__name__}; it has to be callable, or None")
        self._check_size()

    @property
    def size(self) -> int:
        """Number of the source's items in a batch."""
        return self.batch_size or 1

    def begin(self, epoch: int, number: int, first: int) -> EpochStages:
        """Begin an epoch.

        Args:
            epoch: Its number.
            number: Number of its first batch.
            first: Items of the source before it.

        Raises:
            UsageError: The options do not allow the preparation of the samples.
            DataError: The first ones took too long.
        """
        return self._of_source(epoch, number, first) if self.stream is None else self._of_stream(epoch, number, first)

    def _of_source(self, epoch: int, number: int, first: int) -> EpochStages:
        source = self.source
        assert isinstance(source, Source)
        order_N = epoch_order(len(source), seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        probed = order_N[first : first + PROBED].tolist()
        whole = getattr(source, "read_batch", None) if self._as_read else None
        work = replace(self._preparation(epoch, source.read, source.decode), whole=whole)
        by: Workers = "threads"
        if whole is None:
            work, by = self._arrange(work, probed)
        items = batch_slices(order_N, self.size, number=number, first=first, drop_last=self.drop_last)
        # what processes have read here draws nothing, and the generators of this process are not theirs
        reading = work if by == "threads" else replace(work, globals="untouched")

        def describe(batch: int) -> str:
            begin = first + (batch - number) * self.size
            return work.describe(order_N[begin : begin + self.size].tolist())

        return EpochStages(items, self._stages(work, reading.read_batch, self.read, by, describe), lambda: None)

    def _of_stream(self, epoch: int, number: int, first: int) -> EpochStages:
        assert self.stream is not None
        reader = StreamReader(
            self.stream,
            epoch,
            self.seed,
            size=self.size,
            number=number,
            first=first,
            drop_last=self.drop_last,
        )
        known: list[Any] = []
        probed = [0] if self.transform is not None and (self._randomness is None) else []

        def first_item(index: int) -> Any:
            known.extend(known or reader.peek())
            return _apart(known[0])

        work, by = self._arrange(self._preparation(epoch, first_item, lambda raw, index: raw), probed)
        return EpochStages(
            reader.tasks(),
            self._stages(work, reader.read, 1, by, lambda batch: work.describe(reader.indices(batch))),
            reader.close,
        )

    def _preparation(self, epoch: int, read: Callable[[int], Any], decode: Callable[[Any, int], Any]) -> Preparation:
        collate = _the_only_one if self.batched else self.collate
        return Preparation(
            read=read,
            decode=decode,
            name=self.source.name,
            transform=self.transform,
            transform_takes_generator=self.transform is not None and takes_generator(self.transform),
            collate=padded(collate, self.pad),
            seed=self.seed,
            epoch=epoch,
            on_error=self.on_error,
            globals="untouched",
        )

    def _arrange(self, work: Preparation, probed: list[int]) -> tuple[Preparation, Workers]:
        if self._randomness is None:
            self._randomness = profile_randomness(work, probed, timeout_s=self.timeout_s)
        return choose_workers(
            work, self.process_by, self._randomness or RandomnessProfile(), may_be_late=self.stream is None
        )

    def _stages(
        self,
        work: Preparation,
        read: Callable[[Any], Any],
        concurrency: Concurrency,
        by: Workers,
        describe: Callable[[int], str],
    ) -> tuple[StageSpec, ...]:
        def process(raw: Any) -> PreparedBatch | None:
            return None if raw is None else work.process_batch(raw)

        def stage(name: str, work: Callable[[Any], Any], concurrency: Concurrency, by: Workers) -> StageSpec:
            return StageSpec(name, work, concurrency, by, self.timeout_s, describe, self.reached.get(name, 1))

        stages = stage("read", read, concurrency, "threads"), stage("process", process, self.process, by)
        return stages if self.upload is None else (*stages, stage("upload", self._uploaded, 1, "threads"))

    def _uploaded(self, prepared: PreparedBatch | None) -> PreparedBatch | None:
        if prepared is None or not prepared.samples:
            return prepared
        assert self.upload is not None
        batch = prepared.batch
        if not isinstance(batch, tuple) or len(batch) != 2:
            came = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple) else "")
            todo = "let transform or collate make a pair"
            raise UsageError(f"what is uploaded is a pair (inputs, targets), and a batch is {came}; {todo}")
        samples = {"samples": sample_ids(self.space, prepared.samples)} if self._tells_samples else {}
        return replace(prepared, batch=self.upload(*batch, **samples))

    @property
    def _as_read(self) -> bool:
        """True if samples are only collated."""
        return self.transform is None and self.collate is None and self.pad is None

    @property
    def _tells_samples(self) -> bool:
        """True if the upload gets the samples' ids: only where they are the same in every epoch."""
        habits = self._randomness or RandomnessProfile()
        random = habits.draws or (self.transform is not None and takes_generator(self.transform))
        as_they_are = self.stream is None and self.collate is None and self.pad is None and not random
        return self.upload is not None and as_they_are and _takes(self.upload, "samples")

    def _check_size(self) -> None:
        if self.batched:
            if self.batch_size is not None:
                came = f"batch_size is {self.batch_size}, and the items of the source are batches"
                raise UsageError(f"{came}; leave it out, or give a source of samples")
            if self.collate is not None:
                raise UsageError("collate is for samples, and the items of the source are batches; leave it out")
            return
        if self.batch_size is None:
            raise UsageError("batch_size is needed: the source gives single samples")
        require_int("batch_size", self.batch_size, least=1)
        if self.stream is None and self.drop_last and self.batch_size > len(self.source):  # type: ignore[arg-type]
            came = f"batch_size is {self.batch_size} and drop_last is set"
            most = len(self.source)  # type: ignore[arg-type]
            raise UsageError(f"{came}, which leaves no batch: allowed are at most {most}, the samples.")


def _takes(work: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(work).parameters
    except (TypeError, ValueError):  # some C callables have no signature
        return False


def _the_only_one(items: list[Any]) -> Any:
    """Return the only item of a batch of a stream of batches."""
    return tuple(items[0]) if isinstance(items[0], list) and len(items[0]) == 2 else items[0]


def _apart(item: Any) -> Any:
    """Return a copy of an item, as a transform may write to it before its second use; else itself."""
    try:
        return copy.deepcopy(item)
    except Exception:
        return item
