"""Processes that were killed and do not end: nobody waits for them without a bound, and they are reaped later.

One that waits in the kernel is made by tracing a thread of it: until its tracer takes note of the end of that thread,
the process does not end, killed or not.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebox.forking import ForkedProcess
from onebox.reaping import LEFT_BEHIND, LeftProcess, LeftProcesses, end_process, has_ended
from tests.kit.waiting import until

SCRIPT = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(1, flush=True)"
PTRACE_SEIZE, WALL = 0x4206, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class Stuck:
    """A process that does not end when it is killed, until it is let go."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command or [sys.executable, "-S", "-c", SCRIPT], stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline()
        (self.thread,) = [
            int(name) for name in os.listdir(f"/proc/{self.process.pid}/task") if int(name) != self.process.pid
        ]
        if libc.ptrace(PTRACE_SEIZE, self.thread, None, None) != 0:
            self.process.kill()
            pytest.skip(f"this system lets nobody trace: {os.strerror(ctypes.get_errno())}")
        self.held = True

    def let_go(self) -> None:
        if self.held:
            self.held = False
            os.waitpid(self.thread, WALL)
            self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.let_go()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.close()
    LEFT_BEHIND.news()


def test_a_killed_process_that_does_not_end_is_left_behind_and_reaped_later(
    stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    LEFT_BEHIND.news()
    with caplog.at_level(logging.WARNING, "onebox"):
        assert not end_process(stuck.process, "a test's process", grace_s=0.1, killed_s=0.2)
    assert f"a test's process, process {stuck.process.pid}, was killed and does not end" in caplog.text
    pid = stuck.process.pid
    assert LEFT_BEHIND.news() == [LeftProcess("a test's process", pid, ended=False)]
    assert LEFT_BEHIND.news() == [] and len(LEFT_BEHIND) == 1
    os.waitpid(stuck.thread, WALL)
    stuck.held = False
    news = until(LEFT_BEHIND.news)
    assert news == [LeftProcess("a test's process", pid, ended=True)]
    assert len(LEFT_BEHIND) == 0 and stuck.process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_ends_is_waited_for() -> None:
    left = len(LEFT_BEHIND)
    for script, grace_s, status in (("pass", 20.0, 0), ("import time; time.sleep(600)", 0.0, -signal.SIGKILL)):
        process = subprocess.Popen([sys.executable, "-S", "-c", script])
        assert end_process(process, "one", grace_s=grace_s)
        assert process.returncode == status
    assert len(LEFT_BEHIND) == left


def test_a_process_descriptor_tells_the_end() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    descriptor = os.pidfd_open(process.pid)
    try:
        assert not has_ended(descriptor, 0.0) and not has_ended(descriptor, 0.05)
        process.kill()
        assert has_ended(descriptor, 10.0)
    finally:
        os.close(descriptor)
        process.wait(10)


def test_those_that_are_left_are_counted() -> None:
    left = LeftProcesses()
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    left.add(process, "one", os.pidfd_open(process.pid))
    assert len(left) == 1 and [each.ended for each in left.news()] == [False]
    process.kill()
    until(lambda: not len(left), turn=left.reap)
    assert process.returncode == -signal.SIGKILL


def test_a_forked_process_that_was_closed_is_reaped_without_a_wait() -> None:
    """It is the fork server's child; what is left here is its descriptor."""
    left = LeftProcesses()
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    reader, writer = os.pipe()
    os.close(writer)
    forked = ForkedProcess(child.pid, os.pidfd_open(child.pid), reader)
    left.add(forked, "a worker", os.dup(forked.descriptor))
    forked.close()
    child.kill()
    child.wait(10)
    assert [each.ended for each in left.news()] == [False, True] and not len(left)
    assert left.news() == []


def test_a_forked_process_whose_fork_server_has_ended_is_reaped_by_an_init() -> None:
    """An agent is one in a container without another."""
    program = """
import os, time
from onebox.forking import ForkedProcess, adopt_orphans
adopt_orphans()
read, written = os.pipe()
if not os.fork():
    orphan = os.fork()
    if not orphan:
        time.sleep(600)
    os.write(written, str(orphan).encode())
    os._exit(0)
os.wait()
orphan = int(os.read(read, 20))
forked = ForkedProcess(orphan, os.pidfd_open(orphan), -1)
forked.kill()
print(forked.wait(10), forked.wait(10), os.path.exists(f"/proc/{orphan}"))
forked.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "None None False\n", done.stderr
