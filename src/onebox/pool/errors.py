"""Errors from failures that workers report: their choice and their text."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from onebox.errors import DeviceMemoryError, OneboxError, OperatorError, PeerLost, WireError
from onebox.portable import LINUX
from onebox.wire.protocol.responses import WorkerFailure

T = TypeVar("T")

SLICE_S = 0.2
"""Ctrl-C always ends a wait for workers within this time."""

CAUSE_S = 1.0
"""Least time for which a worker's error about a lost peer is held back for the cause of that peer's end."""

AFTERWARDS = (
    "open another pool and resume from the last checkpoint; a trainer with recovery=onebox.Recovery() goes on by "
    "itself, and so does a script under onebox run --recover"
)
"""Advice after the end of a worker."""

_ADVICE = {
    "operator": "what is computed from it is void; where plain PyTorch runs this operator on such tensors, it is an "
    "error of onebox, and the operator and the shapes say which",
    "data": "plain PyTorch says the same of this batch: look at the values, types and shapes that go into the model "
    "and the loss; what is computed from them is void",
    "assertion": "the script asserts this itself, by torch._assert_async or a function that calls it: look at the "
    "values that it checks",
    "overlap": "plain PyTorch says the same of these views: write to a tensor of its own, .clone() of the view",
    "nondeterministic": "the run is to be deterministic (onebox.Numerics, or torch.use_deterministic_algorithms in "
    "this process): leave this operator out of the model, or allow it with deterministic='warn' or False",
    "asserted": "a GPU says so of a number that is out of range, mostly a label or an index of an embedding: look at "
    "the values of the batch; a cpu device says which it is",
    "values": "use a cpu or cuda device where values are needed",
    "address": "behind a NAT let the agent serve at an address of its host that the router forwards to (onebox serve "
    "--bind), beside the one that it advertises; or let gradients be summed at the client (sync='client')",
    "memory": "use smaller batches, let go of what is needed no more, or give the device a larger budget (memory=)",
    "peer": "another worker of the group went away or did not answer in time",
    "protocol": "client and worker disagree; this is an error inside onebox",
}


ADVICE_IN_STEPS = (
    "use a smaller micro_batch, a plan with other policies (recompute, offload, swap; 'onebox memory' says which would "
    "fit, and what they cost), an optimizer on the host (update='host'), or a larger budget (memory=)"
)
"""Advice where memory is lacking in a planned step."""


MEANWHILE = "; please report it; meanwhile the model runs on a virtual device (vgpu), operator by operator"
"""Added where an operator of a captured model fails that plain PyTorch would run."""


@dataclass(frozen=True, kw_only=True)
class WorkerLocation:
    """The location of a worker, for messages."""

    worker: int
    host: str
    device: str

    def __str__(self) -> str:
        return f"worker {self.worker} ({self.device} on {self.host})"


def how_it_ended(status: int | None) -> str:
    """Describe the end of a worker's process by its exit status; its host has Linux, whatever this machine has."""
    if status is None or status >= 0:
        return f"ended with exit status {status}"
    name = f", {signal.Signals(-status).name}" if LINUX else ""
    memory = " (so does the kernel when memory runs out)" if -status == _KILLED else ""
    return f"was ended by signal {-status}{name}{memory}"


_KILLED = 9  # SIGKILL

_DATA = re.compile(
    r"out of bounds|out of range|must have the same dtype|same reduction dim|shapes cannot be multiplied|"
    r"size of tensor a|batch_size|target dtype|[Ee]xpected (scalar|tensor .* scalar) type|"
    r"should be between 0 and 1|Class values must be|size mismatch|same dtype|; allowed: |returned nan values"
)
"""Messages of PyTorch 2.11 to 2.13 about batches that a model or a loss rejects."""

_OFFLOADED = re.compile(r"have to be there at once|of the host's memory needed")
"""What a worker says of a lack of memory with the memory policy "offload"."""

_UNCHANGED = "nothing has changed: weights, the optimizer's state and buffers are as before, and the trainer can go on"

_CLASSES = re.compile(r"Target (-?\d+) is out of bounds")
_SCORES = re.compile(r"^\w+\[(?:\d+, )?(\d+)")
"""The number of classes in scores ``[B, C, ...]``, or ``[C]``, among the shapes of a loss's arguments."""


def _advice(failure: WorkerFailure) -> str:
    """Return advice about a failure."""
    if failure.routine != 0 and failure.kind == "memory":
        return ADVICE_IN_STEPS
    if failure.kind == "memory" and not _OFFLOADED.search(failure.message):
        return _ADVICE["memory"] + "; onebox run --memory-policy offload uses the memory of its host, too"
    if failure.kind != "operator":
        return _ADVICE[failure.kind]
    if "device-side assert" in failure.message:
        return _ADVICE["asserted"]
    if "_assert_async" in failure.operator and not _DATA.search(failure.message):
        return _ADVICE["assertion"]
    if failure.message.startswith("unsupported operation: ") and "single memory location" in failure.message:
        return _ADVICE["overlap"]
    if "does not have a deterministic implementation" in failure.message:
        return _ADVICE["nondeterministic"]
    if failure.cause != "IndexError" and not _DATA.search(failure.message):
        return _ADVICE["operator"] + (MEANWHILE if failure.routine != 0 else "")
    label, scores = _CLASSES.search(failure.message), _SCORES.search(failure.shapes)
    if label and scores and "nll_loss" in failure.operator:
        return (
            f"a target of the batch is {label[1]}, and the model gives scores for {scores[1]} classes: allowed are 0 "
            f"to {int(scores[1]) - 1}, and the loss's ignore_index; correct the targets, or let the model have more "
            "classes"
        )
    return _ADVICE["data"]


