"""The options of the commands that inspect a pool, or run a script on it; and of ``env`` and ``completion``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from onebox.cli.options.common import (
    Bytes,
    DataSpec,
    Duration,
    File,
    Flag,
    Ints,
    OwnFunction,
    PoolOptions,
    PoolSpec,
    Text,
    check_model,
    check_page,
    not_negative,
    read_sizes,
)
from onebox.errors import UsageError
from onebox.sizes import parse_size

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

    EXAMPLES: ClassVar = ("onebox devices --pool cpu*2", "onebox devices --pool lab1,lab2/cuda:0 --json")

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
        figure: Draw the hosts, their devices and the links between them into this file, a .png, .svg or .pdf.
        json: Print the profile as JSON instead of the tables.
        report: Write the profile as JSON into this file.

    Raises:
        UsageError: A value is out of range.
    """

    EVERYDAY: ClassVar = ("pool", "model", "fresh", "figure", "json")

    EXAMPLES: ClassVar = (
        "onebox profile --pool lab1,lab2 --figure topology.svg",
        "onebox profile --pool cpu*2 --model resnet --micro-batches 8,32",
    )

    model: Text = None
    loss: OwnFunction = None
    data: DataSpec = "digits"
    micro_batches: Ints = None
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    fresh: Flag = False
    no_cache: Flag = False
    figure: File = None
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
        recover: Whether the script survives the loss of workers, which are replaced, and what ran since the last
            snapshot runs again: auto (with devices of other machines), on, as without a value, or off.
        recover_memory: The most memory of this process for that, such as 2GiB; a quarter of the machine's without it.
        memory_policy: Where a device has no room for a tensor: keep, the operator is an error; offload, the tensors
            that were last used longest ago go to the memory of its host, and come back for their next use; auto, as
            ONEBOX_MEMORY_POLICY says, else keep. CPU workers have a memory of their own with --memory only.
        equal_shares: Let nn.DataParallel divide batches equally, and not by the speed of the devices.
        uneven: Give ranks that train with a DistributedSampler, accelerate, Lightning or transformers batches by the
            measured speed of their devices, and weight their gradients by samples.
        stop_within: Seconds that the script has to end after SIGTERM or SIGHUP, which raise SystemExit in it.
        verbose: Say what the script is bound by while it runs, too, and not only at the end of one that keeps devices
            busy for seconds.
        profile: Write a timeline of waits and uploads by line, and of what devices did, into this .json file, as which
            Perfetto and chrome://tracing open it; without a name into onebox-trace.json.
        page: Show the pool on a page in a browser, at an address of this machine that is printed.
        page_port: Port of that page; 0 for any free one.
        script: The script, or -m and a module, and its arguments.

    Raises:
        UsageError: A value is out of range.
    """

    EXAMPLES: ClassVar = (
        "onebox run --pool cpu*2 --threads 1 train.py --epochs 1",
        "onebox run --pool lab1,lab2 -m package.train --epochs 1",
    )

    pool: PoolSpec = "auto"
    synchronous: Flag = False
    recover: Literal["auto", "on", "off"] = "auto"
    recover_memory: Bytes = None
    memory_policy: Literal["auto", "keep", "offload"] = "auto"
    equal_shares: Flag = False
    uneven: Flag = False
    stop_within: Duration = 20.0
    verbose: Flag = False
    profile: File = None
    page: Flag = False
    page_port: int = 0
    script: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(stop_within=self.stop_within)
        check_page(page=self.page, port=self.page_port)
        if self.profile is not None and self.profile.suffix != ".json":
            raise UsageError(f"--profile {self.profile}: the name of the file ends in .json")
        if self.recover == "off" and self.recover_memory is not None:
            raise UsageError("--recover-memory is for scripts that recover; --recover is off")
        if self.recover_memory is not None:
            parse_size("--recover-memory", self.recover_memory)

    @property
    def recovers(self) -> bool | None:
        """True if the script survives the loss of workers; ``None`` where the environment and the devices say so."""
        return {"auto": None, "on": True, "off": False}[self.recover]


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Show versions, the devices of this machine, the confinement of its workers, and missing packages or features.

    Args:
        json: Print a JSON object.
    """

    json: Flag = False


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Print the script with which a shell completes the commands, options and values of onebox.

    For zsh, the folder of the script is in fpath before compinit is called in ~/.zshrc.

    Args:
        shell: The shell: bash, zsh or fish.
    """

    EXAMPLES: ClassVar = (
        "onebox completion bash > ~/.local/share/bash-completion/completions/onebox",
        "onebox completion zsh > ~/.zfunc/_onebox",
        "onebox completion fish > ~/.config/fish/completions/onebox.fish",
    )

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
