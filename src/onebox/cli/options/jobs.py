"""The options of ``onebox train`` and ``plan``: frozen dataclasses that define the command line.

Nothing here imports PyTorch, so that ``onebox --help`` and errors in flags are printed at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar, cast

from onebox.cli.options.common import (
    Concurrency,
    DataSpec,
    Duration,
    File,
    Flag,
    Float,
    Folder,
    Int,
    Ints,
    IslandList,
    Model,
    Names,
    OwnFunction,
    PlanFile,
    PoolOptions,
    SaveEvery,
    Shares,
    at_least,
    check_model,
    check_page,
    group_of,
    not_negative,
    positive,
    read_sizes,
)
from onebox.errors import UsageError
from onebox.plan_names import (
    ACTIVATION_POLICIES,
    ASYNC,
    LOSSY_PARTS,
    ChainPolicy,
    LossyPart,
    OuterCodec,
    StateAt,
    Sync,
    UpdateAt,
    searchable_schedules,
)
from onebox.trainer_options import (
    Correction,
    DataParallel,
    Engine,
    Outer,
    Recovery,
    StaleGradients,
    checked_lossy,
)

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]

_LEARNING_RATES: dict[str, float] = {"adamw": 1e-3, "adam": 1e-3, "sgd": 5e-2, "muon": 1e-3}
_WEIGHT_DECAYS: dict[str, float] = {"adamw": 1e-2, "adam": 0.0, "sgd": 0.0, "muon": 1e-2}
"""The defaults of torch.optim; those of AdamW for muon, whose updates are scaled to the size of AdamW's."""

_SGD_MOMENTUM = 0.9

_MOST_PROBED = 1000
"""Most steps of a probe: it is to cost little beside the run that it is for."""

_SEVERAL = ("tar", "parquet")  # data sets of several paths, separated by commas
_COMMA = re.compile(r",(?![^{]*\})")  # not within the braces of a pattern

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class JobConfig(PoolOptions):
    """Model, data and devices: the options that planning and training share.

    Args:
        data: Data set: digits (comes with onebox), mnist:FOLDER (IDX files), cifar10:FOLDER (tar files or the
            binary version), or pictures that are read on demand: folder:PATH (a folder for each class; PATH/train and
            PATH/val if there are such), tar:TRAIN[,TEST] (WebDataset's layout) or parquet:TRAIN[,TEST]; without
            samples to test on, every fifth is taken.
        image_size: Height and width to which pictures of folder, tar and parquet are resized and cropped at their
            centre; without it those of the first picture.
        model: The model: mlp, cnn, resnet (18 layers), gpt (reads an image row by row), or your own with
            package.module:function, a function or class of a module, here or installed, that returns a torch.nn.Module.
        loss: Your own loss, a function of outputs and targets that returns the mean over the samples; without it
            cross-entropy.
        batch: Samples of a step, on all devices together.
        optimizer: Class of torch.optim: adamw, adam, sgd, or muon, which is Muon for matrices and AdamW for the rest.
        lr: Learning rate; without it 1e-3 for adamw, adam and muon, 5e-2 for sgd.
        weight_decay: Weight decay; without it 1e-2 for adamw and muon, none for adam and sgd.
        momentum: Momentum, for sgd; without it 0.9.
        precision: fp32, bf16 for autocast (parameters stay fp32), or auto: bf16 for the matrix products of stages that
            are faster with it.
        seed: Seed of the weights, the order of samples and dropout.

    Raises:
        UsageError: A value is out of range, or two contradict each other.
    """

    data: DataSpec = "digits"
    image_size: Int = None
    model: Model = "cnn"
    loss: OwnFunction = None
    batch: int = 64
    optimizer: OptimizerName = "adamw"
    lr: Float = None
    weight_decay: Float = None
    momentum: Float = None
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model(self.model, self.loss)
        at_least(1, batch=self.batch, image_size=self.image_size)
        positive(lr=self.lr)
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"--weight-decay {self.weight_decay}: allowed are 0 and more")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise UsageError(f"--momentum {self.momentum}: allowed are 0 up to, but not, 1")
        if self.momentum is not None and self.optimizer != "sgd":
            raise UsageError(f"--momentum is for --optimizer sgd; {self.optimizer} has none")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: allowed are 0 to 2**63 - 1")

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
    """A job whose gradients may be stale.

    Args:
        staleness: 0 for exact steps; with 1 the gradients of a step are applied one step late, so that the next step
            begins while they are being exchanged, and a pipeline is never empty.
        lossy: Parts of the traffic that may be compressed with a loss, which changes the result: gradients,
            activations, or both, for a plan that names a codec for them, or for --plan auto and onebox plan to choose
            one where it pays.

    Raises:
        UsageError: A value is out of range, or two contradict each other.
    """

    GROUPS: ClassVar[tuple[type, ...]] = (StaleGradients,)

    staleness: int = 0
    lossy: Names = None
    correction: Correction = StaleGradients.correction

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staleness not in (0, 1):
            raise UsageError(f"--staleness {self.staleness}: allowed are 0, for exact steps, and 1")
        if self.correction != StaleGradients.correction and not self.staleness:
            raise UsageError(f"--correction {self.correction} is for late gradients; it needs --staleness 1")
        _ = self.stale, self.lossy_parts

    @property
    def lossy_parts(self) -> tuple[LossyPart, ...]:
        """The trainer's option ``lossy``."""
        names = self.lossy.split(",") if self.lossy is not None else []
        if not set(names) <= set(LOSSY_PARTS):
            raise UsageError(f"--lossy {self.lossy}: allowed are {', '.join(LOSSY_PARTS)}")
        return checked_lossy(names)

    @property
    def stale(self) -> StaleGradients | None:
        """The trainer's option ``stale``."""
        found = group_of(StaleGradients, self)
        return found if self.staleness else None


