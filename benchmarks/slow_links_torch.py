"""A rank of PyTorch's sides of ``slow_links.py``: DistributedDataParallel on Gloo, its hooks, and post-local SGD.

Usage: python slow_links_torch.py SETTING RANK PORT, on each host of a network.
"""

from __future__ import annotations

import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slow_links_model as models
import torch
import torch.distributed as dist
from slow_links_sides import Setting, serve
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

LIMIT = timedelta(minutes=10)
"""Of any exchange: then the process ends."""

EXACT_STEPS = 2
"""First steps of PowerSGD, whose gradients are summed exactly: at least so many are asked for."""


ONE_BUCKET_MB = 1024
"""For PowerSGD: it sums several times for each bucket, as answers arrive, so that with several buckets ranks do not sum
in the same order, and Gloo aborts ("Received data size doesn't match expected size")."""


class Replica:
    """The part of a side that a rank has.

    Args:
        side: Its name.
        setting: What it is run with.
        seed: Of parameters and batches.
        steps: Of the run, for its learning rates; 0 for constant ones.
    """

    def __init__(self, side: str, setting: Setting, seed: int, steps: int) -> None:
        self._size, self._seed, self._step = models.size_of(setting.size, setting.batch), seed, 0
        model, inner = models.made(self._size, seed, getattr(torch, setting.dtype))
        self._rates = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: models.rate_factor(step, steps))
        self._optimizer: Any = inner
        bucket_mb = ONE_BUCKET_MB if side == "ddp powersgd" else None
        self._module = module = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        self._averages = side == "post-local sgd"
        if side == "ddp fp16":
            module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif side == "ddp powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=setting.rank, start_powerSGD_iter=EXACT_STEPS
            )
            module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._averages:
            local = post_localSGD_hook.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
            module.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
            averager = averagers.PeriodicModelAverager(period=setting.every, warmup_steps=0)
            self._optimizer = PostLocalSGDOptimizer(optim=inner, averager=averager)
        elif side != "ddp":
            raise ValueError(f"no side of PyTorch: {side}")

    def steps(self, count: int) -> float:
        """Run steps; return the seconds that they took."""
        begin_s = time.perf_counter()
        for _ in range(count):
            inputs, targets = models.part(
                models.batch(self._size, self._seed, self._step), dist.get_rank(), dist.get_world_size()
            )
            self._optimizer.zero_grad()
            models.loss_of(self._module(inputs), targets).backward()
            self._optimizer.step()
            with warnings.catch_warnings():  # the optimizer that steps may be one around that of the rates
                warnings.simplefilter("ignore", UserWarning)
                self._rates.step()
            self._step += 1
        return time.perf_counter() - begin_s

    def loss(self) -> float:
        """Return the loss on the held-out text, of averaged parameters."""
        if self._averages:
            utils.average_parameters(iter(self._module.parameters()), dist.distributed_c10d._get_default_group())
        return models.held_out_loss(self._module.module, self._size) if dist.get_rank() == 0 else 0.0


class Rank:
    """All replicas of a rank, by the names of their sides.

    Args:
        setting: What they are run with.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._replicas: dict[str, Replica] = {}

    def make(self, side: str, seed: int, steps: int, warm: int) -> dict[str, Any]:
        """Make a side anew, and run some steps of it."""
        self._replicas[side] = made = Replica(side, self._setting, seed, steps)
        made.steps(warm)
        return {}

    def steps(self, side: str, count: int) -> dict[str, Any]:
        """Run steps of a side."""
        return {"seconds": self._replicas[side].steps(count)}

    def loss(self, side: str) -> dict[str, Any]:
        """Measure a side."""
        return {"loss": self._replicas[side].loss()}

    def drop(self, side: str) -> dict[str, Any]:
        """Forget a side."""
        del self._replicas[side]
        return {}


def main() -> None:
    """Serve requests until standard input ends."""
    setting, rank, port = Setting.parsed(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    where = f"tcp://{setting.addresses[0]}:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=len(setting.addresses), timeout=LIMIT)
    own = Rank(setting)
    try:
        serve({"make": own.make, "steps": own.steps, "loss": own.loss, "drop": own.drop})
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
