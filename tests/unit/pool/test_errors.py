"""From failures to errors: the one that a person sees is the first cause, and says where, what and what to do."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, get_args, get_type_hints

import pytest

from onebox.errors import DeviceMemoryError, OneboxError, OperatorError, PeerLost, WireError, WorkerDied, WorkerError
from onebox.pool.errors import CAUSE_S, DelayedPeerErrors, WorkerLocation, fail, raise_first, to_error
from onebox.wire.protocol.responses import WorkerFailure

PLACE = WorkerLocation(worker=2, host="box", device="cuda:1")
LOST = PeerLost("the connection was closed", worker=0)
DIED = WorkerDied("worker 1 was ended by signal 9", worker=1, exit_status=-9)
CAUSE = OperatorError("worker 2: aten.mm.default failed", worker=2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("operator", OperatorError),
        ("memory", DeviceMemoryError),
        ("values", OperatorError),
        ("address", OperatorError),
        ("peer", PeerLost),
        ("protocol", WireError),
    ],
)
def test_each_kind_of_failure_is_an_error_of_its_own(kind: Any, expected: type[OneboxError]) -> None:
    error = to_error(WorkerFailure(kind, "aten.mm.default", "sizes differ", "float32[2, 3], float32[2, 3]"), PLACE)
    assert type(error) is expected
    text = str(error)
    for part in ("worker 2", "cuda:1", "box", "aten.mm.default", "sizes differ", "float32[2, 3], float32[2, 3]"):
        assert part in text
    assert len(text.splitlines()) >= 2, "what to do stands on a line of its own"
    if isinstance(error, WorkerError):
        assert (error.worker, error.host, error.device) == (2, "box", "cuda:1")
    if isinstance(error, OperatorError):
        assert (error.operator, error.shapes) == ("aten.mm.default", "float32[2, 3], float32[2, 3]")


@pytest.mark.parametrize("routine", [0, 7])
def test_an_operator_of_a_captured_model_that_plain_pytorch_would_run_can_be_run_otherwise(routine: int) -> None:
    failure = WorkerFailure("operator", "aten.view.default", "view size is not compatible", routine=routine)
    assert ("virtual device (vgpu)" in str(to_error(failure, PLACE))) == (routine != 0)


@pytest.mark.parametrize(
    ("operator", "message", "shapes", "cause", "parts"),
    [
        (
            "aten.nll_loss_forward.default",
            "Target 7 is out of bounds.",
            "float64[8, 4], int64[8]",
            "IndexError",
            ["a target of the batch is 7", "scores for 4 classes", "allowed are 0 to 3"],
        ),
        ("aten.embedding.default", "index out of range in self", "float32[9, 4], int64[8]", "IndexError", ["batch"]),
        (
            "aten.binary_cross_entropy.default",
            "all elements of input should be between 0 and 1",
            "float32[8], float32[8]",
            "RuntimeError",
            ["plain PyTorch says the same of this batch"],
        ),
        (
            "aten.nll_loss_forward.default",
            "CUDA error: device-side assert triggered",
            "float32[8, 4], int64[8]",
            "AcceleratorError",
            ["label", "out of range", "a cpu device says which"],
        ),
    ],
)
def test_what_a_batch_is_to_blame_for_is_said_of_the_batch(
    operator: str, message: str, shapes: str, cause: str, parts: list[str]
) -> None:
    text = str(to_error(WorkerFailure("operator", operator, message, shapes, cause), PLACE))
    for part in (message, shapes, *parts):
        assert part in text
    assert "report" not in text


def test_every_kind_has_an_error() -> None:
    for kind in get_args(get_type_hints(WorkerFailure)["kind"]):
        assert to_error(WorkerFailure(kind, "x", "y"), PLACE)


def future_of(complaints: DelayedPeerErrors, now_s: float) -> Future[Any]:
    future: Future[Any] = Future()
    complaints.complain(future, LOST, now_s)
    return future


def test_a_complaint_waits_for_the_end_of_the_peer() -> None:
    complaints = DelayedPeerErrors()
    future = future_of(complaints, 10.0)
    complaints.release(10.0 + CAUSE_S / 2)
    assert not future.done()
    complaints.ended(DIED)
    assert future.exception() is DIED


def test_a_complaint_does_not_wait_for_ever() -> None:
    complaints = DelayedPeerErrors()
    one, other = future_of(complaints, 10.0), future_of(complaints, 10.5)
    complaints.release(10.0 + CAUSE_S)
    assert one.exception() is LOST
    assert not other.done()
    complaints.release(10.5 + CAUSE_S)
    assert other.exception() is LOST
    complaints.ended(DIED)  # too late, and no second answer


def test_a_complaint_waits_until_all_workers_have_been_heard_since() -> None:
    complaints = DelayedPeerErrors()
    future = future_of(complaints, 10.0)
    complaints.release(12.0, silence_s=2.5)
    complaints.release(14.0, silence_s=4.0)
    assert not future.done(), "the one that is silent may be lost"
    complaints.release(14.25, silence_s=0.25)
    assert future.exception() is LOST


def test_when_somebody_has_failed_by_itself_nobody_waits() -> None:
    complaints = DelayedPeerErrors()
    before = future_of(complaints, 10.0)
    complaints.failed(10.1)
    after = future_of(complaints, 10.2)
    assert before.exception() is after.exception() is LOST
    much_later = future_of(complaints, 10.2 + 2 * CAUSE_S)
    assert not much_later.done(), "that failure is no news any more"


def test_failing_twice_keeps_the_first() -> None:
    future: Future[Any] = Future()
    fail(future, CAUSE)
    fail(future, LOST)
    assert future.exception() is CAUSE


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def test_answers_are_in_the_order_of_the_futures() -> None:
    assert raise_first([done(1), done(2), done(3)]) == [1, 2, 3]
    assert raise_first([]) == []


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([1, CAUSE, 2], CAUSE),
        ([LOST, CAUSE], CAUSE),
        ([LOST, LOST], LOST),
        ([CAUSE, DIED], CAUSE),
        ([LOST, 1, DIED, CAUSE], DIED),
    ],
)
def test_the_error_that_is_raised_is_no_complaint_if_there_is_another(results: list[Any], expected: Exception) -> None:
    with pytest.raises(type(expected)) as caught:
        raise_first([done(result) for result in results])
    assert caught.value is expected


def test_an_error_is_raised_before_the_others_are_done() -> None:
    never: Future[Any] = Future()
    with pytest.raises(OperatorError):
        raise_first([never, done(CAUSE)])


def test_a_complaint_waits_for_what_the_others_say() -> None:
    other: Future[Any] = Future()
    timer = threading.Timer(0.05, other.set_exception, (CAUSE,))
    timer.start()
    with pytest.raises(OperatorError):
        raise_first([done(LOST), other])
    timer.join()
