"""Settings of a trainer and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from onebox.errors import UsageError
from onebox.graph import Precision
from onebox.plan import OptimizerStateLayout, Plan, Sync, UpdateAt
from onebox.pool import Pool
from onebox.pool.backends.local import LOCAL_HOST

_SHORT_STEP_S = 0.01
_MOST_STEPS = 8
"""Most steps in flight."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The requested computation.

    Args:
        plan: A plan; ``None`` for data parallel over all devices.
        shares: Each device's share of the batch; see :class:`~onebox.engine.Trainer`.
        micro_batch: Samples of a micro-batch.
        sync: Place where gradients are averaged.
        update: Place of the optimizer's step.
        optimizer: Whether the replicas shard its state.
    """

    plan: Plan | None
    shares: Any
    micro_batch: int | None
    sync: Sync
    update: UpdateAt = "device"
    optimizer: OptimizerStateLayout = "replicated"

    def check(self, pool: Pool) -> None:
        """Refuse an invalid request.

        Raises:
            UsageError: It is invalid; the message gives the reason.
        """
        if self.update not in get_args(UpdateAt):
            raise UsageError(f"update={self.update!r}: allowed are {', '.join(map(repr, get_args(UpdateAt)))}")
        if self.plan is None:
            self.sample(len(pool))
            return
        own = (self.micro_batch, self.sync, self.shares, self.update, self.optimizer)
        if own != (None, "workers", "auto", "device", "replicated"):
            raise UsageError(
                "a plan says itself what micro_batch, sync, shares, update and shard_optimizer are; leave them out"
            )
        missing = [device for device in self.plan.devices if device >= len(pool)]
        if missing:
            raise UsageError(f"the plan uses device {missing[0]}, but the pool has {len(pool)}, numbered from 0")

    def said(self, devices: int) -> Plan | None:
        """Return the plan, or one with the requested settings besides shares; ``None`` if there are none.

        Args:
            devices: Number of devices in the pool.
        """
        usual = (self.micro_batch, self.sync, self.update, self.optimizer) == (None, "workers", "device", "replicated")
        return self.plan or (None if usual else self.sample(devices))

    def sample(self, devices: int = 1) -> Plan:
        """Return a sample of the default plan, before the devices' shares are known."""
        return Plan.data_parallel(
            range(devices),
            [1.0] * devices,
            micro_batch=self.micro_batch,
            sync=self.sync,
            update=self.update,
            optimizer=self.optimizer,
        )


def check_settings(
    seed: int, precision: str, clip_grad_norm: float | None, check_every: int, in_flight: int, ahead_bytes: int
) -> None:
    """Refuse invalid settings of a trainer.

    Raises:
        UsageError: A setting is invalid; the message names it and the allowed values.
    """
    if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise UsageError(f"seed={seed!r}: allowed are whole numbers of 64 bits")
    check_precision(precision)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UsageError(f"clip_grad_norm={clip_grad_norm}: it must be positive; leave it out for no clipping")
    if check_every < 0 or in_flight < 1:
        raise UsageError(f"check_every={check_every}, in_flight={in_flight}: at least 0 and 1 are allowed")
    if not isinstance(ahead_bytes, int) or ahead_bytes < 0:
        raise UsageError(f"ahead_bytes={ahead_bytes!r}: allowed are whole numbers from 0")


def check_precision(precision: str) -> None:
    """Refuse what is no precision.

    Raises:
        UsageError: What is allowed.
    """
    if precision not in get_args(Precision):
        raise UsageError(f"precision={precision!r}: allowed are 'fp32', 'bf16' and 'auto'")


def steps_in_flight(round_trip_s: float) -> int:
    """Return the number of steps in flight.

    With one more step than fits into a round trip, the next one is always at the workers when a step ends; on a LAN
    that is two. Steps are assumed to last at least 10 ms: each one in flight costs the memory of its batch.

    Args:
        round_trip_s: Round trip to the most distant worker.

    Example:
        >>> [steps_in_flight(seconds) for seconds in (0.0, 0.001, 0.03, 1.0)]
        [2, 2, 5, 8]
    """
    return min(2 + int(round_trip_s / _SHORT_STEP_S), _MOST_STEPS)


def recovery_enabled(pool: Pool, recover: bool | None, snapshot_every: int | None) -> bool:
    """Return whether a run is to recover from losses.

    Args:
        pool: The pool.
        recover: The user's setting; ``None`` for yes if an agent or a Ray cluster runs some of the workers, or if
            ``snapshot_every`` is given.
        snapshot_every: The user's number of steps between snapshots, if given.

    Raises:
        UsageError: A setting is invalid; the message names the allowed values.
    """
    emulated = any(device.kind == "sim" for device in pool.devices)
    far = any(device.host != LOCAL_HOST for device in pool.devices)
    wanted = (far and not emulated) or snapshot_every is not None if recover is None else recover
    if snapshot_every is not None and (not wanted or snapshot_every < 1):
        raise UsageError(f"snapshot_every={snapshot_every}: at least 1 is allowed, and only with recover=True")
    if wanted and emulated:
        raise UsageError("recover=True: sim devices have no values to keep; leave it out")
    return wanted
