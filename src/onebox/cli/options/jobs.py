"""The options of ``onebox train`` and ``plan``: frozen dataclasses, from which the command line is made.

Nothing here imports PyTorch, so that ``onebox --help`` and a wrong flag are answered at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar, cast

from onebox.cli.options.common import (
    Bytes,
    File,
    Flag,
    Float,
    Folder,
    Int,
    Ints,
    ModelName,
    Names,
    PlanFile,
    PoolOptions,
    at_least,
    positive,
    read_sizes,
)
from onebox.errors import UsageError
from onebox.plan import ACTIVATION_POLICIES, ASYNC, SCHEDULES, ChainPolicy, UpdateAt

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]

_LEARNING_RATES: dict[str, float] = {"adamw": 1e-3, "adam": 1e-3, "sgd": 5e-2, "muon": 1e-3}
_WEIGHT_DECAYS: dict[str, float] = {"adamw": 1e-2, "adam": 0.0, "sgd": 0.0, "muon": 1e-2}
"""The defaults of torch.optim; those of AdamW for muon, whose updates are scaled to the size of AdamW's."""

_SGD_MOMENTUM = 0.9

_SEVERAL = ("tar", "parquet")  # data of several places, between commas
_COMMA = re.compile(r",(?![^{]*\})")  # not within the braces of a pattern

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JobConfig(PoolOptions):
    """What is trained, and on which devices: the options that planning and training share.

    Args:
        data: Data set: digits (comes with onebox), mnist:FOLDER (IDX files), cifar10:FOLDER (tar files), or
            pictures that are read as they are needed: folder:PATH (a folder for each class), tar:PATTERN (WebDataset's
            layout) or parquet:PATTERN; of these the ones to test on come after a comma.
        image_size: Height and width that pictures of folder, tar and parquet get, resized and cut at their centre;
            without it those of the first picture.
        model: The model: mlp, cnn, resnet (18 layers) or gpt (reads an image row by row).
        batch: Samples of a step, over all devices together.
        optimizer: Class of torch.optim: adamw, adam, sgd, or muon, which is Muon for matrices and AdamW for the rest.
        lr: Learning rate; without it 1e-3 for adamw, adam and muon, 5e-2 for sgd.
        weight_decay: Weight decay; without it 1e-2 for adamw and muon, none for adam and sgd.
        momentum: Momentum, for sgd; without it 0.9.
        precision: fp32, bf16 for autocast (parameters stay fp32), or auto: bf16 for the products of stages that are
            faster with it.
        seed: Seed of weights, order of samples and dropout.
        pool: Devices: auto, or a list such as cuda:0,cuda:1 or cpu*2; of other machines, where onebox serve runs, such
            as lab1,lab2/cuda:0; a Ray cluster, ray; or a file NAME.toml. Emulated ones: cpu@0.5 is a CPU worker at
            half of its speed, sim*4@2 are four devices that compute nothing and only sleep, for half of the time that
            a core of this machine would take.
        threads: CPU threads of each worker; without it an equal share of the cores.
        memory: The most bytes that a device's buffers may take, such as 2GiB; each its own with 2GiB,4GiB, or for
            some with 0:2GiB; without it there is no limit.

    Raises:
        UsageError: A value is out of range, or two do not go together.
    """

    data: str = "digits"
    image_size: Int = None
    model: ModelName = "cnn"
    batch: int = 64
    optimizer: OptimizerName = "adamw"
    lr: Float = None
    weight_decay: Float = None
    momentum: Float = None
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    seed: int = 0
    pool: str = "auto"
    threads: Int = None
    memory: Bytes = None

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, threads=self.threads, image_size=self.image_size)
        positive(lr=self.lr)
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"--weight-decay {self.weight_decay}: allowed are 0 and more")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise UsageError(f"--momentum {self.momentum}: allowed are 0 up to, but not, 1")
        if self.momentum is not None and self.optimizer != "sgd":
            raise UsageError(f"--momentum is for --optimizer sgd; {self.optimizer} has none")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: allowed are 0 to 2**63 - 1")
        _ = self.budgets

    def resolved(self) -> Self:
        """Return the same with the optimizer's defaults filled in and the data folder made absolute."""
        name, colon, places = self.data.partition(":")
        parts = _COMMA.split(places) if name in _SEVERAL else [places]
        place = ",".join(str(Path(part).expanduser().absolute()) for part in parts if part)
        return dataclasses.replace(
            self,
            data=f"{name}{colon}{place}",
            lr=_first(self.lr, _LEARNING_RATES[self.optimizer]),
            weight_decay=_first(self.weight_decay, _WEIGHT_DECAYS[self.optimizer]),
            momentum=_first(self.momentum, _SGD_MOMENTUM) if self.optimizer == "sgd" else None,
        )


