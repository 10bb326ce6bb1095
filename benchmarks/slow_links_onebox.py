"""The client of onebox's sides of ``slow_links.py``, on the first of the hosts, whose device is one of the pool's.

Usage: python slow_links_onebox.py SETTING SPEC
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import slow_links_model as models
import torch
from slow_links_sides import SIDES, Setting, serve

import onebox
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage


class Client:
    """A pool, and trainers on it by the names of their sides.

    Args:
        setting: What they are run with.
        pool: A device of each host, in the order of the hosts.
    """

    def __init__(self, setting: Setting, pool: onebox.Pool) -> None:
        self._setting, self._pool = setting, pool
        self._size = models.size_of(setting.size, setting.batch)
        self._runs: dict[str, Run] = {}

    def options(self, side: str) -> dict[str, Any]:
        """Return the arguments of a side's trainer.

        Nobody recovers from anything here: no side of PyTorch's does, and snapshots would take the link.
        """
        devices = range(len(self._setting.addresses))
        whole = Plan.data_parallel(devices, [1.0] * len(devices))
        options: dict[str, Any] = {"recovery": None}
        if side == "sync":
            options["plan"] = whole
        elif SIDES[side].codec:
            (stage,) = whole.stages
            codec: dict[str, Any] = {"gradients": SIDES[side].codec}
            stages = (msgspec.structs.replace(stage, **codec),)
            options |= {"plan": msgspec.structs.replace(whole, stages=stages), "lossy": ("gradients",)}
        elif side == "gated":
            options |= {"plan": "auto", "lossy": ("gradients",)}
        elif side == "islands":
            setting = self._setting
            outer = onebox.Outer(
                every=setting.every,
                lr=setting.outer_rate,
                momentum=setting.outer_momentum,
                fragments=setting.fragments,
                overlap=setting.overlap,
                compression=setting.compression,  # type: ignore[arg-type]
                shares="equal",
            )
            options |= {"islands": [[device] for device in devices], "outer": outer}
        elif side == "single":
            options["plan"] = Plan.data_parallel([0], [1.0])
        elif side == "pipelined":
            options["plan"] = self._pipelined()
        elif side == "adaptive":
            options |= {"plan": "auto", "adaptive": True}
        elif side != "default":
            raise ValueError(f"no side of onebox: {side}")
        return options

    def _pipelined(self) -> Plan:
        """Return the plan of a stage on each device, of as many segments each, with two micro-batches for each."""
        count = len(self._setting.addresses)
        micro_batch = self._size.batch // (2 * count)
        inputs, targets = models.batch(self._size, 0, 0)
        model, _ = models.made(self._size, 0)
        names = TracedModel(
            capture(model, models.loss_of, (inputs[:micro_batch], targets[:micro_batch])), backward=True
        ).segments
        cuts = [len(names) * stage // count for stage in range(count + 1)]
        stages = tuple(
            Stage(segments=names[begin:end], replicas=((device,),), shares=(1.0,))
            for device, (begin, end) in enumerate(pairwise(cuts))
        )
        return Plan(stages=stages, micro_batch=micro_batch, schedule="1f1b")

    def make(self, side: str, seed: int, steps: int, warm: int) -> dict[str, Any]:
        """Make a side anew, and run some steps of it."""
        if side in self._runs:
            self._runs.pop(side).close()
        self._runs[side] = run = Run(self._setting, self._pool, seed, steps, self.options(side))
        run.steps(warm)
        return {"plan": run.plan}

    def steps(self, side: str, count: int) -> dict[str, Any]:
        """Run steps of a side."""
        return {"seconds": self._runs[side].steps(count)}

    def loss(self, side: str) -> dict[str, Any]:
        """Measure a side."""
        return {"loss": self._runs[side].loss()}

    def drop(self, side: str) -> dict[str, Any]:
        """Close a side; return what it decided, if it was adaptive."""
        run = self._runs.pop(side)
        decisions = run.decisions
        run.close()
        return {"decisions": decisions}

    def measure(self) -> dict[str, Any]:
        """Measure the links as they are now, for plans to come."""
        profile = self._pool.profile(fresh=True)
        devices = range(len(self._setting.addresses))
        return {"mbit_per_s": [[8e-6 * profile.bandwidth_bps[a][b] for b in devices if b != a] for a in devices]}

    def close(self) -> None:
        """Close all trainers."""
        while self._runs:
            self._runs.popitem()[1].close()


class Run:
    """A trainer.

    Args:
        setting: What it is run with.
        pool: Where.
        seed: Of parameters and batches.
        steps: Of the run, for its learning rates; 0 for constant ones.
        options: More arguments of the trainer.
    """

    def __init__(self, setting: Setting, pool: onebox.Pool, seed: int, steps: int, options: dict[str, Any]) -> None:
        self._size, self._seed, self._step = models.size_of(setting.size, setting.batch), seed, 0
        self._model, optimizer = models.made(self._size, seed, getattr(torch, setting.dtype))
        self._rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: models.rate_factor(step, steps))
        self._trainer = onebox.Trainer(self._model, models.loss_of, optimizer, pool=pool, seed=seed, **options)

    def steps(self, count: int) -> float:
        """Run steps to their end; return the seconds that they took."""
        begin_s = time.perf_counter()
        for _ in range(count):
            self._trainer.step(*models.batch(self._size, self._seed, self._step))
            with warnings.catch_warnings():  # the optimizer steps on the workers, which the scheduler does not see
                warnings.simplefilter("ignore", UserWarning)
                self._rates.step()
            self._step += 1
        self._trainer.wait()
        return time.perf_counter() - begin_s

    def loss(self) -> float:
        """Return the loss on the held-out text."""
        self._trainer.pull()
        return models.held_out_loss(self._model, self._size)

    @property
    def plan(self) -> str:
        """The plan in a line; empty before the first step."""
        return self._trainer.plan.describe() if self._trainer.plan is not None else ""

    @property
    def decisions(self) -> list[str]:
        """What was decided on the way, a line each."""
        return [decision.line for decision in self._trainer.decisions]

    def close(self) -> None:
        """Close the trainer."""
        self._trainer.close()


def main() -> None:
    """Serve requests until standard input ends."""
    setting, spec = Setting.parsed(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    with onebox.open(spec, threads=1) as pool, contextlib.closing(Client(setting, pool)) as own:
        serve({"make": own.make, "steps": own.steps, "loss": own.loss, "drop": own.drop, "measure": own.measure})


if __name__ == "__main__":
    main()
