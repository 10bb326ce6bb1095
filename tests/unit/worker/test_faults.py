"""Faults on purpose: each comes with the instruction that it is for, by kind and count."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from onebox.worker.faults import Fault, FaultInjector
from onebox.worker.progress import WorkerProgress


def happen(injector: FaultInjector, *instructions: str) -> list[str]:
    """Begin instructions and return what came of each."""
    found = []
    for instruction in instructions:
        progress = WorkerProgress()
        progress.doing = instruction
        try:
            injector.before(progress)
            found.append("nothing")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_a_fault_counts_instructions_of_its_kind() -> None:
    injector = FaultInjector((Fault("error", "call", 2), Fault("memory", "reduce", 1)))
    assert happen(injector, "call", "put", "call", "call", "reduce", "reduce") == [
        "nothing",
        "nothing",
        "RuntimeError",
        "nothing",
        "OutOfMemoryError",
        "nothing",
    ]


def test_without_faults_nothing_happens() -> None:
    assert happen(FaultInjector(), *["call"] * 100) == ["nothing"] * 100


@pytest.mark.parametrize(("kind", "expected"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_go_to_the_own_process(monkeypatch: pytest.MonkeyPatch, kind: Any, expected: int) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    happen(FaultInjector((Fault(kind, "put", 1),)), "put")
    assert sent == [(os.getpid(), expected)]


def test_a_hang_lasts_longer_than_any_test(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    happen(FaultInjector((Fault("hang", "put", 1),)), "put")
    assert slept[0] >= 600


def test_out_of_memory_is_what_torch_raises() -> None:
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
