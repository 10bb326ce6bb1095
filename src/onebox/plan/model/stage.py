"""A stage of a plan: which part of the model it is, who computes it, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from msgspec import Struct

from onebox.errors import UsageError
from onebox.plan.model.shares import apportion

Sync = Literal["workers", "client"]

ActivationPolicy = Literal["keep", "recompute", "offload", "swap"]
"""What becomes of the activations of a stage until its backward: they stay on the device; they are dropped, and made
again from the stage's inputs by its backward; or they go to the host's memory and come back, by ``offload`` beside what
the device computes, by ``swap`` while it waits, so that nothing of them is there in between. The two other policies
that a part of a model may have are its place: a stage on a CPU worker, or on another device."""

POLICY_WORDS: Mapping[ActivationPolicy, str] = {"recompute": "recomputed", "offload": "offloaded", "swap": "swapped"}
"""How policies are told of stages, where they are not the usual one."""

StagePrecision = Literal["fp32", "bf16"]
"""Of a stage's products of matrices and convolutions."""

UpdateAt = Literal["device", "host"]
"""Where the optimizer's state is, and its step is computed."""

OptimizerStateLayout = Literal["replicated", "sharded"]
"""Whether each holder of a parameter has what the optimizer remembers of it and steps it, or one of them does."""


class PlanPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what stands in a plan file."""


class Stage(PlanPart, frozen=True):
    """A part of the model, and who computes it.

    Args:
        segments: Names of its segments; empty in a plan of one stage, which is the whole model.
        replicas: For each replica its devices, by their numbers in the pool; several split its layers.
        shares: Each replica's share of the batch; they add up to something positive.
        policy: What becomes of its activations until its backward. Another one than ``keep`` is for plans of several
            stages, which may be on one device: a single stage goes back right after forward, and would gain nothing.
        channels_last: Whether its convolutions have channels last in memory, which sums in another order; on CPUs that
            is faster, as a rule.
        precision: ``bf16`` where its products of matrices and its convolutions are to be of bfloat16, forward and
            backward, and everything else of float32; ``None`` for what the whole run has.
    """

    replicas: tuple[tuple[int, ...], ...]
    shares: tuple[float, ...]
    segments: tuple[str, ...] = ()
    policy: ActivationPolicy = "keep"
    channels_last: bool = False
    precision: StagePrecision | None = None

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
        if self.ranks > 1 and (self.channels_last or self.precision == "bf16"):
            what = "channels_last" if self.channels_last else "precision='bf16'"
            raise UsageError(f"{what} of a stage whose layers are split: leave it out, or give it one device each")
        apportion(1, self.shares)

    @property
    def formats(self) -> tuple[str, ...]:
        """What is said of how it is computed, where that is not the usual way."""
        return (*(["channels last"] if self.channels_last else []), *([self.precision] if self.precision else []))

    @property
    def ranks(self) -> int:
        """Over how many devices its layers are split."""
        return len(self.replicas[0])


def quoted(literal: Any) -> str:
    """Return what a literal type allows, for a message."""
    return ", ".join(map(repr, get_args(literal)))
