"""The profile of a model: time and memory of each of its segments. Pure data, small enough for a file."""

from __future__ import annotations

import math
from itertools import pairwise

from msgspec import Struct


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects in a profile."""


class SegmentBytes(_Part, frozen=True):
    """Memory of a segment, for one micro-batch of the profile's size.

    Args:
        name: Its name.
        parameter_bytes: Its trained parameters, without those shared with other segments.
        state_bytes: All its parameters and buffers, with gradients and optimizer state; likewise.
        optimizer_bytes: Of these, the optimizer's state.
        saved_bytes: Tensors that its forward makes, or reads of the batch, and that backward needs.
        late_bytes: Held for its weight gradient from the start of its input gradient.
        forward_work_bytes: Needed beyond those while forward runs.
        backward_work_bytes: Needed beyond those while a gradient runs.
        update_bytes: Cost of its optimizer step in bytes read and written; only its share of the total matters.
    """

    name: str
    parameter_bytes: int
    state_bytes: int
    saved_bytes: int
    late_bytes: int
    forward_work_bytes: int
    backward_work_bytes: int
    optimizer_bytes: int = 0
    update_bytes: float = 0.0


class CrossingValue(_Part, frozen=True):
    """A value that goes between segments, for one micro-batch of the profile's size.

    Args:
        source: Segment whose forward makes it (or, for a gradient, gets it).
        consumers: Segments that read it (or whose backward makes the gradient).
        forward_bytes: Its bytes; 0 for a gradient.
        backward_bytes: Bytes of the gradient; 0 for a value of forward.
        kept: Whether a consumer's backward reads it.
    """

    source: int
    consumers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    kept: bool


class TiedParameter(_Part, frozen=True):
    """A parameter that several segments read.

    Args:
        name: Its name.
        segments: The segments.
        parameter_bytes: Its bytes, if it is trained.
        state_bytes: With gradient and optimizer state.
        optimizer_bytes: Of these, the optimizer's state.
    """

    name: str
    segments: tuple[int, ...]
    parameter_bytes: int
    state_bytes: int
    optimizer_bytes: int = 0


class ModelBytes(_Part, frozen=True):
    """Properties of a model that follow from its graph alone.

    Args:
        graph: A hash of its programs.
        size: Samples of the micro-batch that the bytes are for.
        segments: In the order of forward.
        values: Values between them.
        ties: Parameters that several of them read.
    """

    graph: str
    size: int
    segments: tuple[SegmentBytes, ...]
    values: tuple[CrossingValue, ...]
    ties: tuple[TiedParameter, ...]


class SegmentVariant(_Part, frozen=True):
    """A variant of computing a segment.

    Args:
        channels_last: Whether its convolutions use channels-last memory format.
        bf16: Whether its products are in bfloat16.
    """

    channels_last: bool = False
    bf16: bool = False


AS_CAPTURED = SegmentVariant()
"""As captured."""


class SlowdownWindow(_Part, frozen=True):
    """Percentiles of a machine's slowdown over times of a length.

    Args:
        seconds: The length.
        low: 10th percentile.
        high: 90th percentile.
    """

    seconds: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.high < math.inf and 0 < self.seconds < math.inf):
            raise ValueError(f"{self}: its quantiles are positive, finite and ascending, its length positive")


class Slowdown(_Part, frozen=True):
    """Distribution of a machine's slowdown: the time of a slice of measured steps over that of undisturbed ones.

    Args:
        low: 10th percentile.
        median: 50th percentile.
        high: 90th percentile.
        slices: Number of slices.
        windows: The percentiles over shorter times, up to a slice; their lengths ascend.
    """

    low: float
    median: float
    high: float
    slices: int
    windows: tuple[SlowdownWindow, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.median <= self.high < math.inf or self.slices < 1:
            raise ValueError(f"{self}: its quantiles are positive, finite and ascending, of at least one slice")
        if any(one.seconds >= other.seconds for one, other in pairwise(self.windows)):
            raise ValueError(f"{self}: the lengths of its windows ascend")


class SegmentTimes(_Part, frozen=True):
    """Measured times on one type of device at full speed, for one size of a micro-batch.

    Args:
        size: Samples of the micro-batch.
        seconds: For each segment: forward, input gradient, weight gradient, at the median slowdown of the machine.
        update_s: The optimizer step over all parameters.
        call_s: Seconds of an action beside its operators.
        ways: ``seconds`` of each measured variant; those above are then of each segment's fastest. Empty where there
            was only one.
        slowdown: Slowdown of the machine meanwhile; ``None`` if there were too few slices, or the times are estimates.
        measured: Part of ``seconds`` that was measured; the rest is estimated.
    """

    size: int
    seconds: tuple[tuple[float, float, float], ...]
    update_s: float
    call_s: float
    ways: tuple[tuple[SegmentVariant, tuple[tuple[float, float, float], ...]], ...] = ()
    slowdown: Slowdown | None = None
    measured: float = 1.0


class ModelProfile(_Part, frozen=True):
    """The profile of a model.

    Args:
        bytes: Its memory.
        times: For each type of device, times for each measured size.
    """

    bytes: ModelBytes
    times: dict[str, tuple[SegmentTimes, ...]]

    @property
    def measured(self) -> float:
        """Part of the seconds of all segments that was measured, from 0 to 1."""
        each = [(math.fsum(map(sum, one.seconds)), one.measured) for sizes in self.times.values() for one in sizes]
        whole_s = math.fsum(seconds for seconds, _ in each)
        return math.fsum(seconds * part for seconds, part in each) / whole_s if whole_s else 1.0