@dataclass(frozen=True, kw_only=True)
class StalenessConfig(JobConfig):
    """A job whose gradients may be late.

    Args:
        staleness: 0 for exact steps; with 1 the gradients of a step are applied one step late, so that the next step
            begins while they are still on their way, and a pipeline is never empty.
        delay: With --staleness 1, what is done about late gradients: none, predict (computing with weights as they are
            expected to be), extrapolate, lookahead, both, feedback, or auto, which goes by the optimizer.

    Raises:
        UsageError: A value is out of range, or two do not go together.
    """

    staleness: int = 0
    delay: Literal["auto", "none", "predict", "extrapolate", "lookahead", "both", "feedback"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staleness not in (0, 1):
            raise UsageError(f"--staleness {self.staleness}: allowed are 0, for exact steps, and 1")
        if self.delay != "auto" and not self.staleness:
            raise UsageError(f"--delay {self.delay} is about gradients that are late; it needs --staleness 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(StalenessConfig):
    """Train a model on a pool of this machine's devices.

    Args:
        epochs: Times through the training set.
        plan: A plan file, as onebox plan writes it, or auto: measure, plan, and run the best plan. It says itself what
            --micro-batch, --sync, --update and --shares are. Without it every device computes the whole model for its
            share.
        micro_batch: Samples that are computed at once; without it each device's share of the batch is.
        clip_grad_norm: The most that the 2-norm of all gradients may be; without it they are not clipped.
        warm_up: With --staleness 1, so many steps are exact at the beginning; without it 100 are.
        overlap: Let a part of the averaging and of the update of each exact step come under the next one, and large
            values leave in parts; the result is the same, but for the last bit of products that are made in parts.
        sync: Where gradients are averaged: from worker to worker, or at the client.
        update: Where the optimizer's state is, and its step is computed: on the device, or in the memory of its host.
        shard_optimizer: Let the replicas share out the optimizer's state, instead of each having all of it.
        shares: Devices' parts of the batch: auto (equal where they are alike), equal, measured, or weights such as 3,1.
        run: Folder of the run, new or empty; without it one under runs/.
        resume: Folder of an earlier run to go on with, exactly where its checkpoint stands. Its settings come with it;
            --epochs and the flags that say where and how it runs may be given anew.
        save_every: Write a checkpoint every so many steps too, not at the end of each epoch alone.
        every: Where output is no terminal: a line of progress every so many steps.
        recover: Whether to go on when workers are lost: auto (where other machines have a part in it), on or off.
        snapshot_every: Steps from one snapshot, from which a run goes on after a loss, to the next; without it as many
            as keep their cost low.
        adaptive: Let the plan follow what devices and links do while it runs: when one has plainly become slower or
            faster, layers or shares move between two steps, with the same micro-batches; each time a line says what
            was seen, done and gained.
        read: Batches that are read at once: a number, or auto, within the cores that workers leave free.
        process: Batches that are decoded at once; likewise.
        on_error: What becomes of a sample that is broken: stop, or skip it.

    Raises:
        UsageError: A value is out of range, or two do not go together.
    """

    epochs: int = 12
    plan: PlanFile = None
    micro_batch: Int = None
    clip_grad_norm: Float = None
    warm_up: Int = None
    overlap: Flag = False
    sync: Literal["workers", "client"] = "workers"
    update: Literal["device", "host"] = "device"
    shard_optimizer: Flag = False
    shares: str = "auto"
    run: Folder = None
    resume: Folder = None
    save_every: Int = None
    every: int = 20
    recover: Literal["auto", "on", "off"] = "auto"
    snapshot_every: Int = None
    adaptive: Flag = False
    read: str = "auto"
    process: str = "auto"
    on_error: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.readers, self.processors
        at_least(1, epochs=self.epochs, micro_batch=self.micro_batch, save_every=self.save_every, every=self.every)
        at_least(1, snapshot_every=self.snapshot_every)
        if self.snapshot_every is not None and self.recover == "off":
            raise UsageError(f"--snapshot-every {self.snapshot_every} is for runs that recover; --recover is off")
        positive(clip_grad_norm=self.clip_grad_norm)
        if self.run is not None and self.resume is not None:
            raise UsageError("--run is for a new run and --resume for an earlier one: give one of them")
        _ = self.share_weights
        self._check_late()
        if self.plan is not None:
            self._check_plan()

    def _check_late(self) -> None:
        at_least(0, warm_up=self.warm_up)
        if self.warm_up and not self.staleness:
            raise UsageError(f"--warm-up {self.warm_up} is about steps before late ones; it needs --staleness 1")
        given = {
            f"--sync {self.sync}": self.sync != "workers",
            f"--update {self.update}": self.update != "device" and not self.staleness,
        }
        odd = [flag for flag, there in given.items() if there]
        if odd and (self.staleness or self.overlap):
            asked = "--staleness 1" if self.staleness else "--overlap"
            raise UsageError(f"{asked} and {odd[0]}: these do not go together; leave one of them out")

    def _check_plan(self) -> None:
        given = {
            f"--micro-batch {self.micro_batch}": self.micro_batch is not None,
            f"--sync {self.sync}": self.sync != "workers",
            f"--update {self.update}": self.update != "device",
            "--shard-optimizer": self.shard_optimizer,
            f"--shares {self.shares}": self.shares != "auto",
        }
        odd = [flag for flag, there in given.items() if there]
        if not self.plan or odd:
            what = f"and {odd[0]}: a plan says that itself; give one of them" if odd else "'': a plan file, or auto"
            raise UsageError(f"--plan {self.plan} {what}".replace("  ", " "))

    @property
    def readers(self) -> int | Literal["auto"]:
        """``read`` as the feed takes it."""
        return _concurrency("--read", self.read)

    @property
    def processors(self) -> int | Literal["auto"]:
        """``process`` as the feed takes it."""
        return _concurrency("--process", self.process)

    @property
    def recovers(self) -> bool | None:
        """``recover`` as the trainer takes it."""
        return None if self.recover == "auto" else self.recover == "on"

    @property
    def share_weights(self) -> Literal["auto", "equal", "measured"] | tuple[float, ...]:
        """``shares`` as the trainer takes them."""
        if self.shares in ("auto", "equal", "measured"):
            return self.shares  # type: ignore[return-value]
        try:
            weights = tuple(float(part) for part in self.shares.split(","))
        except ValueError:
            weights = ()
        if not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
            raise UsageError(
                f"--shares {self.shares}: allowed are auto, equal, measured, or one weight for each device, such as 3,1"
            )
        return weights


@dataclass(frozen=True, kw_only=True)
class PlanConfig(StalenessConfig):
    """Find the best plan for a model and a pool, and say what it will cost.

    The model, the devices and the links are measured, which takes some seconds; nothing else should run meanwhile. What
    was measured is kept in the user's folder for caches, and recalled the next time. The plan says which device
    computes which part of the model, for which micro-batches, in which order. As a file it can be edited, checked with
    --check and run with onebox train --plan.

    Args:
        micro_batches: Sizes of micro-batches that are allowed, such as 4,8,16; without it halves of the batch.
        schedules: Schedules that are allowed, such as 1f1b,zb-h1; without it all: gpipe, 1f1b, interleaved, zb-h1, zbv
            and auto, which is made for the measured times; with --staleness 1 also async-1f1b.
        policies: What may become of activations for which a device has no room, such as keep,recompute; without it all:
            keep, recompute, offload, swap, and cpu for parts that a CPU worker beside the device computes.
        update: Where the optimizer's state may be: on the device, on its host, or auto for either.
        preparing: Cores of this machine that reading and preparing batches keeps busy while devices compute, such as
            1.5: where CPU devices and that need more cores than there are, they slow each other down.
        budget: About how many seconds the search may take, after measuring.
        fresh: Measure even what is known from an earlier time.
        check: Predict the plan in this file, such as one that was edited, in place of a search.
        out: Write the plan into this file.
        figure: Draw the expected step into this file, a .png, .svg or .pdf.
        show_memory: Say of each stage what becomes of its activations, what that saves and costs, and why; and run
            three steps, whose memory is shown beside what was predicted. --memory without a size asks for the same.
            With --figure there is a figure of the memory, too, named like it with -memory.
        json: Write the plan, what is predicted and what it was compared with as JSON into this file; - prints it
            instead of the tables.

    Raises:
        UsageError: A value is out of range, or two do not go together.
    """

    micro_batches: Ints = None
    schedules: Names = None
    policies: Names = None
    update: Literal["device", "host", "auto"] = "device"
    preparing: float = 0.0
    budget: float = 5.0
    fresh: Flag = False
    check: File = None
    out: File = None
    figure: File = None
    show_memory: Flag = False
    json: File = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(budget=self.budget)
        _ = self.schedule_names
        if not 0 <= self.preparing < math.inf:
            raise UsageError(f"--preparing {self.preparing}: allowed are cores, 0 or more")
        given = {
            f"--micro-batches {self.micro_batches}": self.micro_batch_sizes is not None,
            f"--schedules {self.schedules}": self.schedule_names is not None,
            f"--policies {self.policies}": self.policy_names != ACTIVATION_POLICIES,
            f"--update {self.update}": self.update != "device",
        }
        odd = [flag for flag, there in given.items() if there]
        if self.check is not None and odd:
            raise UsageError(f"--check {self.check} and {odd[0]}: the plan says that itself; give one of them")

    @property
    def policy_names(self) -> tuple[ChainPolicy, ...]:
        """``policies`` one by one."""
        if self.policies is None:
            return ACTIVATION_POLICIES
        names = tuple(part.strip() for part in self.policies.split(","))
        if not set(names) <= set(ACTIVATION_POLICIES) or "keep" not in names:
            raise UsageError(
                f"--policies {self.policies}: allowed are {', '.join(ACTIVATION_POLICIES)}; keep is always one of them"
            )
        return cast(tuple[ChainPolicy, ...], names)

    @property
    def updates(self) -> tuple[UpdateAt, ...]:
        """``update`` as places that are allowed."""
        return ("device", "host") if self.update == "auto" else (self.update,)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...] | None:
        """``micro_batches`` as numbers."""
        return None if self.micro_batches is None else read_sizes(self.micro_batches, self.batch, "the batch")

    @property
    def schedule_names(self) -> tuple[str, ...] | None:
        """``schedules`` one by one."""
        if self.schedules is None:
            return None
        names = tuple(part.strip() for part in self.schedules.split(","))
        allowed = (*SCHEDULES, ASYNC) if self.staleness else SCHEDULES
        if not set(names) <= set(allowed):
            hint = f"; {ASYNC} needs --staleness 1" if ASYNC in names and not self.staleness else ""
            raise UsageError(
                f"--schedules {self.schedules}: allowed are {', '.join(allowed)}, such as 1f1b,zb-h1{hint}"
            )
        return names


def _concurrency(flag: str, value: str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not value.isascii() or not value.isdigit() or not int(value):
        raise UsageError(f"{flag} {value}: allowed are auto, and 1 and more")
    return int(value)


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
