"""From failures to errors: which one a person should see, and what it says."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from onebox.errors import DeviceMemoryError, OneboxError, OperatorError, WireError, WorkerError
from onebox.wire.messages import Failure

CAUSE_S = 1.0
"""How long a worker's complaint about a lost peer waits for the news of what befell that peer."""

_ADVICE = {
    "operator": "the step is void; if the plain model runs, please report the operator and its shapes",
    "memory": "use a smaller micro_batch, or a device or quota with more memory",
    "peer": "another worker of the group went away or did not answer in time",
    "protocol": "client and worker disagree; this is an error inside onebox",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker is, for messages."""

    worker: int
    host: str
    device: str

    def __str__(self) -> str:
        return f"worker {self.worker} ({self.device} on {self.host})"


def to_error(failure: Failure, place: Place) -> OneboxError:
    """Return the exception for a failure that a worker reported."""
    shapes = f" on ({failure.shapes})" if failure.shapes else ""
    message = f"{place}: {failure.operator} failed{shapes}: {failure.message}\n  {_ADVICE[failure.kind]}"
    where: dict[str, Any] = {"worker": place.worker, "host": place.host, "device": place.device}
    if failure.kind == "protocol":
        return WireError(message)
    kind = {"memory": DeviceMemoryError, "operator": OperatorError, "peer": WorkerError}[failure.kind]
    if kind is WorkerError:
        return WorkerError(message, **where)
    return kind(message, operator=failure.operator, shapes=failure.shapes, **where)


@dataclass
class Causes:
    """Holds back complaints about lost peers until it is known what befell the peer.

    Pure but for the futures that it completes: the time is an argument.
    """

    _held: list[tuple[float, Future[Any], OneboxError]] = field(default_factory=list)
    _cause: tuple[float, OneboxError] | None = None

    def complain(self, future: Future[Any], error: OneboxError, now_s: float) -> None:
        """Fail a future because of a lost peer, as soon as the cause is known, or after :data:`CAUSE_S`."""
        if self._cause is not None and now_s - self._cause[0] < 5 * CAUSE_S:
            fail(future, self._cause[1])
        else:
            self._held.append((now_s + CAUSE_S, future, error))

    def cause(self, error: OneboxError, now_s: float) -> None:
        """Take the news of a failure that is nobody else's fault."""
        if self._cause is None or now_s - self._cause[0] >= 5 * CAUSE_S:
            self._cause = (now_s, error)
        for _, future, _ in self._held:
            fail(future, self._cause[1])
        self._held.clear()

    def release(self, now_s: float) -> None:
        """Fail the futures that have waited long enough."""
        for end_s, future, error in self._held:
            if now_s >= end_s:
                fail(future, error)
        self._held = [held for held in self._held if now_s < held[0]]

    @property
    def waiting(self) -> bool:
        """Whether complaints are held back."""
        return bool(self._held)


def fail(future: Future[Any], error: BaseException) -> None:
    """Fail a future that is not done yet."""
    if not future.done():
        future.set_exception(error)
