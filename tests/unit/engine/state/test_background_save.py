"""A save aside: its result, its errors, and who is told of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from onebox.engine.state.background_save import BackgroundSave
from onebox.errors import CheckpointError, WorkerDied

PATH = Path("checkpoint")


def begun(write: Callable[[], Path], told: list[object]) -> BackgroundSave:
    return BackgroundSave(write, told.append, lambda: told.append("dropped"), path=PATH)


def failing(error: Exception) -> Callable[[], Path]:
    def write() -> Path:
        raise error

    return write


def test_it_is_done_when_it_is_written() -> None:
    told: list[object] = []
    go = threading.Event()

    def write() -> Path:
        go.wait(30)
        return PATH / "step-00000001"

    save = begun(write, told)
    assert not save.done and not told
    go.set()
    assert save.result() == PATH / "step-00000001"
    save.end()
    assert save.done and told == [PATH / "step-00000001", "dropped"]
    now = BackgroundSave.ended(PATH)
    assert now.done and now.result() == PATH
    now.end()


def test_an_error_is_raised_once_unless_it_was_asked_for() -> None:
    told: list[object] = []
    save = begun(failing(CheckpointError("no room", path=PATH)), told)
    with pytest.raises(CheckpointError, match="no room"):
        save.end()
    save.end()
    other = begun(failing(CheckpointError("no room", path=PATH)), told)
    with pytest.raises(CheckpointError, match="no room"):
        other.result()
    other.end()
    assert told == ["dropped"] * 2


def test_a_copy_that_is_lost_with_a_worker_ends_the_save_and_not_the_run() -> None:
    save = begun(failing(WorkerDied("worker 1 has ended", worker=1)), [])
    text = r"written to checkpoint, as its copy .* is lost: worker 1 has ended; .*save again"
    with pytest.raises(CheckpointError, match=text):
        save.result()
