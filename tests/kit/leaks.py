"""What this process has open or mapped, and that work leaves nothing of it behind."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SETTLING_S = 20.0
"""How long threads that are ending may take to close what they have open."""


def descriptors(process: int | str = "self") -> frozenset[tuple[str, str]]:
    """Return a process's open descriptors: their numbers, and what they are open at."""
    found = set()
    for name in os.listdir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):  # the one that listed the folder
            found.add((name, os.readlink(f"/proc/{process}/fd/{name}")))
    return frozenset(found)


def mapped(name: str, process: int | str = "self") -> int:
    """Return how many mappings a process has of memories whose name begins with `name`."""
    return Path(f"/proc/{process}/maps").read_text().count(f"/memfd:{name}")


@contextmanager
def nothing_left(memories: str = "onebox") -> Iterator[None]:
    """Fail if descriptors, or mappings of memories of this name, are left open by what runs within.

    What others had open before may well be closed meanwhile: earlier tests leave cycles to the collector, and libraries
    leave sockets to their threads.
    """
    gc.collect()
    before = descriptors()
    maps = mapped(memories)
    yield
    left: Counter[str] = Counter()
    end = time.monotonic() + SETTLING_S
    while True:
        gc.collect()
        left = Counter(what for _, what in descriptors() - before)
        more = mapped(memories) - maps
        if (not left and more <= 0) or time.monotonic() > end:
            break
        time.sleep(0.02)
    assert not left, f"left open: {dict(left)}"
    assert more <= 0, f"{more} memories are still mapped"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no further descriptor, as where a stranger has used them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
