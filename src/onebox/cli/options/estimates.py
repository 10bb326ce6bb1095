"""The options of ``onebox memory``. Nothing here imports PyTorch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from onebox.cli.options.common import File, Flag, Float, Frozen, Int, PlanFile, at_least, group_of, positive
from onebox.cli.options.jobs import DATA_PARALLEL, JobConfig
from onebox.errors import UsageError
from onebox.plan_names import UpdateAt
from onebox.trainer_options import DataParallel

AUTO = "auto"
"""Value of ``--plan`` for the best plan."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(JobConfig):
    """Estimate whether a model fits the memory of some devices, without running anything.

    No worker is started: memory is computed from the model's graph, to the byte of what workers will count. The output
    shows the peak and its contents, the largest batch that fits and, if the model does not fit, plans that do, with
    their costs: recomputed or offloaded activations, smaller micro-batches, an optimizer on the host. Times are earlier
    measurements of onebox plan or profile, else estimates. The exit status is 0 if it fits and 1 if it does not.

    Args:
        config: A config.json of Hugging Face, or its folder: can its language model be trained, or fine-tuned, on these
            devices? No weights are needed. It takes the place of --model, --data and --loss.
        tokens: Tokens of a sample of --config; without it 512.
        lora: With --config, the rank of LoRA adapters on all linear layers but the last (PEFT's all-linear), which are
            trained while the model's own weights are frozen; without it all weights are trained.
        frozen: With --lora, the form of the frozen weights: bf16, or int8 or int4 for those of linear layers
            (onebox.quantize_frozen); without it the type in the config.
        plan: A plan file to estimate; auto, for the best plan that fits; or data-parallel, in which every device
            computes the whole model for its share of the batch. Without it auto with --config, else data-parallel.
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

    EXAMPLES: ClassVar = (
        "onebox memory --model resnet --batch 256 --memory 2GiB",
        "onebox memory --config llama/config.json --lora 16 --frozen int4 --memory 16GiB --out plan.json",
    )
    GROUPS: ClassVar[tuple[type, ...]] = (DataParallel,)
    EVERYDAY: ClassVar = (
        "data",
        "model",
        "config",
        "tokens",
        "lora",
        "frozen",
        "batch",
        "optimizer",
        "pool",
        "memory",
        "plan",
        "out",
        "json",
    )

    config: File = None
    tokens: Int = None
    lora: Int = None
    frozen: Frozen = None
    plan: PlanFile = None
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
        self._check_config()
        flags = [f"--micro-batch {self.micro_batch}"] if self.micro_batch is not None else []
        flags += [f"--update {self.update}"] if self.update != "device" else []
        flags += ["--shard-optimizer"] if self.shard_optimizer else []
        if self.plan not in (None, DATA_PARALLEL) and flags:
            flag = flags[0]
            raise UsageError(f"--plan {self.plan} and {flag}: a plan says that itself")
        if (self.gflops is None) != (self.bandwidth is None):
            raise UsageError("--gflops and --bandwidth go together: how fast a device computes and moves; give both")

    def _check_config(self) -> None:
        """Check the options of a configuration of Hugging Face."""
        at_least(1, lora=self.lora)
        at_least(2, tokens=self.tokens)
        if self.config is None:
            given = [name for name in ("tokens", "lora", "frozen") if getattr(self, name) is not None]
            if given:
                raise UsageError(f"--{given[0]} {getattr(self, given[0])} is for a language model; it needs --config")
            return
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        given = [name for name in ("model", "data", "image_size", "loss") if getattr(self, name) != fields[name]]
        if given:
            flag = given[0].replace("_", "-")
            raise UsageError(f"--config {self.config} and --{flag} {getattr(self, given[0])}: give one of them")
        if self.frozen is not None and self.lora is None:
            raise UsageError(f"--frozen {self.frozen}: without adapters no weight is frozen; give --lora, too")

    @property
    def plan_asked(self) -> str:
        """The plan in question: a file, ``auto`` or ``data-parallel``."""
        flags = self.data_parallel != DataParallel()
        return self.plan or (AUTO if self.config is not None and not flags else DATA_PARALLEL)

    @property
    def data_parallel(self) -> DataParallel:
        """The plan in question, if no plan is given."""
        return group_of(DataParallel, self)
