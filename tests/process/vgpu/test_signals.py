"""Handlers of signals that raise, Ctrl-C among them, in the middle of work on virtual devices."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.vgpu import signals
from tests.process.faults.scripts import Script

INTERRUPTIONS_S = 60.0
"""A script that is interrupted many times has ended within this time."""


DEVICES = 1
pytestmark = pytest.mark.usefixtures("pool")


@pytest.fixture
def alarm() -> Iterator[int]:
    before = signal.getsignal(signal.SIGALRM)
    yield signal.SIGALRM
    signal.signal(signal.SIGALRM, before)


INTERRUPTED = """
import random
from torch import nn

class Beep(Exception):
    pass

def beep(number, frame):
    raise Beep

with onebox.open("cpu*2", threads=1) as pool:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to("vgpu:1")
    x = torch.ones(8, 8, device="vgpu:1")
    w = torch.ones(8, 8, device="vgpu:0", requires_grad=True)
    total = torch.zeros((), device="vgpu:0")
    sure = model(x).sum().item()
    ready(pool)
    moments = random.Random({seed})
    signal.signal(signal.SIGALRM, beep)
    loops = [
        lambda: model(x).sum().item(),
        lambda: model(x).sum().backward(),
        lambda: (w * 2).exp().sum().backward(),
        lambda: total.add_(1),
    ]
    for loop in loops:
        for _ in range({count}):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, 5e-3))
                while True:
                    loop()
            except Beep:
                pass
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert model(x).sum().item() == sure
    assert total.item() > 0
"""


@pytest.mark.parametrize("seed", range(2))
def test_exceptions_of_handlers_arrive_once_and_nothing_breaks(tmp_path: Path, seed: int) -> None:
    # a handler's exception that is lost leaves its loop running for ever; in the guard of the device it would abort
    # an exception that is lost leaves its loop running for ever; one in the guard of the device would abort
    with Script(tmp_path, INTERRUPTED.format(seed=seed, count=50)) as script:
        script.wait_until_ready()
        assert script.end(INTERRUPTIONS_S) == (0, "", "")


def test_a_handler_is_known_to_its_owner_as_it_was(alarm: int) -> None:
    def mine(*_: Any) -> None: ...

    signal.signal(alarm, mine)
    assert signal.getsignal(alarm) is mine
    assert signal.signal(alarm, signal.SIG_DFL) is mine
    assert signal.signal(alarm, signal.SIG_IGN) is signal.SIG_DFL
    assert signal.getsignal(alarm) is signal.SIG_IGN


def test_wrong_handlers_are_refused_as_before(alarm: int) -> None:
    with pytest.raises(TypeError, match="signal handler must be"):
        signal.signal(alarm, "nonsense")  # type: ignore[arg-type]
    refused: list[BaseException] = []

    def elsewhere() -> None:
        try:
            signal.signal(alarm, signal.SIG_IGN)
        except ValueError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(refused[0])


def test_a_handler_gets_the_frame_that_it_interrupts(alarm: int) -> None:
    frames: list[Any] = []
    signal.signal(alarm, lambda number, frame: frames.append((number, frame.f_code.co_name)))
    signal.raise_signal(alarm)
    assert frames == [(alarm, "test_a_handler_gets_the_frame_that_it_interrupts")]


class Heard(Exception):
    """What a handler raises."""


@pytest.fixture
def heard(alarm: int) -> list[str]:
    where: list[str] = []

    def hear(_: int, frame: Any) -> None:
        where.append(frame.f_code.co_name)
        raise Heard

    signal.signal(alarm, hear)
    return where


@signals.shielded
def _shielded(then: Any) -> None:
    signal.raise_signal(signal.SIGALRM)
    then()


@signals.interruptible
def _open() -> None:
    signals.deliver_signals()
    raise AssertionError("a signal that waits was not delivered")


def _until(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


def test_a_handler_waits_for_the_end_of_a_shielded_function(heard: list[str]) -> None:
    with pytest.raises(Heard):
        _shielded(lambda: None)
        _until(10)
    assert heard == ["_until"]


def test_a_handler_does_not_wait_for_a_wait(heard: list[str]) -> None:
    with pytest.raises(Heard):
        _shielded(_open)
    assert heard == ["_open"]


def test_a_handler_does_not_wait_for_ever(heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "PATIENCE_S", 0.05)
    with pytest.raises(Heard):
        _shielded(lambda: _until(10))
    assert heard == ["_until"]


def test_a_signal_whose_repetition_another_handler_ends_is_not_lost_for_good(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Exception):
        pass

    raise_signal = signal.raise_signal

    def ended(number: int) -> None:
        raise_signal(number)
        if threading.current_thread() is threading.main_thread():
            raise Other  # the handler of another signal that was pending

    with monkeypatch.context() as patch, pytest.raises(Other):
        _shielded(lambda: patch.setattr(signal, "raise_signal", ended))
        _until(10)
    assert heard == []
    with pytest.raises(Heard):
        signal.raise_signal(signal.SIGALRM)


def test_a_signal_that_comes_again_meanwhile_calls_its_handler_once(
    alarm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[str] = []
    signal.signal(alarm, lambda number, frame: handled.append(frame.f_code.co_name))
    must_wait, times = signals._must_wait, iter(range(10))

    def come_again(frame: Any) -> bool:
        if next(times) == 1:  # the first signal is deferred; while it is let through, it comes once more
            signal.raise_signal(alarm)
        return must_wait(frame)

    monkeypatch.setattr(signals, "_must_wait", come_again)
    _shielded(lambda: None)
    end_s = time.monotonic() + 10
    while not handled and time.monotonic() < end_s:
        pass
    time.sleep(20 * signals.AGAIN_S)
    assert len(handled) == 1


def test_a_deferred_signal_is_raised_again_only_when_its_handler_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two at a time the second would end the deferral in the first line of the first one's handler."""
    number, turns, raised = int(signal.SIGUSR2), itertools.count(1), list[int]()

    def sleep(_: float) -> None:
        match next(turns):
            case 100:
                signals._resent.discard(number)  # as the handler does when it returns
            case 150:
                signals._waiting.pop(number)

    monkeypatch.setattr(signals, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(signals, "signal", SimpleNamespace(raise_signal=raised.append))
    monkeypatch.setitem(signals._waiting, number, 0.0)
    monkeypatch.setattr(signals, "_resent", set())
    signals._come_again(number)
    assert raised == [number, number]
