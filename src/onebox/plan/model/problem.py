"""Input of the planner: segments of a model, values between them, devices, links, and the allowed plans. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from onebox.errors import UsageError
from onebox.plan.model.work import Links
from onebox.plan_names import (
    ACTIVATION_POLICIES,
    ASYNC,
    SCHEDULES,
    ChainPolicy,
    GradientCodec,
    UpdateAt,
    searchable_schedules,
)


@dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """Seconds of a computation as a linear function of its samples.

    Args:
        fixed_s: Fixed seconds.
        sample_s: Seconds per sample.
    """

    fixed_s: float = 0.0
    sample_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.fixed_s < float("inf") and 0 <= self.sample_s < float("inf")):
            raise UsageError(f"a time of {self.fixed_s} s and {self.sample_s} s a sample: both are finite, from 0 up")

    def at(self, samples: float) -> float:
        """Return the seconds for some samples."""
        return self.fixed_s + self.sample_s * samples

    @classmethod
    def fit(cls, measured: Mapping[int, float]) -> ComputeTime:
        """Fit the line to measurements by least squares of the relative errors; neither part comes out negative.

        Args:
            measured: Seconds by number of samples; a single measurement is taken as proportional to the samples.

        Raises:
            UsageError: There are no measurements, or one is not positive.
        """
        if not measured or any(samples < 1 or not 0 < seconds < float("inf") for samples, seconds in measured.items()):
            raise UsageError(f"times {dict(measured)}: at least one is needed, of positive samples and seconds")
        if len(measured) == 1:
            ((samples, seconds),) = measured.items()
            return cls(sample_s=seconds / samples)
        weights = {samples: 1 / seconds**2 for samples, seconds in measured.items()}
        scale = sum(weights.values())
        mean_x = sum(weights[x] * x for x in measured) / scale
        mean_y = sum(weights[x] * y for x, y in measured.items()) / scale
        spread = sum(weights[x] * (x - mean_x) ** 2 for x in measured)
        together = sum(weights[x] * (x - mean_x) * (y - mean_y) for x, y in measured.items())
        slope = max(0.0, together / spread)
        fixed = mean_y - slope * mean_x
        if fixed >= 0:
            return cls(fixed_s=fixed, sample_s=slope)
        through_zero = sum(weights[x] * x * y for x, y in measured.items()) / sum(weights[x] * x * x for x in measured)
        return cls(sample_s=through_zero)


@dataclass(frozen=True, kw_only=True)
class SegmentMemory:
    """Memory of a segment on a device that holds it.

    Args:
        parameter_bytes: Its parameters, without tied ones (:class:`Tie`); equal to the gradients that replicas sum.
        state_bytes: Parameters, gradients, optimizer state and buffers: held always.
        optimizer_bytes: Of these, the optimizer's state, which may be on the host.
        saved_bytes: Of the tensors that it makes, those that a backward needs later; for each sample.
        late_bytes: Held from the start of its input gradient to the end of its weight gradient; for each sample.
        forward_work_bytes: Needed beyond those while its forward runs; for each sample.
        backward_work_bytes: Needed beyond those while a gradient runs; for each sample.
    """

    parameter_bytes: int = 0
    state_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: int = 0
    late_bytes: int = 0
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Segment(SegmentMemory):
    """A part of the model that is never cut, with its memory on a device that holds all of it.

    Args:
        name: Its name in plans.
        forward_s: Time of forward, by type of device.
        input_s: Time of the gradient of its inputs.
        weight_s: Time of the gradients of its parameters.
        update_s: Seconds of its optimizer step, by type of device; 0 for missing types.
    """

    name: str
    forward_s: Mapping[str, ComputeTime]
    input_s: Mapping[str, ComputeTime]
    weight_s: Mapping[str, ComputeTime]
    update_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class SegmentValue:
    """A value that one segment makes and others use; it goes once to each stage that uses it.

    Args:
        source: Index of the segment that makes it.
        consumers: Indices of the segments that use it, all later.
        forward_bytes: Its bytes for each sample.
        backward_bytes: Bytes of its gradient for each sample; 0 without a gradient.
        kept: Whether its consumers' backward needs it, so that each receiving stage holds a copy until then.
    """

    source: int
    consumers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    kept: bool = True


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A parameter that several segments share: every stage with one of them holds it, and its gradients are summed.

    Args:
        segments: Indices of the segments.
        parameter_bytes: Bytes of the parameter, and of its gradient.
        state_bytes: With gradient and optimizer state.
        optimizer_bytes: Of these, the optimizer's state.
    """

    segments: tuple[int, ...]
    parameter_bytes: int
    state_bytes: int
    optimizer_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RankMessages:
    """Collectives of a split segment in forward or in backward, for each micro-batch.

    They run in rings, in which a rank sends `2 (n - 1)` messages and `2 (n - 1) / n` of the bytes for a sum over `n`
    ranks, and half of both for a gather (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009).

    Args:
        sums: Number of all-reduces.
        gathers: Number of all-gathers.
        fixed_bytes: Bytes that a rank sends for them, whatever the number of samples.
        sample_bytes: Those that it sends for each sample.
    """

    sums: int = 0
    gathers: int = 0
    fixed_bytes: float = 0.0
    sample_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SplitSegment(SegmentMemory):
    """A segment whose layers are split over ranks: the part and the memory of the first rank, which has the most.

    Args:
        forward_share: Part of the seconds of forward that a rank has left; 1 where nothing is shared.
        backward_share: The same for both gradients.
        forward: Collectives of forward.
        backward: Collectives of backward.
        forward_end_bytes: Bytes for each sample of values that ranks hold in shares, and that are gathered where later
            segments are in another stage.
        backward_end_bytes: The same for gradients where earlier segments are.
    """

    forward_share: float
    backward_share: float
    forward: RankMessages = RankMessages()
    backward: RankMessages = RankMessages()
    forward_end_bytes: int = 0
    backward_end_bytes: int = 0

    def __post_init__(self) -> None:
        for share in (self.forward_share, self.backward_share):
            if not 0 <= share < float("inf"):
                raise UsageError(f"a rank has {share} of a segment's time left: a finite part from 0 up")


