"""The watcher: who is let in, what counts as a stall, and when a worker ends itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from onebox.wire import KeyPair, configure, decode_worker_message, encode, new_keys
from onebox.wire.protocol.groups import LeaveGroup
from onebox.wire.protocol.requests import Envelope
from onebox.wire.protocol.responses import Heartbeat
from onebox.worker.process import heartbeat
from onebox.worker.process.heartbeat import HeartbeatThread, StallDetector
from onebox.worker.progress import WorkerProgress
from onebox.worker.system.process_watch import DISK_WAIT_S

# ---- stalls


def test_work_that_stands_still_is_a_stall_that_grows() -> None:
    stall = StallDetector()
    readings = [stall.reading(executed=5, waiting=False, processor_s=1.0, now_s=100 + now) for now in (0, 1, 2, 2.5)]
    assert readings == [0.0, 1.0, 2.0, 2.5]


@pytest.mark.parametrize("changed", ["executed", "waiting", "processor_s", "disk_reads", "state"])
def test_progress_waiting_and_computing_end_a_stall(changed: str) -> None:
    stall = StallDetector()
    still = {"executed": 5, "waiting": False, "processor_s": 1.0, "disk_reads": 7, "state": "S"}
    for now in (0.0, 1.0, 2.0):
        stall.reading(**still, now_s=now)  # type: ignore[arg-type]
    other = {"executed": 6, "waiting": True, "processor_s": 1.9, "disk_reads": 8, "state": "R"}
    moved = {**still, changed: other[changed]}
    assert stall.reading(**moved, now_s=3.0) == 0.0  # type: ignore[arg-type]
    assert stall.reading(**moved, now_s=4.0) == (0.0 if changed in ("waiting", "state") else 1.0)  # type: ignore[arg-type]


def test_the_first_reading_is_never_a_stall() -> None:
    assert StallDetector().reading(executed=0, waiting=False, processor_s=0.0, now_s=1e6) == 0.0


def test_a_watcher_that_could_not_run_cannot_tell() -> None:
    """As in a machine that was stopped for a while, or whose processors others had."""
    stall = StallDetector()
    readings = [stall.reading(executed=5, waiting=False, processor_s=1.0, now_s=now) for now in (0.0, 0.5, 60.0, 60.5)]
    assert readings == [0.0, 0.5, 1.5, 2.0]


def test_who_waits_for_a_disk_is_slow_and_not_hung_but_not_without_end() -> None:
    """As for a page that a sibling reads, too, and that counts as read by the sibling."""
    stall = StallDetector()
    stalled_s = {}
    for tick in range(int(2 * DISK_WAIT_S) + 20):
        now_s = 0.5 * tick
        stalled_s[now_s] = stall.reading(executed=5, waiting=False, processor_s=1.0, now_s=now_s, state="D")
    assert stalled_s[DISK_WAIT_S - 1] == 0.0
    assert stalled_s[DISK_WAIT_S + 5] > 3.0
    assert stall.reading(executed=5, waiting=False, processor_s=1.0, now_s=now_s + 1, state="D", disk_reads=1) == 0.0


def test_who_would_run_if_there_were_a_processor_is_told_from_who_waits() -> None:
    """By the main thread, which here is the one that asks, and then waits for another one that asks."""
    assert heartbeat.main_thread_state() == "R"
    found: list[str] = []
    asking = threading.Timer(0.1, lambda: found.append(heartbeat.main_thread_state()))
    asking.start()
    asking.join()
    assert found == ["S"]


WAITS = """
import ctypes, os, threading, time
from onebox.worker.process.heartbeat import main_thread_state
reads, writes = os.pipe()
def look():
    end_s = time.monotonic() + 20
    while (state := main_thread_state()) != "D" and time.monotonic() < end_s:
        time.sleep(0.01)
    os.write(writes, state.encode())
threading.Timer(0.3, look).start()  # not before the fork, in whose child no other thread may hold Python's lock
if not ctypes.CDLL(None).syscall(56, 0x4000 | 17, 0, 0, 0, 0):  # clone(CLONE_VFORK): the parent waits for the child
    print(os.read(reads, 1).decode(), flush=True)
    os._exit(0)