@dataclass(frozen=True, kw_only=True)
class IslandsConfig(StalenessConfig):
    """A job that islands may train.

    Args:
        islands: Devices of each island, such as 0,1/2,3, or auto for the groups of near devices that measured links
            show. Islands train by themselves, each by --plan auto or data parallel over its devices, and are joined by
            outer steps over the slow links between them (DiLoCo), which changes results. Without it steps are exact.
        outer_every: With --islands, steps between two outer steps.
        outer_lr: Learning rate of the outer optimizer, SGD with Nesterov momentum.
        outer_momentum: Its momentum.
        outer_fragments: Parts of the model that are synchronised in turn between two outer steps.
        outer_overlap: Steps during which the sums of an outer step travel while islands go on; applied so much later.
        outer_keep: With --outer-overlap, the fraction of its own parameters that an island keeps in an outer step.
        outer_compression: Codec of the outer gradients: none, bf16, int8, or e3m0 with four bits a value.
        outer_state: Place of the global parameters and the outer momentum between two outer steps: device or host.
        outer_quorum: Islands that the others always wait for; without it all. It needs --recover on, or other machines.
        outer_grace_s: With --outer-quorum, seconds to wait for the other islands once the quorum has made its steps;
            then they are late and the rest go on.
        outer_shares: Share of the batch of each island: auto, equal, measured, or weights such as 3,1.

    Raises:
        UsageError: A value is out of range, or two contradict each other.
    """

    islands: IslandList = None
    outer_every: int = Outer.every
    outer_lr: float = Outer.lr
    outer_momentum: float = Outer.momentum
    outer_fragments: int = Outer.fragments
    outer_overlap: int = Outer.overlap
    outer_keep: float = Outer.keep
    outer_compression: OuterCodec = Outer.compression
    outer_state: StateAt = Outer.state
    outer_quorum: Int = Outer.quorum
    outer_grace_s: Duration = Outer.grace_s
    outer_shares: Shares = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.islands is None:
            names = [field.name for field in dataclasses.fields(Outer)]
            given = [name for name in names if getattr(self, f"outer_{name}") != getattr(Outer, name)]
            if given:
                flag, value = given[0].replace("_", "-"), getattr(self, f"outer_{given[0]}")
                raise UsageError(f"--outer-{flag} {value} is for islands; it needs --islands")
        elif self.staleness:
            raise UsageError("--islands and --staleness 1: these do not go together; leave one of them out")
        _ = self.outer, self.island_devices

    @property
    def island_devices(self) -> tuple[tuple[int, ...], ...] | Literal["auto"] | None:
        """The trainer's option ``islands``."""
        if self.islands is None or self.islands == "auto":
            return None if self.islands is None else "auto"
        parts = [part.split(",") for part in self.islands.split("/")]
        if not all(number.strip().isdecimal() for part in parts for number in part):
            raise UsageError(
                f"--islands {self.islands}: allowed are auto, and the devices of each island, such as 0,1/2,3"
            )
        return tuple(tuple(int(number) for number in part) for part in parts)

    @property
    def outer(self) -> Outer | None:
        """The trainer's option ``outer``."""
        if self.islands is None:
            return None
        shares: str | list[str] = self.outer_shares
        if self.outer_shares not in ("auto", "equal", "measured"):
            shares = self.outer_shares.split(",")
        try:
            return Outer(
                every=self.outer_every,
                lr=self.outer_lr,
                momentum=self.outer_momentum,
                fragments=self.outer_fragments,
                overlap=self.outer_overlap,
                keep=self.outer_keep,
                compression=self.outer_compression,
                state=self.outer_state,
                quorum=self.outer_quorum,
                grace_s=self.outer_grace_s,
                shares=shares,  # type: ignore[arg-type]
            )
        except UsageError as error:
            names = "|".join(field.name for field in dataclasses.fields(Outer))
            said = re.sub(rf"\b({names})=", lambda found: f"--outer-{found[1].replace('_', '-')} ", str(error))
            raise UsageError(said) from None


