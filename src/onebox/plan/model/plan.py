"""The plan: stages, their devices, micro-batches and schedule."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from onebox.drawing import StepChart, notebook, save, step_figure
from onebox.errors import UsageError
from onebox.files import read_regular
from onebox.plan.model.load_chart import load_chart
from onebox.plan.model.schedule import Routes
from onebox.plan.model.shares import apportion, deal
from onebox.plan.model.stage import POLICY_WORDS, OptimizerStateLayout, PlanPart, Stage, quoted
from onebox.plan_names import ASYNC, SCHEDULE_TRAITS, GradientCodec, LossyPart, Sync, UpdateAt, searchable_schedules

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A part of a batch that is computed at once.

    Args:
        index: Its number within the batch.
        start: Its first sample.
        size: Number of samples.
    """

    index: int
    start: int
    size: int


MOST_STAGES = 1024
MOST_MICRO_BATCHES = 1 << 16
"""Limits of a plan, which takes time and memory with each of them: far above all that devices make sense for."""

PLAN_BYTES = 64 << 20
"""Largest plan file that is read: one of the largest plans there can be takes some MB."""


class Prediction(PlanPart, frozen=True):
    """The planner's prediction of a plan.

    Args:
        batch: Samples of the batch.
        step_s: Seconds of a step, the median.
        bubble: Idle share of the devices' time, from 0 to 1.
        peak_bytes: Peak memory of each device of the plan, in the order of its devices.
        stages_s: For each stage, seconds of forward, input gradient and weight gradient of one micro-batch, on the
            slowest of its replicas.
        replicas_s: The same for each stage and each of its replicas; empty where all are alike.
        interval_s: 10th and 90th percentile of a step's seconds; ``None`` where the profile does not show the spread.
    """

    batch: int
    step_s: float
    bubble: float
    peak_bytes: tuple[int, ...]
    stages_s: tuple[tuple[float, float, float], ...]
    replicas_s: tuple[tuple[tuple[float, float, float], ...], ...] = ()
    interval_s: tuple[float, float] | None = None