def to_error(failure: WorkerFailure, place: WorkerLocation) -> OneboxError:
    """Return the exception for a failure that a worker reported."""
    shapes = f" on ({failure.shapes})" if failure.shapes else ""
    in_step = failure.routine != 0
    message = f"{place}: {failure.operator} failed{shapes}: {failure.message}\n  {_advice(failure)}"
    message += f"\n  {_UNCHANGED}" if failure.kept and in_step else ""
    where: dict[str, Any] = {"worker": place.worker, "host": place.host, "device": place.device}
    if failure.kind == "protocol":
        return WireError(message)
    if failure.kind == "peer":
        return PeerLost(message, **where)
    about = {"said": failure.message, "cause": failure.cause, "kept": failure.kept, **where}
    about["steps"] = failure.steps
    if in_step:
        about["instruction"] = failure.routine, failure.place
        about["index"] = failure.index
    if failure.kind != "memory":
        return OperatorError(message, operator=failure.operator, shapes=failure.shapes, **about)
    return DeviceMemoryError(
        message,
        operator=failure.operator,
        shapes=failure.shapes,
        asked_bytes=failure.asked_bytes,
        used_bytes=failure.used_bytes,
        allowed_bytes=failure.allowed_bytes,
        **about,
    )


@dataclass
class DelayedPeerErrors:
    """Holds back errors about lost peers for a moment, because the cause of the peer's end may not be known yet.

    Pure but for the futures that it completes: the time is an argument.
    """

    _held: list[tuple[float, Future[Any], PeerLost]] = field(default_factory=list)
    _failed_s: float | None = None

    def complain(self, future: Future[Any], error: PeerLost, now_s: float) -> None:
        """Fail a future because of a lost peer, as soon as the cause is known, or is known not to be a lost worker; see
        :meth:`release`."""
        if self._failed_s is not None and now_s - self._failed_s < CAUSE_S:
            fail(future, error)
        else:
            self._held.append((now_s + CAUSE_S, future, error))

    def failed(self, now_s: float) -> None:
        """Note that a worker has failed by itself, which :func:`raise_first` prefers to an error about a lost peer."""
        self._failed_s = now_s
        self.release(now_s + CAUSE_S)

    def ended(self, error: OneboxError) -> None:
        """Note the end of a worker, the cause for all held-back futures."""
        for _, future, _ in self._held:
            fail(future, error)
        self._held.clear()

    def release(self, now_s: float, silence_s: float = 0.0) -> None:
        """Fail the futures that have waited for :data:`CAUSE_S`, and since which all workers have been heard: that the
        host of a peer is gone is known after several seconds only.

        Args:
            now_s: The time.
            silence_s: Time since the worker was heard that has been silent for the longest time.
        """
        heard_s = now_s - silence_s + CAUSE_S / 2  # a heartbeat from before the end may come after the error
        held, self._held = self._held, []
        for end_s, future, error in held:
            if min(now_s, heard_s) >= end_s:
                fail(future, error)
            else:
                self._held.append((end_s, future, error))


def fail(future: Future[Any], error: BaseException) -> None:
    """Fail a future unless it is done."""
    if not future.done():
        future.set_exception(error)


def wait_in_slices(futures: Collection[Future[Any]]) -> set[Future[Any]]:
    """Wait until all futures are done or one has failed, and return those that are not done.

    In slices, because a signal just before a thread begins to wait for a lock does not end that wait.
    """
    pending = {future for future in futures if not future.done()}
    failed = any(future.exception() is not None for future in futures if future not in pending) if pending else False
    while pending and not failed:
        done, pending = wait(pending, SLICE_S, FIRST_EXCEPTION)
        failed = any(future.exception() is not None for future in done) if pending else False
    return pending


def raise_first(futures: Sequence[Future[T]]) -> list[T]:
    """Wait for futures and return their results, or raise the first error as soon as it is known.

    Of several errors the first in the order of the futures is raised, errors about lost peers last. One that cost a
    step is raised when all futures are done, with the steps that others cost, unless there is a worse one by then.

    Raises:
        OneboxError: The error.
    """
    pending = set(futures)
    errors: list[BaseException] = []
    while pending and all(isinstance(error, PeerLost) for error in errors):
        pending = wait_in_slices(pending)
        errors = [error for future in futures if future.done() and (error := future.exception()) is not None]
    if errors:
        error = next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
        raise _with_all_steps(error, futures) if isinstance(error, OperatorError) and error.kept else error
    return [future.result() for future in futures]


def _with_all_steps(first: OperatorError, futures: Sequence[Future[Any]]) -> BaseException:
    """Wait for all futures; return an error that cost a step with the steps of all, or the first that cost more."""
    pending = {future for future in futures if not future.done()}
    while pending:
        pending = wait_in_slices(pending)
    found = dict.fromkeys(first.steps)
    for error in filter(None, (future.exception() for future in futures)):
        if not (isinstance(error, OperatorError) and error.kept):
            return error
        found |= dict.fromkeys(error.steps)
    first.steps = tuple(sorted(found))
    return first
