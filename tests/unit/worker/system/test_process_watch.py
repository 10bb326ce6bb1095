"""What is seen of another process: that it has ended, and that it reads from a disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onebox.worker.system.process_watch import ProcessWatch, disk_reads, start_time

READS = """
import mmap, os, sys, time
from onebox.worker.system.process_watch import disk_reads
with open(sys.argv[1], "r+b") as file:
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel forgets its pages
    before, _ = disk_reads(os.getpid())
    with mmap.mmap(file.fileno(), 0) as memory:
        memory.madvise(mmap.MADV_RANDOM)
        sum(memory[place] for place in range(0, len(memory), 1 << 16))
    print(disk_reads(os.getpid())[0] - before)
"""


def test_pages_that_are_read_again_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    file.write_bytes(os.urandom(1 << 22))
    command = [sys.executable, "-c", READS, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    if done.stdout == "0\n":
        pytest.skip("the file system of temporary files keeps them in memory")
    assert int(done.stdout) > 10


def test_a_process_that_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch, begun = ProcessWatch(process.pid), start_time(process.pid)
        assert begun and not watch.ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.ended() and start_time(process.pid) == ""
    assert disk_reads(process.pid) == (0, False)
    with pytest.raises(ProcessLookupError):
        ProcessWatch(process.pid)
