"""Uploads: each worker receives the parts of a batch that its routine reads, ahead of the step if memory allows.

Batches uploaded ahead count in the workers' memory. They may take no more than steps leave free, and are dropped when
the memory is needed: the client keeps every batch until its step has begun, and missing parts are sent with the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.data.batch_transfer import BatchTransfer, WorkerBatch, batch_bytes, worker_batch, worker_batches
from onebox.engine.data.sample_cache import SampleCache
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload.batch import Batch
from onebox.errors import OneboxError, UsageError
from onebox.pool import Pool
from onebox.pool.network.upload_compression import UploadCompression
from onebox.wire.protocol.instructions import Free

AHEAD_STEPS = 2
"""Batches uploaded ahead of the steps in flight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UploadedBatch:
    """A batch on its way to the workers, for :meth:`onebox.Trainer.step`; made by :meth:`onebox.Trainer.upload`.

    Its memory on the workers is freed by its step, by :meth:`close`, or by garbage collection.

    Args:
        size: Number of samples.
        nbytes: Bytes of its tensors.
    """

    size: int
    nbytes: int
    parcel: BatchTransfer = field(repr=False)
    _drop: Callable[[BatchTransfer], None] = field(repr=False)

    def close(self) -> None:
        """Free its memory on the workers, unless its step has begun. Idempotent."""
        self._drop(self.parcel)


@dataclass(frozen=True, kw_only=True)
class UploadCounters:
    """Cost of uploading the batches of training steps so far.

    Args:
        steps: Steps begun.
        ahead: Steps whose batch had been sent before.
        caller_s: Seconds that the steps' callers spent on sending batches.
        sent_bytes: Bytes of all tensors sent to workers: batches and others.
        hits: Samples that were cached on a worker, counted for each worker and tensor.
        misses: Samples that were sent to a worker with a cache.
    """

    steps: int
    ahead: int
    caller_s: float
    sent_bytes: int
    hits: int = 0
    misses: int = 0


