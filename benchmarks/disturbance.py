"""A process that keeps a core busy in bursts, as other programs of a desktop do.

It computes and sleeps in turn, each for 10 to 200 ms drawn from a seed, so that it wants half of a core, until its
standard input is closed or its time is over.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHORTEST_S, LONGEST_S = 0.01, 0.2
"""Bounds of a burst, and of the pause after it."""


@contextmanager
def disturbance(*, seed: int = 0, most_s: float = 600.0) -> Iterator[None]:
    """Run the process beside what is measured; it ends in any case.

    Args:
        seed: Seed of its bursts.
        most_s: Seconds after which it ends by itself.
    """
    command = [sys.executable, str(Path(__file__)), str(seed), str(most_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the disturbance ended before the measurements, with status {process.returncode}")
    finally:
        process.kill()
        process.communicate(timeout=30)


def disturb(seed: int, most_s: float) -> None:
    """Compute and sleep in turn."""
    chosen, end_s = random.Random(seed), time.monotonic() + most_s
    while time.monotonic() < end_s:
        until_s = time.monotonic() + chosen.uniform(SHORTEST_S, LONGEST_S)
        while time.monotonic() < until_s:
            pass
        if select.select([sys.stdin], [], [], chosen.uniform(SHORTEST_S, LONGEST_S))[0]:
            return


if __name__ == "__main__":
    disturb(int(sys.argv[1]), float(sys.argv[2]))
