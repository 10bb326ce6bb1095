"""Plans of islands, and the islands' shares of a batch, from the first batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from onebox.cost import DeviceGroups
from onebox.engine.islands.division import are_alike, check_shares, divided
from onebox.engine.islands.islands_session import IslandPlans
from onebox.engine.planning.device_shares import resolve_device_shares
from onebox.engine.planning.resolve_plan import PlanRequest
from onebox.engine.state.remote import RemoteState
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.errors import UsageError
from onebox.plan import Plan, shares_from_speeds
from onebox.pool import Pool
from onebox.trainer_options import DataParallel, Outer


@dataclass(frozen=True, kw_only=True)
class IslandsRequest:
    """A request for the plans of islands.

    Args:
        islands: Devices of each island.
        requests: The request of each island.
        outer: Options of the outer optimizer, with the islands' shares.
    """

    islands: DeviceGroups
    requests: tuple[PlanRequest, ...]
    outer: Outer

    def check(self, pool: Pool) -> None:
        """Refuse requests that islands cannot meet.

        Raises:
            UsageError: The reason.
        """
        check_shares(self.outer.shares, self.islands)
        if self.outer.quorum is not None and self.outer.quorum > len(self.islands):
            raise UsageError(
                f"Outer(quorum={self.outer.quorum}): there are {len(self.islands)} islands; allowed are 1 to "
                f"{len(self.islands)}, and None for all of them"
            )
        for place, (devices, request) in enumerate(zip(self.islands, self.requests, strict=True)):
            request.check(pool)
            plan = request.plan
            if isinstance(plan, str):
                continue
            foreign = sorted(set(plan.devices) - set(devices)) if isinstance(plan, Plan) else []
            if foreign:
                raise UsageError(
                    f"the plan of island {place} uses device {foreign[0]}, which is not one of its devices, {devices}"
                )
            odd = [
                f"{name}={value!r}"
                for name, value, only in (("sync", plan.sync, "workers"), ("update", plan.update, "device"))
                if value != only
            ]
            if odd or (isinstance(plan, Plan) and plan.late):
                what = odd[0] if odd else f"schedule {plan.schedule!r}"  # type: ignore[union-attr]
                raise UsageError(
                    f"islands and {what} do not go together: islands exchange parameters between workers, on their "
                    "devices, after steps that are exact inside an island; leave one of them out"
                )

    def provisional(self, pool: Pool) -> IslandPlans | None:
        """Return plans and shares for evaluations before the first step, whose batches say nothing about those of
        steps; ``None`` if no plan is searched for, so that those of steps serve for them."""
        if all(request.plan != "auto" for request in self.requests):
            return None
        plans = tuple(
            request.plan if isinstance(request.plan, Plan) else request.provisional(pool, devices)
            for request, devices in zip(self.requests, self.islands, strict=True)
        )
        return IslandPlans(plans=plans, shares=(1.0,) * len(plans))

    def resolve(self, pool: Pool, captures: Captures, batch: Batch, state: RemoteState) -> IslandPlans:
        """Return the plan and the share of each island; devices are measured where the request leaves these open.

        Args:
            pool: The pool.
            captures: The captured model.
            batch: The first batch.
            state: A state to measure with.

        Raises:
            UsageError: Shares are not one for each device.
            PlanError: No plan fits.
            OneboxError: The model cannot be captured, does not fit, or a worker failed.
        """
        asked, requests = self.outer.shares, self.requests
        if asked == "auto" and are_alike(self.islands, pool.devices):
            asked = "equal"
        if isinstance(asked, str) and asked != "equal":
            every = [device for devices in self.islands for device in devices]
            found = resolve_device_shares(asked, pool, captures, batch, state, every)
            weights = dict(zip(every, found, strict=True))
            shares = shares_from_speeds([sum(weights[device] for device in devices) for devices in self.islands])
            own = [[weights[device] for device in devices] for devices in self.islands]
            requests = tuple(_with_shares(request, each) for request, each in zip(requests, own, strict=True))
        else:
            shares = [1.0] * len(self.islands) if asked == "equal" else [float(share) for share in asked]
        parts = divided(batch, shares)
        plans = tuple(
            request.resolve(pool, state, captures, part or batch, devices).plan
            for request, part, devices in zip(requests, parts, self.islands, strict=True)
        )
        if asked == "auto":
            shares = _predicted_shares(plans) or shares
        if any(request.plan == "auto" for request in requests):
            pool.profile(probe=range(len(pool)))  # the links between islands, for the prediction of the run
        return IslandPlans(plans=plans, shares=tuple(shares))


def _with_shares(request: PlanRequest, weights: Sequence[float]) -> PlanRequest:
    """Return a request whose open shares are the measured ones."""
    plan = request.plan
    if not isinstance(plan, DataParallel) or plan.shares not in ("auto", "measured"):
        return request
    return dataclasses.replace(request, plan=dataclasses.replace(plan, shares=weights))


def _predicted_shares(plans: Sequence[Plan]) -> list[float]:
    """Return the islands' shares by the predicted speeds of their plans; empty if some plan has no prediction."""
    predictions = [plan.predicted for plan in plans if plan.predicted is not None]
    if len(predictions) < len(plans):
        return []
    return shares_from_speeds([each.batch / each.step_s for each in predictions])
