"""A feed of processes and threads in a process of its own, for tests that end it by a signal."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time

from onebox.feed.pipeline.runner import Pipeline, StageSpec


def where(item: int) -> tuple[int, int]:
    """Say which process works on an item."""
    return item, os.getpid()


def main() -> None:
    """Take a few results, say which processes made them, and go on until a signal comes."""
    specs = [StageSpec("read", where, 2, "processes"), StageSpec("process", lambda result: result, 2)]
    try:
        with Pipeline(itertools.count(), specs) as ready:
            pids: set[int] = set()
            while len(pids) < 2:
                pids.add(next(ready)[1])
            print(*pids, flush=True)
            if sys.argv[1] == "computing":
                time.sleep(60)
            for _ in ready:
                time.sleep(0.01)
    finally:
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        print("left:", *left, flush=True)


if __name__ == "__main__":
    main()
