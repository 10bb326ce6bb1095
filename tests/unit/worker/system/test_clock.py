"""Sleeps that end when they are due."""

from __future__ import annotations

import time
from typing import Any

import pytest

from onebox.worker.system import clock as module
from onebox.worker.system.clock import sleep_until


@pytest.mark.parametrize("end_s", [0.02, 0.0, -1.0])
def test_a_sleep_is_never_shorter_than_asked_for(end_s: float) -> None:
    end_ns = time.monotonic_ns() + int(end_s * 1e9)
    sleep_until(end_ns)
    assert time.monotonic_ns() >= end_ns


def test_a_sleep_that_is_woken_early_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, naps = [0], [0]

    def nap(seconds: float) -> None:
        naps[0] += 1
        now_ns[0] += int(seconds * 1e9 / 2) + 1

    def now() -> int:
        now_ns[0] += 100
        return now_ns[0]

    clock: Any = type("Clock", (), {"monotonic_ns": now, "sleep": nap})
    monkeypatch.setattr(module, "time", clock)
    sleep_until(1_000_000)
    assert now_ns[0] >= 1_000_000
    assert naps[0] > 5
