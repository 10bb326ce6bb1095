"""The end of what a process writes to its standard error, however much it is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from onebox.pool.launch import stderr_tail as module
from onebox.pool.launch.stderr_tail import KEPT_BYTES, StderrTail
from tests.kit import leaks
from tests.kit.waiting import until

FLOOD = """
import os, sys, time
end_s, written = time.monotonic() + {seconds}, 0
while time.monotonic() < end_s:
    written += os.write(2, b"UserWarning: an output was resized\\n" * 100)
sys.stderr.write(f"last words: {{written}}\\n")
"""


def test_of_a_flood_the_end_is_kept_and_its_rate_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE_BPS", 4 << 20)
    with leaks.nothing_left():
        tail = StderrTail()
        began_s = time.monotonic()
        flood = subprocess.Popen([sys.executable, "-S", "-c", FLOOD.format(seconds=1.0)], stderr=tail.inlet)
        tail.inlet.close()
        assert flood.wait(30) == 0
        text = tail.text(4000)
        took_s = time.monotonic() - began_s
        said, _, written = text.rpartition(": ")
        assert said.endswith("last words") and len(text) <= 4000
        assert int(written) <= (took_s + 1) * (4 << 20) + (2 << 20)
        assert KEPT_BYTES - 1000 < len(tail.text(2 * KEPT_BYTES)) <= KEPT_BYTES
        tail.close()
        assert tail.closed
        tail.close()


def test_what_is_written_last_is_there_at_once() -> None:
    tail = StderrTail()
    try:
        for number in range(300):
            tail.inlet.write(f"line {number}\n".encode())
            assert tail.text(100).endswith(f"line {number}")
        assert tail.text(9) == "line 299"
    finally:
        tail.close()


def test_the_thread_ends_with_the_process_and_with_the_owner() -> None:
    for close in (False, True):
        before = set(threading.enumerate())
        tail = StderrTail()
        if close:
            tail.close()
        else:
            tail.inlet.close()
        until(lambda: set(threading.enumerate()) <= before)  # noqa: B023 - it is called at once
        tail.close()
    assert threading.active_count() < 100


def test_a_pipe_that_a_grandchild_keeps_open_delays_nothing() -> None:
    tail = StderrTail()
    kept = os.dup(tail.inlet.fileno())
    try:
        tail.inlet.write(b"the end")
        assert tail.text(100) == "the end"
        tail.close()
        assert os.fstat(kept), "and it is open still"
    finally:
        os.close(kept)


def test_without_another_descriptor_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with leaks.nothing_left():
        monkeypatch.setattr(os, "eventfd", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            StderrTail()
        monkeypatch.undo()