HOST_BPS = 4e9
"""Assumed bandwidth between a device and its host's memory where none was measured: a core that copies in both
directions."""

HOST_UPDATE_S = 5e-10
"""Assumed seconds of an optimizer's step on the host per byte of parameters: six passes at 12 GB/s."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device that may be used.

    Args:
        number: Its number in the pool.
        type: Key of the segments' times, such as ``cpu`` or the name of a GPU.
        host: Its host.
        capacity_bytes: Its memory; ``None`` is unlimited.
        speed: Divisor of its type's times: less than 1 for a throttled device.
        host_bps: Bytes per second to its host's memory, and back.
        host_update_s: Seconds of an optimizer's step on its host, per byte of parameters, without copies.
        processor: Whether it is a share of its host's own processor, which may compute a part of the stage of another
            device of that host.
        threads: Cores of its host that its worker keeps busy while it computes.
        coding_bps: Bytes per second of gradients that it encodes with each lossy codec, with the new residual; a codec
            that has not been measured is never chosen.
    """

    number: int
    type: str
    host: str = ""
    capacity_bytes: int | None = None
    speed: float = 1.0
    host_bps: float = HOST_BPS
    host_update_s: float = HOST_UPDATE_S
    processor: bool = False
    threads: float = 0.0
    coding_bps: Mapping[GradientCodec, float] = field(default_factory=dict)