DATA_PARALLEL = "data-parallel"
"""Value of ``--plan`` for data parallel training over all devices."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(IslandsConfig):
    """Train a model on a pool of devices, of this machine or of others.

    Args:
        epochs: Passes through the training set.
        plan: A plan file, as onebox plan writes it; auto, to measure, plan, and run the best plan; or data-parallel, in
            which every device computes the whole model for its share of the batch. A file and auto determine
            --micro-batch, --sync, --update and --shares. Without it, and without these, it is data-parallel on one host
            and auto over several.
        clip_grad_norm: Limit of the 2-norm of all gradients; without it they are not clipped.
        run: Folder of the run, new or empty; without it one under runs/.
        resume: Folder of an earlier run to continue, exactly from its checkpoint. Its settings are restored; --epochs
            and the flags that determine where and how it runs may be given again.
        save_every: Also write a checkpoint every so many steps, such as 500, or so often, such as every 10min, 90s or
            2h; not only at the end of each epoch.
        stop_within: Seconds after Ctrl-C, SIGTERM or SIGHUP within which a checkpoint is saved before the run ends; a
            second Ctrl-C ends it at once, and 0 always.
        every: Steps between two lines of progress, where output is not a terminal.
        recover: Whether to continue when workers are lost: auto (if other machines take part), on or off. With
            --islands the others go on without an island that has lost one, until it is back.
        adaptive: Adapt the plan to devices and links during the run: when one has clearly become slower or faster,
            layers or shares move between two steps, with the same micro-batches; each time a line reports the change,
            the decision and the gain.
        read: Number of batches that are read at once, or auto, within the cores that workers leave free.
        process: Number of batches that are decoded at once; likewise.
        on_error: Handling of a broken sample: stop, or skip it.
        page: Show the run on a page in a browser, at an address of this machine that is printed.
        page_port: Port of that page; 0 for any free one.

    Raises:
        UsageError: A value is out of range, or two contradict each other.
    """

    GROUPS: ClassVar[tuple[type, ...]] = (DataParallel, StaleGradients, Recovery, Engine)
    EVERYDAY: ClassVar = (
        "data",
        "model",
        "epochs",
        "batch",
        "optimizer",
        "lr",
        "pool",
        "memory",
        "plan",
        "run",
        "resume",
        "page",
    )

    EXAMPLES: ClassVar = (
        "onebox train --pool cpu*2 --data digits --model cnn --epochs 3",
        "onebox train --pool lab1,lab2 --data cifar10:data --model resnet --plan auto --run runs/first",
        "onebox train --resume runs/first --epochs 20",
        "onebox train --data folder:pictures --image-size 64 --model my_models:make",
    )

    epochs: int = 12
    plan: PlanFile = None
    micro_batch: Int = DataParallel.micro_batch
    clip_grad_norm: Float = None
    warm_up: Int = StaleGradients.warm_up
    overlap: Flag = Engine.overlap
    sync: Sync = DataParallel.sync
    update: UpdateAt = DataParallel.update
    shard_optimizer: Flag = DataParallel.shard_optimizer
    shares: Shares = "auto"
    run: Folder = None
    resume: Folder = None
    save_every: SaveEvery = None
    stop_within: Duration = 20.0
    every: int = 20
    recover: Literal["auto", "on", "off"] = "auto"
    snapshot_every: Int = Recovery.snapshot_every
    adaptive: Flag = False
    read: Concurrency = "auto"
    process: Concurrency = "auto"
    on_error: Literal["stop", "skip"] = "stop"
    page: Flag = False
    page_port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_page(page=self.page, port=self.page_port)
        _ = self.readers, self.processors
        at_least(1, epochs=self.epochs, every=self.every)
        _ = self.data_parallel, self.recovery, self.engine, self.save_interval
        if self.snapshot_every is not None and self.recover == "off":
            raise UsageError(f"--snapshot-every {self.snapshot_every} is for runs that recover; --recover is off")
        positive(clip_grad_norm=self.clip_grad_norm)
        not_negative(stop_within=self.stop_within)
        if self.run is not None and self.resume is not None:
            raise UsageError("--run is for a new run and --resume for an earlier one: give one of them")
        self._check_late()
        self._check_islands()
        if self.plan is not None and self.plan != DATA_PARALLEL:
            self._check_plan()

    def _check_late(self) -> None:
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

    def _check_islands(self) -> None:
        """Refuse options that do not go together with islands."""
        if self.islands is None:
            return
        odd = {
            "--overlap": self.overlap,
            "--adaptive": self.adaptive,
            f"--snapshot-every {self.snapshot_every}": self.snapshot_every is not None,
            f"--sync {self.sync}": self.sync != "workers",
            f"--update {self.update}": self.update != "device",
            f"--plan {self.plan}": self.plan not in (None, "auto"),
        }
        for flag, there in odd.items():
            if there:
                hint = "; --plan auto searches for a plan of each island" if flag.startswith("--plan") else ""
                raise UsageError(f"--islands and {flag}: these do not go together; leave one of them out{hint}")

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
            what = (
                f"and {odd[0]}: a plan says that itself; give one of them"
                if odd
                else "'': a plan file, auto, or data-parallel"
            )
            raise UsageError(f"--plan {self.plan} {what}".replace("  ", " "))

    @property
    def save_interval(self) -> SaveInterval | None:
        """``save_every`` as steps or seconds."""
        return None if self.save_every is None else parse_save_interval(self.save_every)

    @property
    def readers(self) -> int | Literal["auto"]:
        """``read`` in the form of the feed."""
        return _concurrency("--read", self.read)

    @property
    def processors(self) -> int | Literal["auto"]:
        """``process`` in the form of the feed."""
        return _concurrency("--process", self.process)

    @property
    def recovery(self) -> Recovery | Literal["auto"] | None:
        """The trainer's option ``recovery``; a number of steps between snapshots enables it."""
        found = group_of(Recovery, self)
        if self.recover == "off":
            return None
        return "auto" if self.recover == "auto" and self.snapshot_every is None else found

    @property
    def engine(self) -> Engine:
        """The trainer's option ``engine``."""
        return group_of(Engine, self)

    @property
    def data_parallel(self) -> DataParallel:
        """The trainer's option ``plan`` for data parallel training."""
        try:
            weights = [float(part) for part in self.shares.split(",")]
        except ValueError:
            return group_of(DataParallel, self)
        try:
            return group_of(DataParallel, self, shares=weights)
        except UsageError:
            return group_of(DataParallel, self)  # whose message shows the weights as they were given


