"""The client's loop, when Ctrl-C comes while its thread starts."""

from __future__ import annotations

import threading

import pytest

from onebox.errors import PoolError
from onebox.pool.client.loop import ClientLoop
from onebox.wire import new_keys


@pytest.mark.parametrize("runs", ["before it is stopped", "after it was stopped"])
def test_a_loop_whose_start_was_interrupted_ends(monkeypatch: pytest.MonkeyPatch, runs: str) -> None:
    """The thread may run, or begin to run later, and whoever has started it does not know."""
    start, begun = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        begun.append(thread)
        if runs == "before it is stopped":
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    loop = ClientLoop(new_keys())
    with pytest.raises(KeyboardInterrupt):
        loop.start()
    loop.stop()
    monkeypatch.undo()
    [thread] = begun
    if runs == "after it was stopped":
        start(thread)
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(PoolError, match="the pool is closed"):
        loop.mend()
