"""The options of ``onebox memory``. Nothing here imports PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onebox.cli.options.common import File, Flag, Float, Int, group_of, positive
from onebox.cli.options.jobs import JobConfig
from onebox.errors import UsageError
from onebox.plan_names import UpdateAt
from onebox.trainer_options import DataParallel


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(JobConfig):
    """Estimate whether a model fits the memory of some devices, without running anything.

    No worker is started: memory is computed from the model's graph, to the byte of what workers will count. The output
    shows the peak and its contents, the largest batch that fits and, if the model does not fit, plans that do, with
    their costs: recomputed or offloaded activations, smaller micro-batches, an optimizer on the host. Times are earlier
    measurements of onebox plan or profile, else estimates. The exit status is 0 if it fits and 1 if it does not.

    Args:
        plan: A plan file to estimate; without it every device computes the whole model for its share of the batch.
        clip_grad_norm: As for onebox train: clipping takes memory, too.
        gflops: Speed of a device in billions of floating-point operations per second, for estimated times; with
            --bandwidth.
        bandwidth: Billions of bytes per second that it reads and writes; with --gflops.
        out: Write the plan that fits, the fastest of several, into this file.
        json: Print the estimate as JSON instead of the tables.
        report: Write the same JSON into this file.

    Raises:
        UsageError: A value is out of range, or two contradict each other.
    """

    GROUPS: ClassVar[tuple[type, ...]] = (DataParallel,)
    EVERYDAY: ClassVar = ("data", "model", "batch", "optimizer", "pool", "memory", "plan", "out", "json")

    plan: File = None
    micro_batch: Int = DataParallel.micro_batch
    update: UpdateAt = DataParallel.update
    shard_optimizer: Flag = DataParallel.shard_optimizer
    clip_grad_norm: Float = None
    gflops: Float = None
    bandwidth: Float = None
    out: File = None
    json: Flag = False
    report: File = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.data_parallel
        positive(clip_grad_norm=self.clip_grad_norm, gflops=self.gflops, bandwidth=self.bandwidth)
        flags = [f"--micro-batch {self.micro_batch}"] if self.micro_batch is not None else []
        flags += [f"--update {self.update}"] if self.update != "device" else []
        flags += ["--shard-optimizer"] if self.shard_optimizer else []
        if self.plan is not None and flags:
            flag = flags[0]
            raise UsageError(f"--plan {self.plan} and {flag}: a plan says that itself")
        if (self.gflops is None) != (self.bandwidth is None):
            raise UsageError("--gflops and --bandwidth go together: how fast a device computes and moves; give both")

    @property
    def data_parallel(self) -> DataParallel:
        """The plan in question, if no plan is given."""
        return group_of(DataParallel, self)