@dataclass(frozen=True, kw_only=True)
class PlanConfig(IslandsConfig):
    """Find the best plan for a model and a pool, and predict its cost.

    The model, the devices and the links are measured, which takes some seconds; nothing else should run meanwhile.
    Measurements are kept in the user's cache folder and reused. The plan assigns parts of the model and micro-batches
    to devices, in an order. As a file it can be edited, checked with --check and run with onebox train --plan.

    Args:
        micro_batches: Allowed sizes of micro-batches, such as 4,8,16; without it repeated halves of the batch.
        schedules: Allowed schedules, such as 1f1b,zb-h1; without it all: gpipe, 1f1b, interleaved, zb-h1, zbv and auto,
            which is computed for the measured times; with --staleness 1 also async-1f1b.
        policies: Allowed policies for activations that do not fit a device, such as keep,recompute; without it all:
            keep, recompute, offload, swap, and cpu for parts that a CPU worker on the device's host computes.
        update: Where the optimizer's state may be kept: on the device, on its host, or auto for either.
        whole_layers: Do not look for plans in which devices of a host split layers.
        preparing: Cores of this machine that the preparation of batches keeps busy while devices compute, such as 1.5:
            if it and CPU devices need more cores than there are, they slow each other down.
        budget: Approximate time limit of the search in seconds, after measuring.
        fresh: Measure again, even if there are earlier measurements.
        probe: With --islands or --lossy, train for so many steps, 1000 at most, in each of these ways and in exact
            steps, from the same weights over the same batches, and show the loss on data to test on.
        check: Predict the plan in this file, such as one that was edited, in place of a search.
        out: Write the plan into this file.
        figure: Draw the expected step into this file, a .png, .svg or .pdf.
        show_memory: Show for each stage the activation policies, what they save and cost, and why; and run three steps,
            whose memory is shown beside the prediction. With --figure a figure of the memory is written, too, with
            -memory added to the name.
        json: Print the plan, its prediction and its alternatives as JSON instead of the tables.
        report: Write the same JSON into this file.

    Raises:
        UsageError: A value is out of range, or two contradict each other.
    """

    EVERYDAY: ClassVar = (
        "data",
        "model",
        "batch",
        "optimizer",
        "pool",
        "memory",
        "check",
        "out",
        "figure",
        "show_memory",
        "json",
    )

    EXAMPLES: ClassVar = (
        "onebox plan --pool cpu,cpu@0.5 --model gpt --out plan.json --figure plan.svg",
        "onebox plan --check plan.json --pool cpu,cpu@0.5 --model gpt",
        "onebox plan --pool lab1,lab2 --model my_models:make --batch 256 --memory 20GiB --show-memory",
    )

    micro_batches: Ints = None
    schedules: Names = None
    policies: Names = None
    update: Literal["device", "host", "auto"] = "device"
    whole_layers: Flag = False
    preparing: float = 0.0
    budget: Duration = 5.0
    fresh: Flag = False
    probe: Int = None
    check: File = None
    out: File = None
    figure: File = None
    show_memory: Flag = False
    json: Flag = False
    report: File = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(budget=self.budget)
        _ = self.schedule_names
        if self.probe is not None and not 1 <= self.probe <= _MOST_PROBED:
            raise UsageError(f"--probe {self.probe}: allowed are 1 to {_MOST_PROBED} steps")
        if self.probe is not None and self.islands is None and not self.lossy_parts:
            raise UsageError(
                f"--probe {self.probe} compares ways to train that change the result; it needs --islands or --lossy"
            )
        if not 0 <= self.preparing < math.inf:
            raise UsageError(f"--preparing {self.preparing}: allowed are cores, 0 or more")
        given = {
            f"--islands {self.islands}": self.islands is not None,
            f"--probe {self.probe}": self.probe is not None,
            f"--micro-batches {self.micro_batches}": self.micro_batch_sizes is not None,
            f"--schedules {self.schedules}": self.schedule_names is not None,
            f"--policies {self.policies}": self.policy_names != ACTIVATION_POLICIES,
            f"--update {self.update}": self.update != "device",
            "--whole-layers": self.whole_layers,
        }
        odd = [flag for flag, there in given.items() if there]
        if self.check is not None and odd:
            raise UsageError(f"--check {self.check} and {odd[0]}: a plan is checked as it is; give one of them")

    @property
    def policy_names(self) -> tuple[ChainPolicy, ...]:
        """``policies`` as a tuple."""
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
        """``update`` as the allowed places."""
        return ("device", "host") if self.update == "auto" else (self.update,)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...] | None:
        """``micro_batches`` as numbers."""
        return None if self.micro_batches is None else read_sizes(self.micro_batches, self.batch, "the batch")

    @property
    def schedule_names(self) -> tuple[str, ...] | None:
        """``schedules`` as a tuple."""
        if self.schedules is None:
            return None
        names = tuple(part.strip() for part in self.schedules.split(","))
        allowed = searchable_schedules(self.staleness)
        if not set(names) <= set(allowed):
            hint = f"; {ASYNC} needs --staleness 1" if ASYNC in names and not self.staleness else ""
            raise UsageError(
                f"--schedules {self.schedules}: allowed are {', '.join(allowed)}, such as 1f1b,zb-h1{hint}"
            )
        return names


