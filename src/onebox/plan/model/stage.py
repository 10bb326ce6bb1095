"""A stage of a plan: its part of the model, its devices, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from msgspec import Struct

from onebox.errors import UsageError
from onebox.plan.model.shares import apportion
from onebox.plan_names import ActivationCodec, ChainPolicy, GradientCodec

ActivationPolicy = Literal["keep", "recompute", "offload", "swap"]
"""Activation policy of a stage: activations stay on the device until its backward; they are dropped, and recomputed
from the stage's inputs by its backward; or they are copied to the host's memory and back, by ``offload`` while the
device computes, by ``swap`` while it waits, so that none of them is there in between. The two other policies of a part
of a model are placements: a stage on a CPU worker, or on another device."""

POLICY_WORDS: Mapping[ActivationPolicy, str] = {"recompute": "recomputed", "offload": "offloaded", "swap": "swapped"}
"""Descriptions of activation policies other than the default."""

OFFLOADING_POLICIES: frozenset[ChainPolicy] = frozenset({"offload", "swap"})
"""The policies of spans of one link whose values go to the host's memory."""

StagePrecision = Literal["fp32", "bf16"]
"""Precision of a stage's matrix products and convolutions."""

OptimizerStateLayout = Literal["replicated", "sharded"]
"""Distribution of a parameter's optimizer state and update: on each of its holders, or on only one of them."""


class PlanPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects in a plan file."""


class Stage(PlanPart, frozen=True):
    """A part of the model, with its devices and settings.

    Args:
        segments: Names of its segments; empty in a plan of one stage, which is the whole model.
        replicas: For each replica its devices, by their numbers in the pool; several split its layers.
        shares: Each replica's share of the batch; only their ratios count, and their sum is positive.
        policy: Its activation policy, which says what happens to activations until backward. Policies other than
            ``keep`` are for plans of several stages, which may be on one device: the backward of a single stage follows
            its forward at once, so that it would gain nothing.
        channels_last: Whether its convolutions use channels-last memory format, which sums in another order and is
            usually faster on CPUs.
        precision: ``bf16`` for matrix products and convolutions in bfloat16, forward and backward, and everything else
            in float32; ``None`` for the precision of the run.
        gradients: Lossy codec of the gradients that its replicas exchange, with error feedback; one other than ``none``
            has to be allowed, as by ``--lossy gradients``, because it changes the result. A parameter that several
            stages share is exchanged with the codec of all of them, or exactly where they differ.
        activations: Lossy codec of the values that it sends to stages on other devices in training: its activations
            forward, and the gradients of its inputs backward; one other than ``none`` has to be allowed, as by
            ``--lossy activations``.
    """

    replicas: tuple[tuple[int, ...], ...]
    shares: tuple[float, ...]
    segments: tuple[str, ...] = ()
    policy: ActivationPolicy = "keep"
    channels_last: bool = False
    precision: StagePrecision | None = None
    gradients: GradientCodec = "none"
    activations: ActivationCodec = "none"

    def __post_init__(self) -> None:
        if self.policy not in get_args(ActivationPolicy):
            raise UsageError(f"policy={self.policy!r} of a stage: allowed are {quoted(ActivationPolicy)}")
        if not self.replicas or len(self.replicas) != len(self.shares) or not all(self.replicas):
            raise UsageError(f"{len(self.shares)} shares for {len(self.replicas)} devices: one for each is needed")
        devices = [device for replica in self.replicas for device in replica]
        if len(set(devices)) != len(devices) or min(devices) < 0:
            raise UsageError(f"a stage has the devices {devices}: each may be there once, by its number in the pool")
        if len({len(replica) for replica in self.replicas}) > 1:
            raise UsageError(f"replicas {self.replicas}: all replicas of a stage are split over as many devices")
        if self.precision not in (None, *get_args(StagePrecision)):
            raise UsageError(f"precision={self.precision!r} of a stage: allowed are {quoted(StagePrecision)}")
        if self.gradients not in get_args(GradientCodec):
            raise UsageError(f"gradients={self.gradients!r} of a stage: allowed are {quoted(GradientCodec)}")
        if self.activations not in get_args(ActivationCodec):
            raise UsageError(f"activations={self.activations!r} of a stage: allowed are {quoted(ActivationCodec)}")
        if self.ranks > 1 and (self.channels_last or self.precision == "bf16"):
            what = "channels_last" if self.channels_last else "precision='bf16'"
            raise UsageError(f"{what} of a stage whose layers are split: leave it out, or give it one device each")
        apportion(1, self.shares)

    @property
    def formats(self) -> tuple[str, ...]:
        """Descriptions of its settings other than the defaults."""
        return (*(["channels last"] if self.channels_last else []), *([self.precision] if self.precision else []))

    @property
    def ranks(self) -> int:
        """Number of devices over which its layers are split."""
        return len(self.replicas[0])


def quoted(literal: Any) -> str:
    """Format the allowed values of a literal type for a message."""
    return ", ".join(map(repr, get_args(literal)))
