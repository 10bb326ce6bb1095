"""Profiling runs for one size of a micro-batch: the captured model without repeats, sessions that train it, and the
times of its segments from their traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from torch import nn

from onebox.cost.model_profile import (
    AS_CAPTURED,
    ModelBytes,
    SegmentBytes,
    SegmentTimes,
    SegmentVariant,
    TiedParameter,
)
from onebox.engine.config import numeric_instructions, steps_in_flight
from onebox.engine.data.prefetch import BatchPrefetcher
from onebox.engine.planning.partial_profile import (
    NOT_MEASURED,
    all_actions,
    not_measured,
)
from onebox.engine.planning.trace_times import (
    LEAST_S,
    durations_of,
    event_s,
    gap_between_actions_s,
    low_quantile,
    trimmed_mean,
)
from onebox.engine.problem.planner_problem import ResolvedPlan, divided_bytes, times_key
from onebox.engine.problem.stage_formats import compared, ways_of
from onebox.engine.session import TrainingSession
from onebox.engine.state.remote import RemoteState
from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.results import TraceEvent
from onebox.engine.workload.batch import Batch, as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec, target_type
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.graph import Loss, Mode, ModelPrograms, Precision, TracedModel
from onebox.graph.repeats import ShortenedModel, alike_stages, remaining
from onebox.plan import Action, Plan, Schedule, Stage
from onebox.pool import Pool
from onebox.trainer_options import Numerics, Staging
from onebox.wire.protocol.requests import SetNumerics

_LEAST_SLICE, _MOST_SLICE = 2, 8
"""Bounds of the steps of a slice, which has the samples of a batch: slices spread as steps of training do."""

MICRO_BATCHES = 2
"""Micro-batches per step, so that gradients are accumulated as in a pipeline."""


class SizeRuns:
    """Profiling runs for one size of a micro-batch.

    They train a copy of the model on the workers, in sessions without a trainer: the model and the optimizers in this
    process, which a user may be training at the same time, have no part in it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizers,
        small: tuple[Any, Any],
        size: int,
        batch: int,
        precision: Precision,
        fuse: bool,
        numerics: Numerics,
        captures: Captures | None,
    ) -> None:
        self._arguments = (model, loss, optimizer)
        self.small = small
        self.slice_steps = min(max(-(-batch // (size * MICRO_BATCHES)), _LEAST_SLICE), _MOST_SLICE)
        self._size = size
        self._precision = precision
        self._fuse = fuse
        self._numerics = numerics
        self.captures = captures
        self._names: tuple[str, ...] = ()
        self._bytes: ModelBytes | None = None
        self._programs: ModelPrograms | None = None
        self._alike: Sequence[Sequence[int]] = ()
        self._groups: Sequence[int] = ()
        """Group of equal segments of each stage."""

    def prepare(self, pool: Pool) -> None:
        """Capture the model."""
        if self.captures is None:
            model, loss, _ = self._arguments
            remote = RemoteState(*self._arguments, pool)
            recipe = CaptureSpec(
                model=model,
                loss=loss,
                metrics={},
                precision=self._precision,
                device_type=target_type(pool.devices),
                trained=frozenset(remote.wanted),
                fuse=self._fuse,
                reduction="mean",  # weights make no difference to time
            )
            self.captures = Captures(recipe)
        self._names = self.captures.segments(as_batch(*self.small), self._size)

    def divided(self) -> tuple[ModelPrograms, ModelBytes]:
        """Return the programs of the segments, and the sizes that follow from the graph alone."""
        found = self.bytes()
        assert self._programs is not None
        return self._programs, found

    @property
    def numeric_instructions(self) -> tuple[SetNumerics, ...]:
        """The settings of operators."""
        return numeric_instructions(self._numerics)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the state of the segments that are trained."""
        return sum(part.state_bytes for part in self._trained_parts())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of the segments that are trained, without gradients."""
        return sum(part.state_bytes - part.optimizer_bytes - part.parameter_bytes for part in self._trained_parts())

    def _trained_parts(self) -> list[SegmentBytes | TiedParameter]:
        known, trained = self.bytes(), set(remaining(self._alike))
        segments = [known.segments[number] for number in sorted(trained)]
        return [*segments, *(tie for tie in known.ties if trained.intersection(tie.segments))]

    def compared(self, found: Mapping[SegmentVariant, SegmentTimes]) -> SegmentTimes:
        """Return the times of segments in their fastest measured formats, as far as they were measured as captured."""
        plain = found.get(AS_CAPTURED)
        if plain is None:
            return not_measured(self._size, len(self._names))
        return compared({w: t for w, t in found.items() if all_actions(t)}) if all_actions(plain) else plain

    def key(self, pool: Pool) -> str:
        """Return the cache key of the times, with everything that they depend on."""
        optimizer = self._arguments[2]
        return times_key(self.bytes().graph, pool.devices, optimizer, self._size, self._precision, self._numerics)

    def sides(self, pool: Pool, devices: Sequence[int]) -> dict[SegmentVariant, list[int]]:
        """Return the devices to measure each promising format on."""
        self.bytes()
        assert self._programs is not None
        sides: dict[SegmentVariant, list[int]] = {}
        for kind in sorted({pool.devices[device].kind for device in devices}):
            alike = [device for device in devices if pool.devices[device].kind == kind]
            for way in ways_of(kind, [pool.devices[device] for device in alike], self._programs, self._precision):
                sides.setdefault(way, []).extend(alike)
        self._shorten(narrow=any(way.bf16 for way in sides))
        return sides

    def _shorten(self, *, narrow: bool) -> None:
        """Find the segments with equal programs, in bfloat16 as well if that is measured."""
        assert self.captures is not None
        assert self._programs is not None
        variants = [self._programs]
        if narrow:
            traced = self.captures.traced(as_batch(*self.small), self._size, train=True, halves=True)
            stages = [[name] for name in self._names]
            variants.append(traced.divide(stages, narrow=range(len(stages))))
        self._alike = alike_stages(*variants)
        group_of = {segment: group for group, segments in enumerate(self._alike) for segment in segments}
        self._groups = [group_of[segment] for segment in remaining(self._alike)]

    def session(self, pool: Pool, device: int, way: SegmentVariant) -> TrainingSession:
        """Return a session that trains on a device in a format."""
        assert self.captures is not None
        names = [self._names[number] for number in remaining(self._alike)]
        plan = _one_by_one(names, device, self._size, way)
        whole = len(names) == len(self._names)
        return TrainingSession(
            pool,
            lambda captures, batch: ResolvedPlan(plan=plan),
            self.captures if whole else _ShortenedCaptures(self.captures, self._alike),
            RemoteState(*self._arguments, pool),
            StepSettings(
                seed=0,
                trace=True,
                check_every=0,
                in_flight=steps_in_flight(pool.round_trip_s),
                max_norm=0.0,
                numerics=self.numeric_instructions,
            ),
            BatchPrefetcher(pool, Staging().ahead_bytes),
            recovery=None,
        )

    def undisturbed(self, events: Sequence[TraceEvent], *, cold: bool) -> dict[tuple[str, int], float]:
        """Return the undisturbed seconds of each kind of action, for each group of equal segments.

        Args:
            events: What a device did.
            cold: Whether these are its first actions, which load and prepare kernels: then the quickest ones count.
        """
        by_action: dict[tuple[str, int], list[float]] = {}
        for event in events:
            if event.action is not None:
                by_action.setdefault(self._key(event.action), []).append(event_s(event))
        return {key: max(min(s), LEAST_S) if cold else low_quantile(s) for key, s in by_action.items()}

    def warm_step_s(self, events: Sequence[TraceEvent]) -> float:
        """Return the seconds of a step whose micro-batches all take as long as the last one of a first step."""
        last = MICRO_BATCHES - 1
        return MICRO_BATCHES * sum(
            event_s(event) for event in events if event.action is not None and event.action.micro_batch == last
        )

    def pairs(
        self, events: Sequence[TraceEvent], undisturbed: Mapping[tuple[str, int], float]
    ) -> list[tuple[float, float]]:
        """Return the seconds of some actions and their undisturbed ones, in the order of time."""
        return [
            (event_s(event), undisturbed[self._key(event.action)])
            for event in sorted(events, key=lambda event: event.start_ns)
            if event.action is not None
        ]

    def _key(self, action: Action) -> tuple[str, int]:
        """Return the kind of an action, and the group of equal segments that its stage stands for."""
        return action.kind, self._groups[action.stage]

    def times(
        self,
        events: Sequence[TraceEvent],
        undisturbed: Mapping[tuple[str, int], float],
        speed: float,
        between_s: float,
        *,
        whole: bool,
    ) -> SegmentTimes:
        """Return the undisturbed times of all segments; of a step that was cut short, of those that were measured."""
        other = LEAST_S if whole else NOT_MEASURED  # of what does not exist, or is not known
        typical = {key: seconds * speed for key, seconds in undisturbed.items()}
        trained = remaining(self._alike)
        group_of = {stage: group for group, stages in enumerate(self._alike) for stage in stages}
        parameters = [segment.parameter_bytes for segment in self.bytes().segments]
        sums_s = trimmed_mean(durations_of(events, "accumulate", speed)) * len(trained)
        part_s = sums_s / max(1, sum(parameters[stage] for stage in trained))  # of the accumulation, per byte
        groups = [group_of[stage] for stage in range(len(parameters))]
        updated = whole or any(event.name == "optimizer" for event in events)
        update_s = trimmed_mean(durations_of(events, "optimizer", speed)) * self._all_updates() + between_s * speed
        return SegmentTimes(
            size=self._size,
            seconds=tuple(
                (
                    typical.get(("F", group), other),
                    typical.get(("I", group), other),
                    typical.get(("W", group), other) + part_s * own_bytes,
                )
                for group, own_bytes in zip(groups, parameters, strict=True)
            ),
            update_s=update_s if updated else NOT_MEASURED,
            call_s=gap_between_actions_s(events) if whole else NOT_MEASURED,  # between pieces there are messages
        )

    def _all_updates(self) -> float:
        """Return the bytes of all trained parameters relative to those of the segments that are trained here."""
        known, trained = self.bytes(), set(remaining(self._alike))
        every = [(segment.parameter_bytes, {number}) for number, segment in enumerate(known.segments)]
        every += [(tie.parameter_bytes, set(tie.segments)) for tie in known.ties]
        return sum(size for size, _ in every) / max(1, sum(size for size, stages in every if stages & trained))

    def bytes(self) -> ModelBytes:
        """Return the sizes that follow from the graph alone."""
        if self._bytes is None:
            self._bytes = self._count()
        return self._bytes

    def _count(self) -> ModelBytes:
        assert self.captures is not None
        programs, found = divided_bytes(self.captures, as_batch(*self.small), self._size, self._arguments[2])
        self._programs = programs
        return found


class _ShortenedCaptures(Captures):
    """Captures of a model without repeats.

    Args:
        whole: Captures of the model.
        alike: Groups of its segments with equal programs.
    """

    def __init__(self, whole: Captures, alike: Sequence[Sequence[int]]) -> None:
        super().__init__(whole.recipe)
        self._whole = whole
        self._alike = alike

    def traced(
        self, batch: Batch, size: int, *, train: bool, halves: bool = False, probe: Mode | None = None
    ) -> TracedModel:
        """Return the capture for micro-batches of a size."""
        return ShortenedModel(self._whole.traced(batch, size, train=train, halves=halves, probe=probe), self._alike)

    def repeat_effects(self, batch: Batch, sizes: Iterable[int], *, train: bool) -> None:
        """Do nothing: these are no steps of the user's."""


def _one_by_one(names: Sequence[str], device: int, size: int, way: SegmentVariant) -> Plan:
    """Return the plan in which one device runs every segment as a stage."""
    whole = Stage(
        replicas=((device,),),
        shares=(1.0,),
        channels_last=way.channels_last,
        precision="bf16" if way.bf16 else None,
    )
    stages = tuple(replace(whole, segments=(name,)) for name in names)
    row: list[Action] = []
    for micro_batch in range(MICRO_BATCHES):
        row += [Action("F", stage, micro_batch) for stage in range(len(names))]
        for stage in reversed(range(len(names))):
            row += [Action("I", stage, micro_batch), Action("W", stage, micro_batch)]
    table = Schedule(rows={device: tuple(row)}).lines()
    return Plan(stages=stages, micro_batch=size, schedule="table", table=table)
