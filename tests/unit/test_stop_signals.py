"""Ctrl-C, SIGTERM and SIGHUP: the first is a request, the second Ctrl-C and the end of the time are not."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from onebox.errors import UsageError
from onebox.stop_signals import RECENT, InterruptibleClock, StopSignals, handling
from tests.kit.waiting import until

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def in_a_terminal() -> Iterator[None]:
    """Heed the signals that nohup and the background of a shell ignore, and leave the handlers as they were."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    assert {number: signal.getsignal(number) for number in usual} == usual
    for number, handler in before.items():
        signal.signal(number, handler)
    RECENT.forget()


def come(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_the_first_signal_is_a_request(number: signal.Signals, status: int) -> None:
    with StopSignals() as stop:
        assert not stop.requested and stop.status == 0
        come(number)
        assert stop.requested and stop.signal is number and stop.status == status
    assert not stop.expired


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_second_ctrl_c_ends_the_block_at_once(number: signal.Signals, status: int) -> None:
    with pytest.raises(BaseException) as caught, StopSignals() as stop:
        come(number)
        come(signal.SIGINT)
        raise AssertionError("it went on")
    assert stop.status == status
    if number is signal.SIGINT:
        assert type(caught.value) is KeyboardInterrupt
    else:
        assert isinstance(caught.value, SystemExit) and caught.value.code == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_schedulers_may_repeat_themselves(number: signal.Signals) -> None:
    with StopSignals() as stop:
        for _ in range(3):
            come(signal.SIGTERM)
            come(number)
    assert stop.signal is signal.SIGTERM


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_the_block_is_ended_when_the_time_is_over(number: signal.Signals, status: int) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)), StopSignals(0.2) as stop:
        come(number)
        time.sleep(60)
        pytest.fail("nobody ended it")
    assert stop.expired and stop.status == status


def test_without_time_the_first_signal_ends_the_block() -> None:
    with pytest.raises(SystemExit) as caught, StopSignals(0):
        come(signal.SIGTERM)
    assert caught.value.code == 143


def test_time_that_ends_after_the_block_ends_nothing() -> None:
    with StopSignals(30):
        come(signal.SIGTERM)
    until(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


def test_a_wait_ends_at_once_and_its_result_may_be_lost() -> None:
    with StopSignals() as stop:
        assert stop.wait_for(lambda: 3) == 3
        assert stop.wait_for(lambda: (come(signal.SIGTERM), time.sleep(60))) is None
        assert stop.requested
        assert stop.wait_for(lambda: 3) is None
        come(signal.SIGTERM)  # outside of a wait


def test_an_error_of_a_wait_is_its_own() -> None:
    with StopSignals() as stop, pytest.raises(ZeroDivisionError):
        stop.wait_for(lambda: 1 // 0)


def test_signals_that_are_ignored_stay_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as stop:
        come(signal.SIGHUP)
        assert not stop.requested
    assert signal.signal(signal.SIGHUP, signal.SIG_DFL) is signal.SIG_IGN


def test_nothing_happens_in_another_thread() -> None:
    found: list[bool] = []

    def run() -> None:
        with StopSignals() as stop:
            found.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_signal_that_comes_while_handlers_are_set_leaves_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    set_handler = signal.signal

    def interrupted(number: int, handler: object) -> object:
        if number == signal.SIGTERM and handler is not signal.SIG_DFL:
            raise KeyboardInterrupt
        return set_handler(number, handler)  # type: ignore[arg-type]

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), handling(lambda *_: None):
        pass
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("within_s", [-1.0, math.inf, math.nan])
def test_times_that_are_none(within_s: float) -> None:
    with pytest.raises(UsageError, match="within_s"):
        StopSignals(within_s)


def test_a_forked_process_is_ended_by_the_signal() -> None:
    """Such as a worker of a data loader, which its owner ends so."""
    with StopSignals(), handling(lambda number, _: None):
        pid = os.fork()
        if not pid:
            come(signal.SIGTERM)
            time.sleep(60)
            os._exit(7)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


@pytest.mark.feature("Checkpoints: Stop on a signal with a save")
def test_a_program_that_is_asked_to_stop_ends_as_a_shell_expects() -> None:
    text = """
import os, signal, sys, time
from onebox.stop_signals import StopSignals
signal.signal(signal.SIGTERM, signal.SIG_DFL)
with StopSignals(20) as stop:
    print("begun", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saved", flush=True)
sys.exit(stop.status)
"""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == ("saved\n", 143)


def test_the_first_ctrl_c_sets_a_clock_to_infinity() -> None:
    with InterruptibleClock() as clock:
        assert clock() < math.inf and not clock.interrupted
        come(signal.SIGINT)
        assert clock() == math.inf and clock.interrupted
    with clock, pytest.raises(KeyboardInterrupt):  # a second one, in another part of the same work
        come(signal.SIGINT)


def test_other_signals_have_their_effect_under_a_clock() -> None:
    came: list[int] = []
    with handling(lambda number, _frame: came.append(number)), InterruptibleClock() as clock:
        come(signal.SIGTERM)
        assert came == [signal.SIGTERM] and not clock.interrupted
        come(signal.SIGINT)
        come(signal.SIGINT)
    assert came == [signal.SIGTERM, signal.SIGINT] and clock.interrupted


def test_a_clock_that_is_not_enabled_leaves_ctrl_c_as_it_is() -> None:
    with pytest.raises(KeyboardInterrupt), InterruptibleClock(False) as clock:
        come(signal.SIGINT)
    assert not clock.interrupted
