"""Calls that other threads leave to the thread that begins steps."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from onebox.engine.workload.step_thread import StepThread
from onebox.errors import CaptureError, OneboxError


def served(steps: StepThread, asked: Future[int]) -> None:
    """Serve until a call has been made."""
    while not asked.done():
        steps.serve()


def called(steps: StepThread, stopped: threading.Event, error: BaseException | None = None) -> int:
    """Ask for the number of the thread that makes the call."""

    def identify() -> int:
        if error is not None:
            raise error
        return threading.get_ident()

    with steps.beside(stopped):
        assert steps.elsewhere
        return steps.call(identify)


def test_a_call_of_a_thread_beside_the_steps_is_made_by_that_of_the_steps() -> None:
    steps = StepThread()
    assert not steps.elsewhere
    assert steps.call(threading.get_ident) == threading.get_ident()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(called, steps, threading.Event())
        served(steps, asked)
        assert asked.result() == threading.get_ident()
        assert not other.submit(lambda: steps.elsewhere).result()


@pytest.mark.parametrize("error", [CaptureError("cannot be captured"), TimeoutError("cannot be captured")])
def test_an_error_of_the_call_is_the_caller_s(error: Exception) -> None:
    steps = StepThread()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(called, steps, threading.Event(), error)
        served(steps, asked)
        with pytest.raises(type(error), match="cannot be captured"):
            asked.result(60)


def test_an_interrupted_call_ends_the_wait_for_it_too() -> None:
    steps = StepThread()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(called, steps, threading.Event(), KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            served(steps, asked)
        with pytest.raises(OneboxError, match="was interrupted"):
            asked.result(60)


def test_a_call_that_nobody_makes_ends_when_its_thread_is_to_stop() -> None:
    steps, stopped = StepThread(), threading.Event()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(called, steps, stopped)
        stopped.set()
        with pytest.raises(OneboxError, match="the run ended"):
            asked.result(60)
    steps.serve()  # the call is void
