"""The answers that are waited for, and what is known to be wrong with a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from onebox.errors import OneboxError, PeerLost, WorkerError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.errors import DelayedPeerErrors, WorkerLocation, fail, to_error
from onebox.wire.protocol.responses import Reply


class PendingReplies:
    """Futures of the answers to what has been posted; all of them fail with the pool.

    Any thread may promise and look at what is wrong; one thread takes what comes.
    """

    def __init__(self) -> None:
        self.futures: dict[tuple[int, int], Future[WorkerReply]] = {}
        """By worker and number of the message."""
        self.lost: dict[int, OneboxError] = {}
        """What befell the workers that are lost and have not been dropped."""
        self.broken: OneboxError | None = None
        """Why nothing can be posted any more, or until it is mended."""
        self._lock = threading.Lock()
        self._complaints = DelayedPeerErrors()

    def promise(self, worker: int, number: int, *, answer: bool) -> Future[WorkerReply]:
        """Return the future of a message that is about to be sent.

        Args:
            worker: To whom.
            number: Of the message.
            answer: Whether it will be answered; otherwise the future is done.

        Raises:
            OneboxError: The pool is broken.
        """
        future: Future[WorkerReply] = Future()
        if not answer:
            future.set_result(WorkerReply((), (), ()))
        with self._lock:
            if self.broken is not None:
                raise self.broken.with_traceback(None)  # one error for all calls, but no traceback of them all
            if answer:
                self.futures[worker, number] = future
        return future

    def close(self, error: OneboxError) -> None:
        """Let nothing be promised any more; what has been promised may still come."""
        with self._lock:
            self.broken = self.broken or error

    def mend(self) -> bool:
        """Promise again if no worker is lost that has not been dropped; tell whether that is so.

        Raises:
            OneboxError: Something else is wrong with the pool than lost workers.
        """
        with self._lock:
            if self.broken is not None and not isinstance(self.broken, WorkerError):
                raise self.broken.with_traceback(None)
            if not self.lost:
                self.broken = None
            return not self.lost

    # ---- for the thread that takes what comes

    def reply(self, place: WorkerLocation, reply: Reply, frames: Sequence[Any], now_s: float) -> None:
        """Take a worker's answer."""
        with self._lock:
            future = self.futures.pop((place.worker, reply.number), None)
        if reply.failure is None:
            if future is not None and not future.done():
                future.set_result(WorkerReply(reply.results, frames, reply.times_ns, reply.used_bytes))
            return
        error = to_error(reply.failure, place)
        if reply.number == 0:  # about a message that it could not read, so that nobody knows whose answer is missing
            self.give_up(error)
        elif not isinstance(error, PeerLost):
            self._complaints.failed(now_s)
            if future is not None:
                fail(future, error)
        elif future is not None:
            self._complaints.complain(future, error, now_s)

    def lose(self, worker: int, error: OneboxError) -> None:
        """Take the news that a worker is lost."""
        self.lost.setdefault(worker, error)
        self._complaints.ended(error)
        self.give_up(error)

    def give_up(self, error: OneboxError) -> None:
        """Fail all that is waited for, and let nothing be promised."""
        with self._lock:
            self.broken = self.broken or error
            futures, self.futures = list(self.futures.values()), {}
        for future in futures:
            fail(future, error)

    def release(self, now_s: float) -> None:
        """Fail what has waited long enough for news of somebody's end."""
        self._complaints.release(now_s)