"""


def test_who_waits_in_the_kernel_is_told_from_who_sleeps() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "D\n"


def test_the_watcher_itself_is_not_work() -> None:
    stall = StallDetector()
    for tick in range(9):
        stalled_s = stall.reading(executed=3, waiting=False, processor_s=0.005 * tick, now_s=0.5 * tick)
    assert stalled_s == 4.0


Reading = tuple[int, bool, float, float]


@given(st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.floats(0, 1), st.floats(0.01, 2)), max_size=30))
def test_a_stall_is_never_longer_than_the_time_without_progress(steps: list[Reading]) -> None:
    stall = StallDetector()
    executed, processor_s, now_s, still_s = 0, 0.0, 0.0, 0.0
    stall.reading(executed=0, waiting=False, processor_s=0.0, now_s=0.0)
    for more, waiting, processor, elapsed in steps:
        executed, processor_s, now_s = executed + more, processor_s + processor, now_s + elapsed
        still_s = 0.0 if more or waiting else still_s + elapsed
        found = stall.reading(executed=executed, waiting=waiting, processor_s=processor_s, now_s=now_s)
        assert 0.0 <= found <= still_s + 1e-9


# ---- the thread, over sockets of this process


class Watched:
    """A watcher with a lifeline."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.keys, self.client = new_keys(), new_keys()
        self.lifeline, self.owner = os.pipe()
        self.progress = WorkerProgress()
        self.interrupted: list[int] = []
        self.watcher = HeartbeatThread(
            context,
            keys=self.keys,
            client_key=self.client.public,
            address="127.0.0.1",
            owner_descriptors=(self.lifeline,),
            progress=self.progress,
            meter=SimpleNamespace(used_bytes=3, peak_bytes=5),
            interrupt=self.interrupted.append,
        )
        self.watcher.start()

    def receive(self, keys: KeyPair | None, server_key: str | None = None, wait_s: float = 5.0) -> Heartbeat | None:
        """Connect with keys (without any when ``None``) and return the first sign of life, if one comes."""
        with self.context.socket(zmq.DEALER) as socket:
            if keys is not None:
                configure(socket, keys, server_key=server_key or self.keys.public)
            socket.linger = 0
            socket.connect(self.watcher.endpoint)
            if not socket.poll(int(wait_s * 1000)):
                return None
            message, _ = decode_worker_message(socket.recv_multipart())
            assert isinstance(message, Heartbeat)
            return message

    def close(self) -> None:
        self.watcher.stop()
        os.close(self.lifeline)
        os.close(self.owner)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.05)
    with zmq.Context() as context:
        made = Watched(context)
        yield made
        made.close()
        assert "onebox-watch" not in {each.name for each in threading.enumerate()}


def test_the_one_client_hears_that_the_worker_lives(watched: Watched) -> None:
    watched.progress.executed, watched.progress.doing, watched.progress.waiting = 7, "call", True
    beat = watched.receive(watched.client)
    assert beat is not None
    assert (beat.executed, beat.doing, beat.stalled_s) == (7, "call", 0.0)
    assert (beat.used_bytes, beat.peak_bytes) == (3, 5)


def test_the_first_heartbeat_comes_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 3600.0)
    with zmq.Context() as context:
        made = Watched(context)
        try:
            assert made.receive(made.client, wait_s=60.0) is not None
        finally:
            made.close()


def test_the_thread_sleeps_until_a_heartbeat_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    in_vain = [0]

    class Poller(zmq.Poller):
        """Counts the polls that end without an event."""

        def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
            found: list[tuple[Any, int]] = super().poll(timeout)
            in_vain[0] += not found
            return found

    monkeypatch.setattr(zmq, "Poller", Poller)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.05)
    with zmq.Context() as context:
        made = Watched(context)
        try:
            with context.socket(zmq.DEALER) as socket:
                configure(socket, made.client, server_key=made.keys.public)
                socket.connect(made.watcher.endpoint)
                for _ in range(20):
                    assert socket.poll(60_000)
                    socket.recv_multipart()
                    in_vain[0] -= 2
            assert in_vain[0] <= 0, "a poll may end a little early, but not again and again"
        finally:
            made.close()


def test_strangers_hear_nothing(watched: Watched) -> None:
    stranger = new_keys()
    strangers: dict[str, tuple[KeyPair | None, str | None]] = {
        "a key of its own": (stranger, None),
        "no key at all": (None, None),
        "another server's key": (watched.client, stranger.public),
        "a key not its own": (KeyPair(watched.client.public, stranger.secret), None),
    }
    with ThreadPoolExecutor(len(strangers)) as threads:
        heard = threads.map(lambda given: watched.receive(*given, wait_s=0.4), strangers.values())
        assert dict(zip(strangers, heard, strict=True)) == dict.fromkeys(strangers)
    assert watched.receive(watched.client) is not None, "and the client is still let in"


def test_groups_that_are_to_wait_no_longer_are_heard_of_beside_the_queue(watched: Watched) -> None:
    said = encode(Envelope(0, False, (LeaveGroup(3), LeaveGroup(5))))
    with watched.context.socket(zmq.DEALER) as socket:
        configure(socket, watched.client, server_key=watched.keys.public)
        socket.connect(watched.watcher.endpoint)
        socket.send(b"no message")
        socket.send(said)
        end_s = time.monotonic() + 20
        while watched.interrupted != [3, 5] and time.monotonic() < end_s:
            time.sleep(0.01)
    assert watched.interrupted == [3, 5]


def test_a_stall_is_told(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 1.0)  # this process is busy with the tests
    monkeypatch.setattr(heartbeat, "main_thread_state", lambda: "S")
    watched.progress.executed, watched.progress.waiting = 1, False
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        beat = watched.receive(watched.client)
        if beat is not None and beat.stalled_s > 0.1:
            return
    raise AssertionError("a worker that does nothing was never said to be stalled")


@pytest.mark.parametrize("how", ["closed", "written"])
def test_a_worker_ends_with_its_owner(watched: Watched, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    assert not ended.wait(0.2)
    if how == "closed":
        os.close(watched.owner)
        watched.owner = os.open(os.devnull, os.O_WRONLY)
    else:
        os.write(watched.owner, b"x")
    assert ended.wait(30)