@dataclass(frozen=True, kw_only=True)
class SaveInterval:
    """Distance of two checkpoints.

    Args:
        steps: In steps; 0 for one in seconds.
        seconds: In seconds; 0 for one in steps.
    """

    steps: int = 0
    seconds: float = 0.0

    def due(self, step: int, since_s: float) -> bool:
        """Return whether a checkpoint is due after a step, so many seconds after the last one."""
        return step % self.steps == 0 if self.steps else since_s >= self.seconds


_TIME_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def parse_save_interval(text: str) -> SaveInterval:
    """Turn ``500``, ``500 steps``, ``90s``, ``10min`` or ``2h`` into the distance of two checkpoints.

    Raises:
        UsageError: It is none.

    Example:
        >>> parse_save_interval("10min")
        SaveInterval(steps=0, seconds=600.0)
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    number, unit = (match[1], match[2]) if match else ("0", "")
    if unit in ("", "step", "steps") and number.isdigit() and int(number) > 0:
        return SaveInterval(steps=int(number))
    if unit in _TIME_UNITS and float(number) > 0:
        return SaveInterval(seconds=float(number) * _TIME_UNITS[unit])
    allowed = "allowed are steps from 1 up, such as 500, and times such as 90s, 10min or 2h"
    raise UsageError(f"--save-every {text}: {allowed}")


def _concurrency(flag: str, value: str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not value.isascii() or not value.isdigit() or not int(value):
        raise UsageError(f"{flag} {value}: allowed are auto, and 1 and more")
    return int(value)


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
