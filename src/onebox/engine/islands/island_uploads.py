"""Uploads of batches to islands: each island's part goes to its workers ahead of its step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onebox.engine.data.batch_transfer import BatchTransfer
from onebox.engine.data.prefetch import BatchPrefetcher, UploadCounters, UploadedBatch
from onebox.engine.workload.batch import Batch
from onebox.errors import UsageError

Parts = tuple[UploadedBatch | None, ...]
"""For each island the upload of its part; ``None`` for no samples."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IslandsUpload(UploadedBatch):
    """A batch on its way to islands.

    Args:
        parts: The upload of each island's part; empty if the shares were not known yet.
    """

    parts: Parts = ()


class IslandUploads:
    """The batches of a trainer on their way to islands.

    Args:
        prefetchers: The uploads of each island.
        divide: Cuts a batch into parts for the islands; ``None`` before the shares are known.
    """

    def __init__(
        self,
        prefetchers: Sequence[BatchPrefetcher],
        divide: Callable[[Batch], Sequence[Batch | None] | None],
    ) -> None:
        self._prefetchers = prefetchers
        self._divide = divide
        self._mine = object()

    def add(self, batch: Batch) -> UploadedBatch:
        """Add a batch, and send its parts ahead if memory allows; callable from any thread.

        Args:
            batch: A private copy.

        Raises:
            UsageError: The trainer is closed.
        """
        divided = self._divide(batch) or ()
        pairs = zip(self._prefetchers, divided, strict=False)
        parts = tuple(None if part is None else prefetcher.add(part) for prefetcher, part in pairs)

        def drop(parcel: BatchTransfer) -> None:
            parcel.stepped = True
            for part in parts:
                if part is not None:
                    part.close()

        parcel = _OwnTransfer(batch, owner=self._mine)
        return IslandsUpload(size=batch.size, nbytes=batch.nbytes, parcel=parcel, _drop=drop, parts=parts)

    def claim(self, uploaded: UploadedBatch) -> Parts:
        """Return the uploads of a batch whose step is requested; empty if its parts have not been sent.

        Raises:
            UsageError: Its step was requested before, it is closed, or it belongs to another trainer.
        """
        parcel = uploaded.parcel
        mine = isinstance(parcel, _OwnTransfer) and parcel.owner is self._mine
        if not isinstance(uploaded, IslandsUpload) or not mine or parcel.stepped:
            raise UsageError(
                "this upload has been stepped or closed before, or is another trainer's; each serves one step of "
                "the trainer that made it: upload the batch again"
            )
        parcel.stepped = True
        return uploaded.parts

    def counters(self) -> UploadCounters:
        """Return the cost of uploading so far."""
        each = [prefetcher.counters() for prefetcher in self._prefetchers]
        return UploadCounters(
            steps=max(one.steps for one in each),
            ahead=min(one.ahead for one in each),
            caller_s=sum(one.caller_s for one in each),
            sent_bytes=each[0].sent_bytes,  # of the whole pool
            hits=sum(one.hits for one in each),
            misses=sum(one.misses for one in each),
        )

    def cached_bytes(self, worker: int) -> int:
        """Return the bytes of cached samples on a worker."""
        return sum(prefetcher.cached_bytes(worker) for prefetcher in self._prefetchers)

    @contextlib.contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """Remove batches uploaded ahead from all workers for the duration of the context."""
        with contextlib.ExitStack() as stack:
            for prefetcher in self._prefetchers:
                stack.enter_context(prefetcher.out_of_the_way())
            yield


@dataclass(eq=False)
class _OwnTransfer(BatchTransfer):
    """A whole batch, whose parts travel by themselves, with the identity of its uploads."""

    owner: object = None
