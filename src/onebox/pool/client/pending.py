"""Replies that are waited for, and the errors of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from onebox.errors import OneboxError, PeerLost, WorkerError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.errors import DelayedPeerErrors, WorkerLocation, fail, to_error
from onebox.wire.protocol.responses import LinkTraffic, Reply


class PendingReplies:
    """Futures of the replies to posted messages; all of them fail with the pool.

    Any thread may promise and read the errors; one thread records replies.
    """

    def __init__(self) -> None:
        self.futures: dict[tuple[int, int], Future[WorkerReply]] = {}
        """Futures by worker and message number."""
        self.lost: dict[int, OneboxError] = {}
        """Errors of the workers that are lost and have not been dropped."""
        self.broken: OneboxError | None = None
        """The error for which nothing can be posted, until it is mended."""
        self._lock = threading.Lock()
        self._complaints = DelayedPeerErrors()

    def promise(self, worker: int, number: int, *, answer: bool) -> Future[WorkerReply]:
        """Return the future of a message that is about to be sent.

        Args:
            worker: The receiver.
            number: Number of the message.
            answer: Whether a reply will come; otherwise the future is done.

        Raises:
            OneboxError: The pool is broken.
        """
        future: Future[WorkerReply] = Future()
        if not answer:
            future.set_result(WorkerReply((), (), ()))
        with self._lock:
            if self.broken is not None:
                raise self.broken.with_traceback(None)  # one error for all calls, without accumulating their tracebacks
            if answer:
                self.futures[worker, number] = future
        return future

    def close(self, error: OneboxError) -> None:
        """Refuse new promises; earlier ones may still be fulfilled."""
        with self._lock:
            self.broken = self.broken or error

    def mend(self) -> bool:
        """Accept promises again if every lost worker has been dropped; return whether that is so.

        Raises:
            OneboxError: The pool has another error than lost workers.
        """
        with self._lock:
            if self.broken is not None and not isinstance(self.broken, WorkerError):
                raise self.broken.with_traceback(None)
            if not self.lost:
                self.broken = None
            return not self.lost

    # ---- called by the thread that receives replies

    def reply(
        self,
        place: WorkerLocation,
        reply: Reply,
        frames: Sequence[Any],
        now_s: float,
        traffic: tuple[LinkTraffic, ...] = (),
    ) -> None:
        """Record a worker's reply, with what it carried to other workers."""
        with self._lock:
            future = self.futures.pop((place.worker, reply.number), None)
        if reply.failure is None:
            if future is not None and not future.done():
                future.set_result(WorkerReply(reply.results, frames, reply.times_ns, reply.used_bytes, traffic))
            return
        error = to_error(reply.failure, place)
        if reply.number == 0:  # about a message that the worker could not read: which reply is missing is unknown
            self.give_up(error)
        elif not isinstance(error, PeerLost):
            self._complaints.failed(now_s)
            if future is not None:
                fail(future, error)
        elif future is not None:
            self._complaints.complain(future, error, now_s)

    def lose(self, worker: int, error: OneboxError) -> None:
        """Mark a worker as lost."""
        self.lost.setdefault(worker, error)
        self._complaints.ended(error)
        self.give_up(error)

    def give_up(self, error: OneboxError) -> None:
        """Fail all pending replies, and refuse new promises."""
        with self._lock:
            self.broken = self.broken or error
            futures, self.futures = list(self.futures.values()), {}
        for future in futures:
            fail(future, error)

    def release(self, now_s: float) -> None:
        """Fail the futures that were held back long enough for the cause of a peer's end."""
        self._complaints.release(now_s)