class Plan(PlanPart, frozen=True):
    """Stages, replicas, micro-batches and schedule.

    The rows of a table are those of :class:`~onebox.plan.Schedule`.

    Args:
        stages: Parts of the model, at least one; values of forward go from earlier to later stages.
        micro_batch: Samples of a micro-batch, at least 1; ``None``, for a plan of one stage only, makes each replica's
            share of the batch one micro-batch.
        schedule: Order of the actions, by name; ``async-1f1b`` needs a run with gradients one step late
            (``--staleness 1``).
        table: With schedule ``table``, one row for each device, such as ``0: 0F0 0F1 0B0 0B1``.
        sync: Place where gradients are averaged; ``client`` for a plan of one stage only.
        update: Place of the optimizer's state and step.
        optimizer: Whether each replica has the whole optimizer's state, or a part of it; ``sharded`` needs ``sync``
            ``workers``.
        in_flight: With ``async-1f1b``, for each stage the micro-batches in flight of each of its replicas; 0 stands
            for the schedule's rule, and empty for that of all.
        memory_bytes: Memory limit of each device, in the order in which devices first occur in ``stages``; 0 for all
            that the device has, empty without limits. A trainer refuses a step that needs more.
        predicted: The planner's prediction, which has no effect on a run.
        format: Version of the file.
    """

    stages: tuple[Stage, ...]
    micro_batch: int | None = None
    schedule: str = "1f1b"
    table: tuple[str, ...] = ()
    sync: Sync = "workers"
    update: UpdateAt = "device"
    optimizer: OptimizerStateLayout = "replicated"
    in_flight: tuple[int, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    predicted: Prediction | None = None
    format: int = 1

    def __post_init__(self) -> None:
        if self.format != 1:
            raise UsageError(f"a plan of format {self.format}; this version of onebox knows format 1")
        if not self.stages:
            raise UsageError("a plan has at least one stage")
        if len(self.stages) > MOST_STAGES:
            raise UsageError(f"a plan of {len(self.stages)} stages; allowed are {MOST_STAGES}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise UsageError(f"micro_batch={self.micro_batch}: a micro-batch has at least one sample")
        if self.sync not in ("workers", "client"):
            raise UsageError(f"sync={self.sync!r}: allowed are 'workers' and 'client'")
        if self.schedule not in SCHEDULE_TRAITS or (self.schedule == "table") != bool(self.table):
            names = ", ".join(searchable_schedules(staleness=1))
            raise UsageError(f"schedule={self.schedule!r}: allowed are {names}, or 'table' with the rows in 'table'")
        self._check_optimizer()
        if self.in_flight and (not self.late or len(self.in_flight) != len(self.stages)):
            raise UsageError(
                f"in_flight={self.in_flight}: it is for schedule {ASYNC!r}, and one number for each of "
                f"{len(self.stages)} stages"
            )
        if self.in_flight and min(self.in_flight) < 0:
            raise UsageError(f"in_flight={self.in_flight}: allowed are numbers from 1 on, and 0 for the rule's")
        if self.memory_bytes and (len(self.memory_bytes) != len(self.devices) or min(self.memory_bytes) < 0):
            raise UsageError(
                f"memory_bytes={self.memory_bytes} of devices {self.devices}: one for each is needed, 0 for no limit"
            )
        self._check_lossy()
        if len(self.stages) == 1 and self.stages[0].policy != "keep":
            raise UsageError(
                f"policy={self.stages[0].policy!r} in a plan of one stage, which goes back right after forward "
                "and would "
                "gain nothing; divide the model into several stages by their segments (they may be on one device)"
            )
        if not self.whole:
            self._check_stages()

    def _check_optimizer(self) -> None:
        if self.optimizer not in get_args(OptimizerStateLayout):
            raise UsageError(f"optimizer={self.optimizer!r}: allowed are {quoted(OptimizerStateLayout)}")
        if self.optimizer == "sharded" and self.sync == "client":
            raise UsageError("optimizer='sharded' needs sync='workers': the client sums for all replicas or for none")
        if self.update not in get_args(UpdateAt):
            raise UsageError(f"update={self.update!r}: allowed are {quoted(UpdateAt)}")

    def _check_lossy(self) -> None:
        for stage in self.stages:
            if stage.gradients != "none" and (self.sync == "client" or self.late):
                where = "sync='client'" if self.sync == "client" else f"schedule {self.schedule!r}"
                raise UsageError(
                    f"gradients={stage.gradients!r} of a stage with {where}: lossy gradients are for exact steps whose "
                    "gradients are averaged among workers; take gradients='none'"
                )

        if any(stage.activations != "none" for stage in self.stages) and (
            self.late or any(stage.policy in ("offload", "swap") for stage in self.stages)
        ):
            raise UsageError(
                "activations of a stage with a lossy codec: they are for exact schedules, and not for plans that "
                "offload or swap activations; take activations='none'"
            )

    def _check_stages(self) -> None:
        if self.micro_batch is None:
            raise UsageError("a plan of several stages needs micro_batch, the samples of a micro-batch")
        if self.sync == "client":
            raise UsageError("sync='client' is for plans of one stage; leave it out")
        names = [name for stage in self.stages for name in stage.segments]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        self._check_split()
        if len(self.stages) == 1:
            return
        if twice or not all(stage.segments for stage in self.stages):
            raise UsageError(
                f"segment {twice[0]!r} is in two stages" if twice else "a stage has no segment; name at least one"
            )

    def _check_split(self) -> None:
        used = Counter(device for stage in self.stages for replica in stage.replicas for device in replica)
        for stage in self.stages:
            shared = sorted(device for replica in stage.replicas for device in replica if used[device] > 1)
            if stage.ranks > 1 and shared:
                raise UsageError(f"device {shared[0]} splits the layers of a stage, and has no part in another one")

    @classmethod
    def data_parallel(
        cls,
        devices: Sequence[int],
        shares: Sequence[float],
        *,
        micro_batch: int | None = None,
        sync: Sync = "workers",
        update: UpdateAt = "device",
        optimizer: OptimizerStateLayout = "replicated",
    ) -> Plan:
        """Return the plan of one stage, the whole model, replicated on devices."""
        stage = Stage(replicas=tuple((device,) for device in devices), shares=tuple(shares))
        return cls(stages=(stage,), micro_batch=micro_batch, sync=sync, update=update, optimizer=optimizer)

    @property
    def whole(self) -> bool:
        """Return whether the plan is one stage, the whole model, each replica on one device."""
        return len(self.stages) == 1 and not self.stages[0].segments and not self.split

    @property
    def late(self) -> bool:
        """Return whether its gradients are applied a step late, in a pipeline that never runs empty."""
        return SCHEDULE_TRAITS[self.schedule].late

    @property
    def halves(self) -> bool:
        """Return whether its schedule may split the backward of its stages, of which it has several."""
        return SCHEDULE_TRAITS[self.schedule].halves and len(self.stages) > 1

    @property
    def split(self) -> bool:
        """Return whether some stage's layers are split over several devices."""
        return any(len(replica) > 1 for stage in self.stages for replica in stage.replicas)

    @property
    def devices(self) -> tuple[int, ...]:
        """Its devices, each once, in the order of the stages."""
        every = (device for stage in self.stages for replica in stage.replicas for device in replica)
        return tuple(dict.fromkeys(every))

    @property
    def channels_last(self) -> frozenset[int]:
        """The stages whose convolutions use channels-last memory format."""
        return frozenset(stage for stage, found in enumerate(self.stages) if found.channels_last)

    @property
    def narrow(self) -> frozenset[int]:
        """The stages whose matrix products and convolutions are in bfloat16."""
        return frozenset(stage for stage, found in enumerate(self.stages) if found.precision == "bf16")

    @property
    def lossy(self) -> Mapping[LossyPart, tuple[str, ...]]:
        """For each part of the traffic that is compressed with a loss, its codecs, each once."""
        sent = tuple(dict.fromkeys(stage.activations for stage in self.stages if stage.activations != "none"))
        found: dict[LossyPart, tuple[str, ...]] = {"gradients": self.codecs, "activations": sent}
        return {part: codecs for part, codecs in found.items() if codecs}

    @property
    def codecs(self) -> tuple[GradientCodec, ...]:
        """The lossy codecs of its gradients, each once."""
        return tuple(dict.fromkeys(stage.gradients for stage in self.stages if stage.gradients != "none"))

    def micro_batches(self, batch: int) -> tuple[MicroBatch, ...]:
        """Cut a batch into micro-batches.

        Args:
            batch: Number of samples.

        Returns:
            The micro-batches, in the order of their samples.

        Raises:
            UsageError: There are more than 65,536.
        """
        if self.micro_batch is None:
            sizes = [size for size in apportion(batch, self.stages[0].shares) if size]
        else:
            whole, rest = divmod(batch, self.micro_batch)
            if whole >= MOST_MICRO_BATCHES:
                raise UsageError(
                    f"{whole} micro-batches of {self.micro_batch} in a batch of {batch}; allowed are "
                    f"{MOST_MICRO_BATCHES}: raise micro_batch"
                )
            sizes = [self.micro_batch] * whole + [rest] * (rest > 0)
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return tuple(
            MicroBatch(index=index, start=start, size=size)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
        )

    def routes(self, batch: int) -> Routes:
        """Return the routes of a batch's micro-batches: the devices of each, for each stage."""
        count = len(self.micro_batches(batch))
        found = []
        for stage in self.stages:
            if self.micro_batch is None:
                turns = [index for index, size in enumerate(apportion(batch, stage.shares)) if size]
            else:
                turns = deal(count, stage.shares)
            found.append(tuple(stage.replicas[turn] for turn in turns))
        return tuple(found)

    def describe(self) -> str:
        """Return a one-line description."""
        cut = "one micro-batch each" if self.micro_batch is None else f"micro-batches of {self.micro_batch}"
        narrow = [f"{len(self.narrow)} of bf16"] if self.narrow else []
        lossy = [f"{part} as {' and '.join(codecs)}" for part, codecs in self.lossy.items()]
        return ", ".join((self._where(cut), *self._memory(), *narrow, *lossy))

    def _memory(self) -> list[str]:
        """Describe activation policies and the optimizer's place, where they are not the defaults."""
        told = Counter(stage.policy for stage in self.stages if stage.policy != "keep")
        said = [f"{count} {POLICY_WORDS[policy]}" for policy, count in told.items()]
        if self.optimizer == "sharded":
            said.append("the optimizer's state shared out")
        return [*said, *(["the optimizer on the host"] if self.update == "host" else [])]

    def _where(self, cut: str) -> str:
        if len(self.devices) == 1:
            return f"{_count(len(self.stages), 'stage')} on device {self.devices[0]}, {cut}"
        if len(self.stages) > 1 or self.split:
            where = _places_text([_replicas(stage) for stage in self.stages])
            return f"{_count(len(self.stages), 'stage')} on devices {where}, {cut}, schedule {self.schedule}"
        (stage,) = self.stages
        total = math.fsum(stage.shares)
        parts = ", ".join(
            f"{replica[0]}: {share / total:.0%}" for replica, share in zip(stage.replicas, stage.shares, strict=True)
        )
        where = "worker to worker" if self.sync == "workers" else "at the client"
        return f"1 stage, {len(stage.replicas)} replicas ({parts}), {cut}, gradients averaged {where}"

    def figure(self, path: str | Path | None = None) -> Figure:
        """Return a figure of the predicted work of each device in a step.

        It follows from the plan's own prediction; what :func:`onebox.make_plan` returns has a figure of the whole step
        over time.

        Args:
            path: A file for it, a ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            UsageError: The plan has no prediction, or the file cannot be written.
            MissingExtra: Matplotlib is not installed.
        """
        found = step_figure([self._load()], title=self.describe())
        if path is not None:
            save(found, path)
        return found

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it."""
        load = "" if self.predicted is None else notebook.step_svg(self._load())
        return notebook.card("Plan", notebook.text(self.describe()), self.stages_html(), load)

    def stages_html(self) -> str:
        """Return the table of its stages as a notebook shows it."""
        rows: list[tuple[object, ...]] = []
        for number, stage in enumerate(self.stages):
            segments = " … ".join(dict.fromkeys((stage.segments[0], stage.segments[-1]))) if stage.segments else "all"
            times = self.predicted.stages_s[number] if self.predicted is not None else ()
            settings = ", ".join((stage.policy, *stage.formats))
            milliseconds = (float(f"{seconds * 1e3:.3g}") for seconds in times)
            rows.append((number, segments, _replicas(stage), settings, *milliseconds))
        kinds = ("forward ms", "input gradient ms", "weight gradient ms") if self.predicted is not None else ()
        return notebook.table(("stage", "segments", "devices", "activations", *kinds), rows)

    def _load(self) -> StepChart:
        """Return the predicted work of its devices.

        Raises:
            UsageError: The plan has no prediction.
        """
        if self.predicted is None:
            raise UsageError(
                "the plan has no prediction, which a figure shows: onebox.make_plan makes plans that have one, and "
                "onebox plan --check FILE --out FILE adds one to a plan file"
            )
        parts = self.micro_batches(self.predicted.batch)
        largest = self.micro_batch or max(part.size for part in parts)
        slowest = self.predicted.stages_s
        return load_chart(
            self.predicted.replicas_s or [[slowest[n]] * len(stage.replicas) for n, stage in enumerate(self.stages)],
            [stage.replicas for stage in self.stages],
            self.routes(self.predicted.batch),
            [part.size / largest for part in parts],
            halves=self.halves,
            step_s=self.predicted.step_s,
        )

    def to_json(self) -> str:
        """Return the plan as the text of a plan file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the plan") -> Plan:
        """Read the text of a plan file.

        Raises:
            UsageError: It is not a valid plan file; the message names the place.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except UsageError:
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{source} is no plan file: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            UsageError: It cannot be read, or is not a valid plan file.
        """
        try:
            text = read_regular(path, PLAN_BYTES)
        except OSError as error:
            raise UsageError(f"cannot read plan {path}: {error.strerror}") from None
        return cls.from_json(text, str(path))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")


def _places_text(places: Sequence[str]) -> str:
    """Describe the places of stages: each place once, with the spans of its stages where any has several."""
    where: dict[str, list[int]] = {}
    for stage, place in enumerate(places):
        where.setdefault(place, []).append(stage)
    if len(where) == len(places):
        return "; ".join(places)
    return "; ".join(f"{place} (stages {_spans(stages)})" for place, stages in where.items())


def _spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers: consecutive ones by the first and the last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _replicas(stage: Stage) -> str:
    return " | ".join("+".join(map(str, replica)) for replica in stage.replicas)


def as_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data, for reports."""
    return msgspec.to_builtins(plan)
