"""A run whose host is cut off again and again, for good as far as the run can tell, and comes back each time.

As a program it prints the times of many tries: ``python -m tests.net.cuts --tries 50``.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onebox
from tests.kit.reference import Outcome
from tests.kit.waiting import until
from tests.net.fleet import MACHINES, Fleet
from tests.net.hosts import Network, unavailable
from tests.net.training import batch, outcome, plans, survivor

BOUND_S = 5.0
"""Within this time a run is to go on with the devices that are left."""

BACK_S = 60.0
PAUSE_S = 0.1
"""Between two steps while nothing is measured, so that a reference run of as many steps is quick."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What came of one try.

    Args:
        stalled_s: From the moment when the cable was out until a step was done without the host.
        back_s: From the moment when it was in again until the host's device was used again.
        failure: What the run said of the loss.
    """

    stalled_s: float
    back_s: float
    failure: str


class Sufferer:
    """A data-parallel run over three hosts of which one is cut off.

    Args:
        trainer: Its trainer.
        network: The network.
        victim: The host; the last of the pool.
    """

    def __init__(self, trainer: onebox.Trainer, network: Network, victim: str) -> None:
        self.trainer = trainer
        self.losses: list[object] = []
        self._host = network[victim]
        self._worker = len(trainer.pool) - 1

    @property
    def outcome(self) -> Outcome:
        return outcome(self.trainer, self.losses)

    def step(self) -> None:
        self.losses.append(self.trainer.step(*batch(len(self.losses))))
        self.trainer.wait()

    def steps_for(self, time_s: float) -> None:
        end_s = time.monotonic() + time_s
        while time.monotonic() < end_s:
            self.step()
            time.sleep(PAUSE_S)

    def until_used(self, within_s: float = BACK_S) -> float:
        """Train until the victim's device is in the plan again; return the seconds that it took."""
        began_s = time.monotonic()

        def step() -> None:
            self.step()
            time.sleep(PAUSE_S)

        until(lambda: self.trainer.plan is not None and self._worker in self.trainer.plan.devices, within_s, step)
        return time.monotonic() - began_s

    def cut_off(self) -> Cut:
        """Cut the host off until the run goes on without it, and let it come back."""
        known = len(self.trainer.recoveries)
        self._host.plug(False)
        try:
            began_s = time.monotonic()
            while len(self.trainer.recoveries) == known:
                self.step()
            stalled_s = time.monotonic() - began_s
            assert self._worker in self.trainer.pool.gone
        finally:
            self._host.plug(True)
        return Cut(stalled_s=stalled_s, back_s=self.until_used(), failure=self.trainer.recoveries[-1].failure)


@contextlib.contextmanager
def sufferer(fleet: Fleet, network: Network) -> Iterator[Sufferer]:
    """A run with the usual grace and bounds."""
    with (
        fleet.client(),
        onebox.open(fleet.spec(), threads=1) as pool,
        survivor(pool, plans()["data-parallel"]) as trainer,
    ):
        made = Sufferer(trainer, network, MACHINES[-1])
        made.step()
        yield made


def main() -> None:
    """Print what came of many tries."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1800.0)
    arguments = parser.parse_args()
    why = unavailable()
    if why:
        sys.exit(why)
    seeded, found = random.Random(7), []
    end_s = time.monotonic() + arguments.seconds
    with (
        Network([*MACHINES, "client"]) as network,
        tempfile.TemporaryDirectory() as folder,
        Fleet(network, Path(folder)) as fleet,
    ):
        for name in MACHINES:
            fleet.pair(name)
        fleet.start(MACHINES)
        with sufferer(fleet, network) as run:
            while len(found) < arguments.tries and time.monotonic() < end_s:
                run.steps_for(1 + seeded.random())
                found.append(run.cut_off())
                each = found[-1]
                print(
                    f"{len(found)}: {each.stalled_s:.2f} s, back after {each.back_s:.1f} s; {each.failure[:90]}",
                    flush=True,
                )
    within = sum(each.stalled_s <= BOUND_S for each in found)
    stalls = sorted(each.stalled_s for each in found)
    print(
        f"{within} of {len(found)} within {BOUND_S:.0f} s; median {stalls[len(stalls) // 2]:.2f}, most {stalls[-1]:.2f}"
    )


if __name__ == "__main__":
    main()
