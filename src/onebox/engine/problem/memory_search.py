"""Search for a plan within exact memory limits, of which the planner's own count is an estimate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from onebox.engine.memory.forecast import MemoryForecast
from onebox.errors import PlanError
from onebox.plan import Plan, PlanCandidate, Prediction, SearchResult, search
from onebox.plan.model.problem import Problem
from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.plan.search.result import rated_s
from onebox.sizes import enough_text

_SHARES = (0.5, 0.2, 0.1, 0.1, 0.05, 0.05)
"""Budget fraction of each search: each one after the first uses memory limits corrected by the error of the previous
estimate. Fractions apply to the number of simulations, not to the clock: equal searches give equal plans."""

_ALMOST_ALL = 0.9
"""Budget fraction of the first search if each device can hold the whole model, and no further search is expected."""

_MARGIN = 0.985

_WORTH = 1.03
"""If a plan trades time for memory, and a limit exceeds the peak by this factor, another search uses more memory."""

_NEAR = 1.3
"""Plans that are faster, and whose estimate exceeds the memory by up to this factor, are counted exactly."""

_HOPE = 1.08
"""If nothing fits by the estimate, it is once assumed to be too high by this factor."""

MemoryCounter = Callable[[Plan], MemoryForecast]
"""Returns the exact memory of a plan."""


def short_of_memory(problem: Problem) -> bool:
    """Return whether some device cannot hold the whole model with its largest micro-batch, so that activation policies
    matter.
    """
    made = sum(segment.saved_bytes for segment in problem.segments) * max(problem.micro_batches)
    state = sum(segment.state_bytes for segment in problem.segments) + sum(tie.state_bytes for tie in problem.ties)
    return any(capacity < state + made for capacity in problem.capacity_bytes.values())


def search_within(
    problem: Problem, exact: MemoryCounter, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[SearchResult, Plan]:
    """Search for the best plan that fits by the exact count of its memory.

    If a host lacks memory for offloaded data, offloading is excluded. If the estimate for a device is too low, its
    memory limit is reduced by the difference, and the search is repeated. If the estimate is too high, and the plan
    trades time for memory, the limit is raised. Finally, faster plans that were refused for their estimate are counted
    exactly, also with the optimizer on the host if that is allowed and nothing else fits.

    Args:
        problem: The problem.
        exact: Returns a plan's exact memory.
        budget_s: Time limit in seconds. After it only the work needed to have any plan that fits is begun.
        clock: Returns the time.

    Returns:
        The search result, and its plan, with the exact peak of each device.

    Raises:
        PlanError: Nothing fits.
    """
    within, refused = _Within(problem, exact), None
    end_s = clock() + budget_s
    first, *others = _SHARES
    for share in (first if short_of_memory(problem) else _ALMOST_ALL, *others):
        if within.best is not None and clock() >= end_s:
            return within.best
        try:
            result = search(within.problem, budget_s=share * budget_s, clock=clock)
        except PlanError as error:
            if within.counted or refused is not None:
                break  # its result would refer to the reduced memory
            refused = error
            within.hope()
            continue
        if not within.note(result):
            break
    within.reconsider(lambda: clock() >= end_s)
    if within.best is None:
        raise refused or within.refusal()
    return within.best


def search_sharing(
    problem: Problem, exact: MemoryCounter, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> tuple[SearchResult, Plan, Problem]:
    """Search as :func:`search_within` does, and once more with a sharded optimizer.

    Each search has half of the budget.

    Returns:
        The faster result, its plan, and its problem.

    Raises:
        PlanError: Nothing fits.
    """
    refused = None
    found: list[tuple[SearchResult, Plan, Problem]] = []
    for each in (problem, replace(problem, sharded=True)):
        try:
            found.append((*search_within(each, exact, budget_s / 2, clock), each))
        except PlanError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda one: rated_s(one[1]))  # the first of two equally fast ones


class _Within:
    """State of repeated searches.

    Args:
        problem: The problem.
        exact: Returns a plan's exact memory.

    Attributes:
        problem: The problem with the memory limits of the next search.
        best: The fastest plan that fits, and its search result.
        counted: Whether a plan has been counted.
    """

    def __init__(self, problem: Problem, exact: MemoryCounter) -> None:
        self.problem, self._exact = problem, exact
        self.best: tuple[SearchResult, Plan] | None = None
        self.counted = False
        self._limits = problem.capacity_bytes
        self._over: dict[int, int] = {}
        self._seen: dict[str, PlanCandidate] = {}
        self._last: SearchResult | None = None
        self._lack = ""

    def note(self, result: SearchResult) -> bool:
        """Count the memory of a result; return whether another search may find a better one."""
        plan, (peaks, lack) = result.plan, self._exact(result.plan)
        self.counted, self._last = True, result
        if lack:
            return self._stay(lack)
        for one in result.candidates[1:]:
            self._seen.setdefault(one.label, one)
        estimates = dict(zip(plan.devices, _prediction(plan).peak_bytes, strict=True))
        over = {device: peaks[device] for device in plan.devices if peaks[device] > self._limits.get(device, math.inf)}
        if over:
            self._over = over
            self._limit(estimates, over, _MARGIN)
            return True
        if not self._better(plan):
            return False
        self.best = result, with_peaks(plan, peaks)
        room = {device: peaks[device] for device in plan.devices if device in self._limits}
        spare = {device: peak for device, peak in room.items() if self._limits[device] > peak * _WORTH}
        if not spare or not _pays(plan):
            return False
        self._limit(estimates, spare, 1.0)
        return True

    def _stay(self, lack: str) -> bool:
        """Exclude offloading to the hosts; return whether that makes a difference."""
        before, self._lack = self.problem, lack
        policies = tuple(policy for policy in self.problem.policies if policy not in OFFLOADING_POLICIES)
        self.problem = replace(self.problem, policies=policies, updates=("device",))
        return self.problem != before

    def hope(self) -> None:
        """Raise the memory limits slightly above the real ones."""
        self._set({device: limit * _HOPE for device, limit in self._limits.items()})

    def reconsider(self, expired: Callable[[], bool]) -> None:
        """Count faster plans that were refused for their estimate, fastest first, while time remains."""
        ranked = sorted(self._seen.values(), key=lambda one: rated_s(one.plan))
        plans = [one.plan for one in ranked if not one.refused and self._near(one)]
        if self.best is None and "host" in self.problem.updates:
            plans += [msgspec.structs.replace(plan, update="host") for plan in plans if plan.update != "host"]
        for plan in plans:
            if not self._better(plan) or (self.best is not None and expired()):
                return
            peaks, lack = self._exact(plan)
            if not lack and all(peaks[device] <= self._limits.get(device, math.inf) for device in plan.devices):
                assert self._last is not None
                self.best = self._last, with_peaks(plan, peaks)
                return

    def _near(self, candidate: PlanCandidate) -> bool:
        """Return whether the estimate of a plan is close enough to the limit to count it."""
        return all(short.missing_bytes <= (_NEAR - 1) * short.capacity_bytes for short in candidate.shortfalls)

    def refusal(self) -> PlanError:
        """Return the error with the memory that the last plan lacked."""
        if not self._over:
            return PlanError(f"no plan fits: {self._lack}; use more memory there, or more devices")
        worst = max(self._over, key=lambda device: self._over[device] - self._limits[device])
        missing = self._over[worst] - self._limits[worst]
        return PlanError(
            f"device {worst} would need {enough_text(self._over[worst])}, {enough_text(missing)} more than it has, in "
            "the best plan that was found; allow smaller micro-batches, or add a device",
            device=worst,
            missing_bytes=missing,
        )

    def _better(self, plan: Plan) -> bool:
        return self.best is None or rated_s(plan) < rated_s(self.best[1])

    def _limit(self, estimates: Mapping[int, int], peaks: Mapping[int, int], margin: float) -> None:
        """Set the memory limits of some devices to the estimates that correspond to their exact peaks."""
        now = self.problem.capacity_bytes
        limits = dict(now)
        for device, peak in peaks.items():
            meant = self._limits[device] * max(1, estimates[device]) / peak * margin
            limits[device] = int(min(meant, now[device] * margin) if margin < 1 else meant)
        self._set(limits)

    def _set(self, limits: Mapping[int, float]) -> None:
        devices = (
            replace(device, capacity_bytes=int(limits[device.number])) if device.number in limits else device
            for device in self.problem.devices
        )
        self.problem = replace(self.problem, devices=tuple(devices))


def _prediction(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted


def with_peaks(plan: Plan, peaks: Mapping[int, int]) -> Plan:
    """Return a plan with other predicted peaks."""
    predicted = msgspec.structs.replace(_prediction(plan), peak_bytes=tuple(peaks[device] for device in plan.devices))
    return msgspec.structs.replace(plan, predicted=predicted)


def _pays(plan: Plan) -> bool:
    """Return whether a plan trades time for memory."""
    return plan.update == "host" or any(stage.policy != "keep" for stage in plan.stages)
