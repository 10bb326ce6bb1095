"""Workers that end by themselves or by somebody else's hand, before, between and after the work."""

from __future__ import annotations

import os
import signal

import pytest

from onebox.errors import PoolError, WorkerDied
from onebox.pool import open as opening_module
from onebox.pool import open_pool
from onebox.pool.discovery import DeviceRequest
from tests.process.faults.training import AT_ONCE_S, fails, questions, steps, train, trainer_on

START_S = 240.0
"""A worker that cannot start is reported within this time, on a loaded machine too."""


def test_an_idle_worker_that_is_killed_is_reported_at_the_next_call_with_its_last_words() -> None:
    number = signal.SIGABRT
    with open_pool("cpu*2", threads=1) as pool, trainer_on(pool, "workers") as trainer:
        steps(trainer, 1)
        os.kill(pool.process_ids[1], number)
        raised = fails(trainer.memory)
        assert raised.after_s < AT_ONCE_S
        error = raised.error
        assert isinstance(error, WorkerDied)
        assert (error.worker, error.exit_status) == (1, -number)
        assert f"was ended by signal {number.value}, {number.name}" in str(error)
        assert "Fatal Python error: Aborted" in error.last_words
        assert error.last_words in str(error)
        for question in questions(trainer):
            assert fails(question).error is error


def test_a_worker_that_cannot_start_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [DeviceRequest(device=device, threads=1) for device in ("cpu", "cuda:97")]
    monkeypatch.setattr(opening_module, "requested_devices", lambda *_: requests)
    raised = fails(open_pool)
    assert raised.after_s < START_S
    error = raised.error
    assert isinstance(error, WorkerDied)
    assert (error.worker, error.device, error.exit_status) == (1, "cuda:97", 1)
    assert "Traceback" in error.last_words
    assert "worker 1 (cuda:97 on localhost)" in str(error)


def test_stopped_workers_do_not_hold_up_the_end_and_a_closed_pool_says_so() -> None:
    with open_pool("cpu*2", threads=1) as pool:
        trainer = trainer_on(pool, "workers")
        for process in pool.process_ids:
            os.kill(process, signal.SIGSTOP)
        pool.close()
    for question in (*questions(trainer), lambda: train(pool, "workers")):
        error = fails(question).error
        assert isinstance(error, PoolError)
        assert "closed" in str(error)
