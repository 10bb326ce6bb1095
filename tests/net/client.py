"""A client for tests that stop and kill it: trains over three hosts, tells of each step, and of what came of it."""

from __future__ import annotations

import itertools
import sys
import time

import onebox
from tests.net.fleet import GRACE_S
from tests.net.training import STEPS, batch, digest, outcome, plans, survivor

READ_S = 0.2
"""What a loop may take to read its next batch."""


def main() -> None:
    """Train to an end, and then on until somebody ends this process."""
    with onebox.open(sys.argv[1], threads=1, grace_s=GRACE_S) as pool:
        plan = plans()["data-parallel"]
        with survivor(pool, plan) as trainer:
            losses = []
            for step in range(STEPS):
                losses.append(trainer.step(*batch(step)))
                trainer.wait()
                print(f"step {step}", flush=True)
                time.sleep(READ_S)
            print(f"digest {digest(outcome(trainer, losses))} recoveries {len(trainer.recoveries)}", flush=True)
            for step in itertools.count(STEPS):
                trainer.step(*batch(step))


if __name__ == "__main__":
    main()
