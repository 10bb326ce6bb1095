"""A plan as the planner handles it: indices in place of names. Private to the folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from onebox.errors import UsageError
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.model.stage import ActivationPolicy, Stage
from onebox.plan_names import SCHEDULE_TRAITS, ActivationCodec, GradientCodec, UpdateAt


class LayoutStage(NamedTuple):
    """A stage of a layout.

    Args:
        segments: Indices of its segments, in the order of the chain that was cut.
        devices: Numbers of its devices, those of one replica after those of another.
        shares: Each replica's share of the batch.
        policy: Its activation policy.
        codec: Lossy codec of its gradients.
        sends: Lossy codec of the values that it sends to other stages.
        ranks: Devices of each replica; several split its layers.
    """

    segments: tuple[int, ...]
    devices: tuple[int, ...]
    shares: tuple[float, ...]
    policy: ActivationPolicy = "keep"
    codec: GradientCodec = "none"
    sends: ActivationCodec = "none"
    ranks: int = 1

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each replica."""
        return tuple(self.devices[at : at + self.ranks] for at in range(0, len(self.devices), self.ranks))


class StageLayout(NamedTuple):
    """Stages with their placement, micro-batches and schedule.

    Args:
        parts: The stages, in an order in which values of forward go from earlier to later ones.
        micro_batch: Samples of a micro-batch; ``None`` makes each replica's share one.
        schedule: Name of the schedule.
        update: Place of the optimizer's state and step; ``None`` is the first that the problem allows.
    """

    parts: tuple[LayoutStage, ...]
    micro_batch: int | None
    schedule: str
    update: UpdateAt | None = None

    @property
    def late(self) -> bool:
        """Return whether its gradients are applied a step late, in a pipeline that never runs empty."""
        return SCHEDULE_TRAITS[self.schedule].late

    @property
    def split(self) -> bool:
        """Return whether some stage's layers are split over several devices."""
        return any(part.ranks > 1 for part in self.parts)

    @property
    def places(self) -> int:
        """Number of pairs of stage and device."""
        return sum(len(part.devices) for part in self.parts)

    @property
    def blocks(self) -> int:
        """Number of stages of the schedule: consecutive ones with the same replicas count once."""
        places = [(part.devices, part.shares, part.ranks) for part in self.parts]
        return 1 + sum(one != other for one, other in pairwise(places))

    def with_parts(self, first: int, *parts: LayoutStage, until: int | None = None) -> StageLayout:
        """Return the layout with the stages from ``first`` on replaced, up to ``until`` or as many as are given."""
        end = first + len(parts) if until is None else until
        return self._replace(parts=(*self.parts[:first], *parts, *self.parts[end:]))

    def with_sizes(self, sizes: Sequence[int]) -> StageLayout:
        """Return the layout with other numbers of segments in its stages, along the same chain."""
        every = tuple(index for part in self.parts for index in part.segments)
        ends = tuple(accumulate(sizes))
        ranges = zip((0, *ends), ends, self.parts, strict=False)
        return self._replace(parts=tuple(part._replace(segments=every[a:b]) for a, b, part in ranges))

    def with_devices(self, names: Mapping[int, int]) -> StageLayout:
        """Return the layout with some devices replaced by others, by their numbers."""
        parts = (part._replace(devices=tuple(names.get(d, d) for d in part.devices)) for part in self.parts)
        return self._replace(parts=tuple(parts))

    @property
    def plain(self) -> bool:
        """Return whether no time is traded for memory: all activations are kept, the optimizer at its first place."""
        return self.update is None and all(part.policy == "keep" for part in self.parts)


def single(segments: tuple[int, ...], device: int) -> LayoutStage:
    """Return a stage on one device."""
    return LayoutStage(segments, (device,), (1.0,))


def plan_of(problem: Problem, layout: StageLayout) -> Plan:
    """Return a layout as a plan, without its prediction."""
    whole = len(layout.parts) == 1
    stages = tuple(
        Stage(
            replicas=part.replicas,
            shares=part.shares,
            segments=() if whole else tuple(problem.segments[index].name for index in sorted(part.segments)),
            policy=part.policy,
            gradients=part.codec,
            activations=part.sends,
        )
        for part in layout.parts
    )
    update = layout.update or problem.updates[0]
    return Plan(
        stages=stages,
        micro_batch=layout.micro_batch,
        schedule=layout.schedule,
        update=update,
        optimizer="sharded" if problem.sharded else "replicated",
    )


def layout_of(problem: Problem, plan: Plan) -> StageLayout:
    """Return a plan as a layout.

    Raises:
        UsageError: It names unknown segments or devices, leaves segments out, puts a consumer of a value before its
            source, or splits layers over a number of devices for which no times are known.
    """
    names = [name for stage in plan.stages for name in stage.segments]
    unknown = [name for name in names if name not in problem.index]
    left = [] if not names else [segment.name for segment in problem.segments if segment.name not in set(names)]
    if unknown or left:
        raise UsageError(
            f"the plan names segment {unknown[0]!r}, which the model does not have"
            if unknown
            else f"the plan has no stage for segment {left[0]!r}; every segment needs one"
        )
    strangers = [device for device in plan.devices if device not in problem.device]
    if strangers:
        raise UsageError(f"the plan uses device {strangers[0]}; there are {sorted(problem.device)}")
    if any(stage.ranks > 1 and stage.ranks not in problem.splits for stage in plan.stages):
        raise UsageError("the plan splits layers over several devices, and no times are known for that")
    every = tuple(range(len(problem.segments)))
    parts = tuple(
        LayoutStage(
            tuple(sorted(problem.index[name] for name in stage.segments)) or every,
            tuple(device for replica in stage.replicas for device in replica),
            stage.shares,
            stage.policy,
            stage.gradients,
            stage.activations,
            stage.ranks,
        )
        for stage in plan.stages
    )
    _check_order(problem, parts)
    return StageLayout(parts, plan.micro_batch, plan.schedule, plan.update)


def _check_order(problem: Problem, parts: tuple[LayoutStage, ...]) -> None:
    where = owners(parts, len(problem.segments))
    for value in problem.values:
        for consumer in value.consumers:
            if where[consumer] < where[value.source]:
                source, target = problem.segments[value.source].name, problem.segments[consumer].name
                raise UsageError(
                    f"segment {target!r} of stage {where[consumer]} uses a value of {source!r} of stage "
                    f"{where[value.source]}; a stage may use values of earlier stages only"
                )


def owners(parts: tuple[LayoutStage, ...], segments: int) -> list[int]:
    """Return the stage of each segment."""
    where = [0] * segments
    for stage, part in enumerate(parts):
        for index in part.segments:
            where[index] = stage
    return where
