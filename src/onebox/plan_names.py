"""Schedules and activation policies by name, which plan files and the command line share; imports no PyTorch."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args


class ScheduleTraits(NamedTuple):
    """Properties of a schedule: all that depends on its name, except the order of its actions.

    Args:
        late: Whether gradients are applied a step late, so that the pipeline never runs empty; a run then needs
            ``staleness=1``.
        halves: Whether it may split backward into the gradients of inputs and of parameters.
        timed: Whether its order depends on measured times, and so on the devices; else on routes alone.
        chunks: Stages of each device that it is made for, where more than one.
        mirrored: Whether these are placed as a V, the first device having the first stage and the last.
    """

    late: bool = False
    halves: bool = False
    timed: bool = False
    chunks: tuple[int, ...] = ()
    mirrored: bool = False


ASYNC = "async-1f1b"
"""The schedule that never runs empty: gradients are applied one step late."""

SCHEDULE_TRAITS = {
    "gpipe": ScheduleTraits(),
    "1f1b": ScheduleTraits(),
    "interleaved": ScheduleTraits(chunks=(2, 3)),
    "zb-h1": ScheduleTraits(halves=True),
    "zbv": ScheduleTraits(halves=True, chunks=(2,), mirrored=True),
    "auto": ScheduleTraits(halves=True, timed=True),
    ASYNC: ScheduleTraits(late=True),
    "table": ScheduleTraits(halves=True, timed=True),
}
"""Properties of each schedule that a plan may have; ``table`` stands for one that the plan spells out."""

SCHEDULES = tuple(name for name, own in SCHEDULE_TRAITS.items() if not own.late and name != "table")
"""Names of exact schedules; ``table`` stands for one that the plan spells out."""

NAMED = tuple(name for name in SCHEDULES if not SCHEDULE_TRAITS[name].timed)
"""Names of exact schedules that depend on routes alone."""


def searchable_schedules(staleness: int) -> tuple[str, ...]:
    """Return the names of the schedules that a search may choose, given the steps by which gradients may be late."""
    return (*SCHEDULES, ASYNC) if staleness else SCHEDULES


ChainPolicy = Literal["keep", "recompute", "offload", "swap", "cpu"]
"""Activation policy of a span of a chain: one of a stage, or ``cpu`` for a span on the host's processor."""

ACTIVATION_POLICIES: tuple[ChainPolicy, ...] = ("keep", "recompute", "offload", "swap", "cpu")

Sync = Literal["workers", "client"]
"""Place where the gradients of replicas are averaged."""

UpdateAt = Literal["device", "host"]
"""Place of the optimizer's state and step."""

GradientCodec = Literal["none", "bf16", "int8", "e3m0", "powersgd"]
"""Lossy codec of the gradients that replicas exchange; ``none`` for exact sums."""

ActivationCodec = Literal["none", "bf16", "int8"]
"""Lossy codec of the values that a stage sends to other stages; ``none`` to send them as they are."""

StateAt = Literal["device", "host"]
"""Place of state between the steps that use it."""

OuterCodec = Literal["none", "bf16", "int8", "e3m0"]
"""Lossy codec of the outer gradients that islands exchange; ``none`` for exact sums."""

LossyPart = Literal["gradients", "activations"]
"""Part of the traffic that a run may allow to be compressed with a loss."""

LOSSY_PARTS: tuple[LossyPart, ...] = get_args(LossyPart)
"""All of these parts."""
