"""Replies that are waited for, and the errors of a pool and of its fault domains."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from onebox.errors import OneboxError, PeerLost, WorkerError
from onebox.pool.client.connection import WorkerReply
from onebox.pool.errors import DelayedPeerErrors, WorkerLocation, fail, to_error
from onebox.wire.protocol.responses import LinkTraffic, MessageTimes, Reply


def on_clock(messages: tuple[MessageTimes, ...], ahead_ns: int) -> tuple[MessageTimes, ...]:
    """Return times of a clock that is ahead of this process's as times of this one."""
    if not ahead_ns:
        return messages
    return tuple(
        MessageTimes(each.message, each.start_ns - ahead_ns, each.end_ns - ahead_ns, each.waited_ns)
        for each in messages
    )


class PendingReplies:
    """Futures of the replies to posted messages.

    With the loss of a worker those of its fault domain fail, by default of all workers. With any other error of the
    pool all of them fail. Any thread may promise and read the errors; one thread records replies.
    """

    def __init__(self) -> None:
        self.futures: dict[tuple[int, int], Future[WorkerReply]] = {}
        """Futures by worker and message number."""
        self.lost: dict[int, OneboxError] = {}
        """Errors of the workers that are lost and have not been dropped."""
        self.domains: Mapping[int, int] = {}
        """Fault domain of each worker that is not in the common one, 0."""
        self._errors: dict[int | None, OneboxError] = {}  # by fault domain; of ``None`` for all
        self._lock = threading.Lock()
        self._complaints = DelayedPeerErrors()

    @property
    def broken(self) -> OneboxError | None:
        """The error for which nothing can be posted, to all workers or to those of a fault domain, until it is
        mended."""
        return next(iter(self._errors.copy().values()), None)

    def domain(self, worker: int) -> int:
        """Return the fault domain of a worker."""
        return self.domains.get(worker, 0)

    def promise(self, worker: int, number: int, *, answer: bool) -> Future[WorkerReply]:
        """Return the future of a message that is about to be sent.

        Args:
            worker: The receiver.
            number: Number of the message.
            answer: Whether a reply will come; otherwise the future is done.

        Raises:
            OneboxError: The pool is broken, or the worker's fault domain.
        """
        future: Future[WorkerReply] = Future()
        if not answer:
            future.set_result(WorkerReply((), (), ()))
        with self._lock:
            broken = self._errors.get(None) or self._errors.get(self.domain(worker))
            if broken is not None:
                raise broken.with_traceback(None)  # one error for all calls, without accumulating their tracebacks
            if answer:
                self.futures[worker, number] = future
        return future

    def close(self, error: OneboxError) -> None:
        """Refuse new promises; earlier ones may still be fulfilled."""
        with self._lock:
            self._errors.setdefault(None, error)

    def mend(self) -> bool:
        """Accept promises again if every lost worker has been dropped; return whether that is so.

        Raises:
            OneboxError: The pool has another error than lost workers.
        """
        with self._lock:
            if (broken := self._errors.get(None)) is not None and not isinstance(broken, WorkerError):
                raise broken.with_traceback(None)
            if not self.lost:
                self._errors.clear()
            return not self.lost

    # ---- called by the thread that receives replies

    def take(self, worker: int, number: int) -> Future[WorkerReply] | None:
        """Return the future of a message, which is no longer pending; ``None`` where there is none."""
        with self._lock:
            return self.futures.pop((worker, number), None)

    def reply(
        self,
        place: WorkerLocation,
        reply: Reply,
        frames: Sequence[Any],
        now_s: float,
        traffic: tuple[LinkTraffic, ...] = (),
        clock_ns: int = 0,
    ) -> None:
        """Record a worker's reply, with what it carried to other workers, and how far its clock is ahead."""
        future = self.take(place.worker, reply.number)
        if reply.failure is None:
            if future is not None and not future.done():
                times_ns, used_bytes = reply.times_ns, reply.used_bytes
                messages = on_clock(reply.messages, clock_ns)
                future.set_result(WorkerReply(reply.results, frames, times_ns, used_bytes, traffic, clock_ns, messages))
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
        """Mark a worker as lost: fail the pending replies of its fault domain, and refuse new promises there."""
        self.lost.setdefault(worker, error)
        self._complaints.ended(error)
        self._fail(error, self.domain(worker))

    def give_up(self, error: OneboxError) -> None:
        """Fail all pending replies, and refuse new promises."""
        self._fail(error, None)

    def _fail(self, error: OneboxError, domain: int | None) -> None:
        """Fail the pending replies of a fault domain, or of all workers."""
        with self._lock:
            self._errors.setdefault(domain, error)
            keys = [key for key in self.futures if domain is None or self.domain(key[0]) == domain]
            futures = [self.futures.pop(key) for key in keys]
        for future in futures:
            fail(future, error)

    def release(self, now_s: float, silence_s: float = 0.0) -> None:
        """Fail the futures that were held back long enough for the cause of a peer's end; see
        :class:`DelayedPeerErrors`."""
        self._complaints.release(now_s, silence_s)
