"""The options of the commands that inspect a pool, or run a script on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from onebox.cli.options.common import (
    File,
    Flag,
    Ints,
    OwnFunction,
    PoolOptions,
    Text,
    check_model,
    not_negative,
    read_sizes,
)
from onebox.errors import UsageError

_LARGEST = 4096
"""The largest micro-batch with which a model is measured, outside of a plan."""


@dataclass(frozen=True, kw_only=True)
class DevicesConfig(PoolOptions):
    """Show the devices of a pool; those of other machines with their leases, and without leasing them.

    Args:
        json: Print a JSON list.

    Raises:
        UsageError: A value is out of range.
    """

    json: Flag = False


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(PoolOptions):
    """Measure the speed of a pool's devices and links, and of a model's parts on them.

    Each device runs a fixed set of kernels, all devices at once, as in training; messages of several sizes go over each
    link. Measurements are kept in the user's cache folder, and shown from there the next time.

    Args:
        model: Measure the segments of this model too, the parts that plans move: mlp, cnn, resnet, gpt, or your own
            with package.module:function.
        loss: Its loss, if that is your own; see onebox train.
        data: Data set that the model is for; see onebox train.
        micro_batches: Sizes of micro-batches with which to measure the model, such as 8,32; without it 16.
        precision: Precision of the model: fp32, bf16 for autocast, or auto to measure its matrix products in both.
        fresh: Measure again, even if there are earlier measurements, and keep the new ones.
        no_cache: Measure without reading or writing the cache.
        json: Print the profile as JSON instead of the tables.
        report: Write the profile as JSON into this file.

    Raises:
        UsageError: A value is out of range.
    """

    EVERYDAY: ClassVar = ("pool", "model", "fresh", "json")

    model: Text = None
    loss: OwnFunction = None
    data: str = "digits"
    micro_batches: Ints = None
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    fresh: Flag = False
    no_cache: Flag = False
    json: Flag = False
    report: File = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model, self.loss)
        for flag, value in (("--micro-batches", self.micro_batches), ("--loss", self.loss)):
            if value is not None and self.model is None:
                raise UsageError(f"{flag} {value} is for --model; name one")
        _ = self.sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """``micro_batches`` as numbers."""
        return read_sizes(self.micro_batches or "16", _LARGEST, "the most")


@dataclass(frozen=True, kw_only=True)
class RunConfig(PoolOptions):
    """Run an ordinary PyTorch script on the devices of a pool, which it uses as cuda:0, cuda:1 and so on.

    onebox run [flags] SCRIPT [ARGUMENTS], or onebox run [flags] -m MODULE [ARGUMENTS]. Arguments after the name belong
    to the script. This machine needs no GPU, and its PyTorch no CUDA.

    Args:
        pool: Devices: auto, or a list such as cuda:0,cuda:1 or cpu*2; of other machines, such as lab1,lab2/cuda:0; a
            Ray cluster, ray; a file NAME.toml; emulated ones: cpu@0.5.
        synchronous: Wait for each operator, so that an error is raised at its own line; slow, for debugging.
        stop_within: Seconds that the script has to end after SIGTERM or SIGHUP, which raise SystemExit in it.
        script: The script, or -m and a module, and its arguments.

    Raises:
        UsageError: A value is out of range.
    """

    pool: str = "auto"
    synchronous: Flag = False
    stop_within: float = 20.0
    script: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(stop_within=self.stop_within)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Show versions, the devices of this machine, the confinement of its workers, and missing packages or features.

    Args:
        json: Print a JSON object.
    """

    json: Flag = False