class StepSpread(NamedTuple):
    """Spread of the times of steps of a length.

    Args:
        seconds: The length.
        low: 10th percentile of a step's time, relative to the predicted one.
        high: 90th percentile.
    """

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A planning problem.

    Args:
        segments: In an order in which values go from earlier to later ones.
        devices: The available devices.
        links: Links between them.
        batch: Samples of a step.
        micro_batches: Allowed samples of a micro-batch.
        values: Values between segments.
        ties: Parameters that several segments share.
        call_s: Seconds that each action costs a device beside its work.
        schedules: Allowed schedules, out of :data:`~onebox.plan.SCHEDULES`.
        replicable: Whether a stage may have several replicas.
        max_stages: Maximum number of stages, consecutive ones with the same replicas counted once; ``None`` is
            unlimited.
        max_devices: Maximum number of devices; ``None`` is unlimited.
        free_shares: Whether a plan of one stage may make each replica's share one micro-batch, of any size up to the
            largest allowed one.
        regroupable: Whether the samples of a run may be divided into other micro-batches from some step on.
        policies: Allowed activation policies; ``cpu`` stands for a part of a device's stage on its host's processor.
        cores: By name of a host, the cores that its workers share; a missing host has enough. Times were measured with
            all workers at work. With `t` threads of all of them and, at a moment of a plan's step, `u` of those that
            compute, a processor's times are the measured ones times `max(1, (u + p + l) / cores) / max(1, (t + l) /
            cores)` with `p` from ``preparing`` and `l` from ``load``; :mod:`onebox.plan.model.crowding` has the mean.
        together: By name of a host, the factor by which its processors compute more slowly, relative to the measured
            times, in a plan that uses several hosts: hosts may be virtual machines of one machine.
        preparing: By name of a host, the cores that the preparation of batches keeps busy there.
        load: By name of a host, the cores that other programs wanted there while times were measured.
        spread: By type of device, how steps of some lengths spread; the lengths ascend. It is one factor for all
            actions of a step: a busy machine slows them alike.
        updates: Allowed places of the optimizer's state, the preferred one first.
        staleness: Steps by which gradients may be late: 0, or 1, with which ``schedules`` may have
            :data:`~onebox.plan.ASYNC`.
        versions: Weight versions on a device for each place of the state; what the correction of late gradients stores
            for each weight counts as one.
        sharded: Whether the replicas of a stage shard the optimizer's state, instead of each having all of it.
        splits: By number of ranks, all segments with their layers split over so many devices, which a replica of a
            stage may then be: alike ones of one host. Parameters that stages share stay whole.
    """

    segments: tuple[Segment, ...]
    devices: tuple[DeviceSpec, ...]
    links: Links
    batch: int
    micro_batches: tuple[int, ...]
    values: tuple[SegmentValue, ...] = ()
    ties: tuple[Tie, ...] = ()
    call_s: float = 0.0
    schedules: tuple[str, ...] = SCHEDULES
    replicable: bool = True
    max_stages: int | None = None
    max_devices: int | None = None
    free_shares: bool = True
    regroupable: bool = False
    policies: tuple[ChainPolicy, ...] = ACTIVATION_POLICIES
    cores: Mapping[str, float] = field(default_factory=dict)
    together: Mapping[str, float] = field(default_factory=dict)
    preparing: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, tuple[StepSpread, ...]] = field(default_factory=dict)
    updates: tuple[UpdateAt, ...] = ("device",)
    staleness: int = 0
    versions: int = 2
    sharded: bool = False
    splits: Mapping[int, tuple[SplitSegment, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.segments or not self.devices:
            raise UsageError("a planner needs at least one segment and one device")
        if self.batch < 1 or not self.micro_batches or not all(1 <= size <= self.batch for size in self.micro_batches):
            raise UsageError(
                f"batch={self.batch} with micro-batches of {list(self.micro_batches)}: allowed are 1 to the batch"
            )
        if self.staleness not in (0, 1) or self.versions not in (2, 3, 4):
            raise UsageError(
                f"staleness={self.staleness} with {self.versions} versions of the weights: allowed are 0 and 1, and "
                "2 to 4 versions"
            )
        for host, factor in self.together.items():
            if not 1 <= factor < float("inf"):
                raise UsageError(f"together={{{host!r}: {factor}}}: a finite factor of times, at least 1")
        known = searchable_schedules(self.staleness)
        if not self.schedules or any(name not in known for name in self.schedules):
            hint = f"; {ASYNC} needs stale gradients" if ASYNC in self.schedules else ""
            raise UsageError(f"schedules {list(self.schedules)}: allowed are {', '.join(known)}, at least one{hint}")
        if not set(self.policies) <= set(ACTIVATION_POLICIES) or "keep" not in self.policies:
            raise UsageError(
                f"policies {list(self.policies)}: allowed are {', '.join(ACTIVATION_POLICIES)}, "
                "and keep is always one of them"
            )
        if not self.updates or not set(self.updates) <= {"device", "host"}:
            raise UsageError(f"update={list(self.updates)}: allowed are device and host, at least one of them")
        for name, most in (("stages", self.max_stages), ("devices", self.max_devices)):
            if most is not None and most < 1:
                raise UsageError(f"max_{name}={most}: a plan has at least one of them")
        self._check_names()
        self._check_indices()
        self._check_links()

    def _check_names(self) -> None:
        names = [segment.name for segment in self.segments]
        numbers = [device.number for device in self.devices]
        if len(set(names)) < len(names) or len(set(numbers)) < len(numbers):
            raise UsageError(f"segments {names} on devices {numbers}: each name and each number is there once")
        for device in self.devices:
            if not 0 < device.speed < float("inf"):
                raise UsageError(f"device {device.number} has the speed {device.speed}: allowed is more than 0")
            for segment in self.segments:
                if any(device.type not in known for known in (segment.forward_s, segment.input_s, segment.weight_s)):
                    raise UsageError(f"no times of segment {segment.name!r} for {device.type!r}; profile it there")

    def _check_indices(self) -> None:
        count = len(self.segments)
        for ranks, split in self.splits.items():
            if ranks < 2 or len(split) != count:
                raise UsageError(f"{len(split)} segments over {ranks} ranks: there are {count}, for 2 ranks or more")
        for value in self.values:
            if not all(0 <= value.source < consumer < count for consumer in value.consumers):
                raise UsageError(f"a value goes from segment {value.source} to {value.consumers}: only later ones can")
        for tie in self.ties:
            if not all(0 <= index < count for index in tie.segments):
                raise UsageError(f"a parameter is tied between segments {tie.segments}: there are {count}")

    def _check_links(self) -> None:
        numbers = [device.number for device in self.devices]
        for a, b in permutations(numbers, 2):
            latency_s = self.links.latency_s.get(a, {}).get(b, -1.0)
            bandwidth_bps = self.links.bandwidth_bps.get(a, {}).get(b, 0.0)
            if not (latency_s >= 0 and bandwidth_bps > 0):
                raise UsageError(f"no link from device {a} to {b}; its latency and a bandwidth above 0 are needed")

    @cached_property
    def device(self) -> Mapping[int, DeviceSpec]:
        """The devices by their numbers."""
        return {device.number: device for device in self.devices}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Indices of the segments by their names."""
        return {segment.name: index for index, segment in enumerate(self.segments)}

    @cached_property
    def capacity_bytes(self) -> Mapping[int, int]:
        """Memory of each device that has a limit."""
        return {d.number: d.capacity_bytes for d in self.devices if d.capacity_bytes is not None}