class BatchPrefetcher:
    """The batches of a trainer on their way to the workers.

    Any thread may add and drop batches; one thread begins steps.

    Args:
        pool: The pool.
        ahead_bytes: Most bytes of batches for later steps on a worker.
        cache_bytes: Most bytes of cached samples on a worker.
    """

    def __init__(self, pool: Pool, ahead_bytes: int, cache_bytes: int = 0) -> None:
        self._pool = pool
        self._cache = SampleCache(pool, cache_bytes) if cache_bytes else None
        self._ahead_bytes = ahead_bytes
        self._lock = threading.RLock()
        self._ready: InstalledPlan | None = None
        self._packing: UploadCompression | None = None
        self._waiting: list[BatchTransfer] = []
        self._dropped: deque[BatchTransfer] = deque()  # filled by the garbage collector, which runs in any thread
        self._held = 0
        self._closed = False
        self._steps = self._ahead = 0
        self._caller_s = 0.0

    # ---- called from any thread

    def add(self, batch: Batch) -> UploadedBatch:
        """Add a batch, and send it ahead if memory allows.

        Args:
            batch: A private copy.

        Raises:
            UsageError: The trainer is closed.
        """
        parcel = BatchTransfer(batch)
        if self._cache is None:  # cached samples are known only at sending time
            self._prepare(parcel)  # before any caller waits for it
        with self._lock:
            if self._closed:
                raise UsageError("this trainer is closed; make another one on the pool")
            self._waiting.append(parcel)
            self._send()
        uploaded = UploadedBatch(size=batch.size, nbytes=batch.nbytes, parcel=parcel, _drop=self.drop)
        weakref.finalize(uploaded, self._dropped.append, parcel).atexit = False
        return uploaded

    def drop(self, parcel: BatchTransfer) -> None:
        """Free a batch whose step has not begun; ignore others."""
        with self._lock:
            self._remove(parcel)
            self._send()

    def counters(self) -> UploadCounters:
        """Return the cost of uploading so far."""
        return UploadCounters(
            steps=self._steps,
            ahead=self._ahead,
            caller_s=self._caller_s,
            sent_bytes=sum(self._pool.sent_bytes),
            hits=self._cache.hits if self._cache else 0,
            misses=self._cache.misses if self._cache else 0,
        )

    def cached_bytes(self, worker: int) -> int:
        """Return the bytes of cached samples on a worker."""
        return self._cache.held_bytes(worker) if self._cache else 0

    def beside_bytes(self, worker: int) -> int:
        """Return the bytes on a worker of batches uploaded ahead, and of cached samples."""
        ahead = sum(
            parcel.parts[worker].size_bytes for parcel in self._waiting if parcel.sent and worker in parcel.parts
        )
        return ahead + self.cached_bytes(worker)

    # ---- the thread that begins steps

    def claim(self, uploaded: UploadedBatch) -> BatchTransfer:
        """Return a batch whose step is requested.

        Raises:
            UsageError: Its step was requested before, it is closed, or it belongs to another trainer.
        """
        parcel = uploaded.parcel
        with self._lock:
            if parcel.stepped or parcel not in self._waiting:
                raise UsageError(
                    "this upload has been stepped or closed before, or is another trainer's; each serves one step of "
                    "the trainer that made it: upload the batch again"
                )
            parcel.stepped = True
        return parcel

    @contextlib.contextmanager
    def bringing(
        self, batch: Batch, compiled: CompiledStep, parcel: BatchTransfer | None
    ) -> Iterator[Mapping[int, WorkerBatch]]:
        """Yield the parts of a batch that still have to be sent with its step.

        Nothing is sent ahead inside the context, so that the workers' memory is as computed.

        Args:
            batch: The batch.
            compiled: The step's routines.
            parcel: The upload of the batch, if any.
        """
        begin_s = time.perf_counter()
        with self._lock:
            parts = None if parcel is None else self._take(parcel, compiled)
            self._make_room()
            yield self.parts(batch, compiled) if parts is None else parts
            self._steps += 1
            self._caller_s += time.perf_counter() - begin_s
            self._send()

    def parts(self, batch: Batch, compiled: CompiledStep) -> dict[int, WorkerBatch]:
        """Return the transfer of each worker's part of a batch for some routines; to be sent in this order."""
        ready, cache = self._ready, self._cache
        assert ready is not None
        if cache is None or batch.samples is None:
            return worker_batches(self._pool, batch, compiled, self.packing)
        found = {}
        for worker, needs in batch_bytes(batch, compiled).items():
            spare_bytes = ready.spare_bytes.get(worker, 0) - (AHEAD_STEPS + 1) * needs
            part = cache.part_of(batch, compiled, worker, self.packing, spare_bytes)
            found[worker] = part or worker_batch(self._pool, batch, compiled, worker, self.packing)
        return found

    def parts_beside(self, batch: Batch, compiled: CompiledStep) -> dict[int, WorkerBatch]:
        """Return the transfer of each worker's part of a batch outside steps; cached samples are evicted if
        necessary.
        """
        with self._lock:
            self._make_room()
            return self.parts(dataclasses.replace(batch, samples=None), compiled)

    @property
    def packing(self) -> UploadCompression:
        """How batches travel to the workers of the plan in use."""
        assert self._packing is not None
        return self._packing

    def kept(self, batch: Batch) -> Batch:
        """Return a copy of a batch that later writes to the user's tensors do not change."""
        begin_s = time.perf_counter()
        copy = batch.kept()
        self._caller_s += time.perf_counter() - begin_s
        return copy

    def use(self, ready: InstalledPlan | None) -> None:
        """Set the installed plan that batches are for from now on; ``None`` for none.

        What had been sent before is void, and freed on the workers that are left.

        Raises:
            OneboxError: A worker whose link is measured failed or ended.
        """
        if ready is self._ready:
            return
        with self._lock:
            self._return_all()
            if self._cache is not None:
                self._cache.clear()
            self._packing = None
            if ready is not None:
                link_bps = self._pool.client_bandwidth.bps(ready.plan.devices)
                self._packing = UploadCompression(self._pool.devices, link_bps)
            self._ready = ready

    @contextlib.contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """Remove batches uploaded ahead from the workers for the duration of the context."""
        with self._lock:
            self._held += 1
            self._return_all()
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1

    def close(self) -> None:
        """Free everything whose step has not begun."""
        with self._lock:
            self._closed = True
            self._return_all()
            self._waiting.clear()
            if self._cache is not None:
                self._cache.clear()

    # ---- called with the lock held

    def _take(self, parcel: BatchTransfer, compiled: CompiledStep) -> Mapping[int, WorkerBatch] | None:
        """Take a batch whose step begins; return the parts to send, or ``None`` if they must be prepared anew."""
        if parcel not in self._waiting:  # its step is repeated
            return None
        self._waiting.remove(parcel)
        if parcel.compiled is not compiled:
            self._free(parcel)
            return None
        if not parcel.sent:
            return parcel.parts or None
        self._ahead += 1
        return {
            worker: WorkerBatch(bindings=part.bindings, size_bytes=part.size_bytes)
            for worker, part in parcel.parts.items()
        }

    def _send(self) -> None:
        """Send batches in order as memory allows."""
        self._clean()
        sent = [parcel for parcel in self._waiting if parcel.sent]
        for parcel in self._waiting:
            if parcel.sent:
                continue
            if self._held or len(sent) >= AHEAD_STEPS or not self._prepare(parcel) or not self._fits([*sent, parcel]):
                return
            sent.append(parcel)
            try:
                self._post(parcel)
            except OneboxError:  # the next step raises the error, or continues with the remaining workers
                return

    def _post(self, parcel: BatchTransfer) -> None:
        """Send a batch; free the sent parts if that fails or is interrupted."""
        try:
            parcel.sent = True
            if not parcel.parts and parcel.compiled is not None:
                parcel.parts = self.parts(parcel.batch, parcel.compiled)
            for worker, part in parcel.parts.items():
                self._pool.post(worker, part.instructions, part.frames)
        except BaseException:
            self._free(parcel)
            if self._cache is not None:  # its contents on the worker are unknown
                self._cache.clear()
            raise

    def _prepare(self, parcel: BatchTransfer) -> bool:
        """Prepare the parts of a batch that do not depend on others; return whether its routines are available."""
        ready = self._ready
        compiled = None if ready is None else ready.known(parcel.batch)
        if compiled is not parcel.compiled:
            parcel.parts, parcel.needs = {}, {}
            if compiled is not None and ready is not None:
                parcel.needs = batch_bytes(parcel.batch, compiled)
                if self._cache is None:
                    parcel.parts = worker_batches(self._pool, parcel.batch, compiled, self.packing)
            parcel.compiled = compiled
        return compiled is not None

    def _fits(self, parcels: list[BatchTransfer]) -> bool:
        """Return whether batches fit into the memory that steps leave free."""
        if self._ready is None:
            return False
        needed: Counter[int] = Counter()
        for parcel in parcels:
            needed.update(parcel.needs)
        spare = self._ready.spare_bytes
        return all(
            size <= min(self._ahead_bytes, spare.get(worker, 0) - self.cached_bytes(worker))
            for worker, size in needed.items()
        )

    def _make_room(self) -> None:
        """Free batches uploaded ahead that no longer fit beside a step: a batch of another shape needs more."""
        self._clean()
        sent = [parcel for parcel in self._waiting if parcel.sent]
        while sent and not self._fits(sent):
            self._free(sent.pop())
        if self._cache is not None and self._ready is not None:
            for worker, spare_bytes in self._ready.spare_bytes.items():
                if self._cache.held_bytes(worker) > spare_bytes:
                    self._cache.drop(worker)

    def _clean(self) -> None:
        while self._dropped:
            self._remove(self._dropped.popleft())

    def _remove(self, parcel: BatchTransfer) -> None:
        if parcel in self._waiting:
            self._waiting.remove(parcel)
            self._free(parcel)
        parcel.stepped = True

    def _return_all(self) -> None:
        self._clean()
        for parcel in self._waiting:
            self._free(parcel)

    def _free(self, parcel: BatchTransfer) -> None:
        """Free the parts of a batch on the workers, which ignore missing ones."""
        if not parcel.sent:
            return
        parcel.sent = False
        if self._cache is not None:  # the cache may have changed by the next time
            parcel.compiled = None
        for worker, part in parcel.parts.items():
            if worker not in self._pool.gone:
                with contextlib.suppress(OneboxError):
                    self._pool.post(worker, [Free(part.bindings)])
