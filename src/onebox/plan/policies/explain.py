"""Explanation of each stage's activation policy: the memory saved, its cost, and that of the alternatives. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import layout_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan.model.stage import ActivationPolicy
from onebox.plan.policies.apply import processor_of
from onebox.sizes import size_text


@dataclass(frozen=True, kw_only=True)
class PolicyReason:
    """The effects of a stage's activation policy, on the first of its replicas.

    Args:
        stage: Its number.
        device: The device.
        policy: Its activation policy; ``cpu`` is a stage on a processor between stages of another device.
        segments: Number of segments.
        activation_bytes: Activations saved for a backward, for one micro-batch.
        saved_bytes: Of these, those not on the device between forward and backward.
        paid_s: Seconds that this adds to a step.
        again_s: Seconds that recomputation adds, or would add, to a step.
        wait_s: Seconds that a step waits, or would wait, for copies to the host and back that are not hidden.
        text: A short description.
    """

    stage: int
    device: int
    policy: ActivationPolicy | Literal["cpu"]
    segments: int
    activation_bytes: int
    saved_bytes: int
    paid_s: float
    again_s: float
    wait_s: float
    text: str


def explain_policies(problem: Problem, plan: Plan) -> tuple[PolicyReason, ...]:
    """Return the explanation of each stage's activation policy.

    Args:
        problem: The problem that the plan was made for.
        plan: The plan.

    Raises:
        UsageError: The plan does not match the problem.
    """
    known = _Reasons(problem, plan)
    return tuple(known.of(stage) for stage in range(len(plan.stages)))


class _Reasons:
    """Costs of a plan's stages under the alternative policies.

    Args:
        problem: The problem that the plan was made for.
        plan: The plan.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._problem, self._layout = problem, layout_of(problem, plan)
        self._costs = CostModel(problem)
        parts = plan.micro_batches(problem.batch)
        self._samples = max(part.size for part in parts)
        self._work, _ = self._costs.work(self._layout, parts)
        routes = plan.routes(problem.batch)
        self._turns = [
            sum(part.size for part, route in zip(parts, row, strict=True) if device in route) / self._samples
            for row, device in zip(routes, (part.devices[0] for part in self._layout.parts), strict=True)
        ]

    def of(self, stage: int) -> PolicyReason:
        """Return the explanation of a stage's activation policy."""
        part, work, turns = self._layout.parts[stage], self._work.stages[stage], self._turns[stage]
        device = part.devices[0]
        made = self._costs.sizes(part.segments).saved * self._samples
        policy: ActivationPolicy | Literal["cpu"] = part.policy if self._beside(stage) is None else "cpu"
        offloaded = work.offloaded_bytes
        saved = {
            "recompute": max(0, made - work.saved_bytes), "offload": offloaded, "swap": offloaded,
            "keep": 0, "cpu": made,
        }[policy]  # fmt: skip
        again, wait = work.forward_s[device] * turns, self._wait_s(stage, made, hidden=policy != "swap") * turns
        paid = {
            "recompute": again, "offload": wait, "swap": wait, "keep": 0.0, "cpu": self._slower_s(stage) * turns,
        }[policy]  # fmt: skip
        return PolicyReason(
            stage=stage,
            device=device,
            policy=policy,
            segments=len(part.segments),
            activation_bytes=made,
            saved_bytes=saved,
            paid_s=paid,
            again_s=again,
            wait_s=wait,
            text=_text(policy, saved=saved, made=made, again_s=again, wait_s=wait, paid_s=paid),
        )

    def _beside(self, stage: int) -> int | None:
        """Return the device for which a processor beside it computes a stage, or ``None``."""
        own = self._layout.parts[stage].devices[0]
        for part in self._layout.parts:
            if processor_of(self._problem, part.devices[0]) == own:
                return part.devices[0]
        return None

    def _slower_s(self, stage: int) -> float:
        """Return the extra seconds of a stage on a processor over the device beside it; 0 without such a device."""
        beside = self._beside(stage)
        if beside is None:
            return 0.0
        part, other = self._layout.parts[stage], self._problem.device[beside]
        found = self._costs.seconds(part.segments)[other.type][:3]
        there = sum(fixed + each * self._samples for fixed, each in found) / other.speed
        work, own = self._work.stages[stage], part.devices[0]
        return work.forward_s[own] + work.input_s[own] + work.weight_s[own] - there

    def _wait_s(self, stage: int, size_bytes: int, *, hidden: bool) -> float:
        """Return the seconds of copies to the host and back that the device's next and last actions do not hide.

        Args:
            stage: The stage.
            size_bytes: Bytes of each copy.
            hidden: Whether copies may be hidden at all.
        """
        device = self._layout.parts[stage].devices[0]
        transfer = size_bytes / self._problem.device[device].host_bps
        later = [n for n in range(stage + 1, len(self._layout.parts)) if device in self._layout.parts[n].devices]
        if not later or not hidden:
            return 2 * transfer
        work = self._work.stages[later[0]]
        back = work.input_s[device] + work.weight_s[device]
        return max(0.0, transfer - work.forward_s[device]) + max(0.0, transfer - back)


def _text(policy: str, *, saved: int, made: int, again_s: float, wait_s: float, paid_s: float) -> str:
    """Describe the reason in a few words."""
    again, copy = f"{_time(again_s)} to make again", f"the copies would wait {_time(wait_s)}"
    if policy == "recompute":
        return f"{again}, {size_text(saved)} less; {copy}"
    if policy in ("offload", "swap"):
        hidden = f"the copies wait {_time(wait_s)}" if wait_s > 0 else "the copies hide under other work"
        return f"{hidden}, {size_text(saved)} less; it would take {again}"
    if policy == "cpu":
        slower = "longer" if paid_s >= 0 else "less"
        return f"{_time(abs(paid_s))} {slower} on the processor, {size_text(saved)} less on the device"
    return f"there is room for its {size_text(made)}" if made else "it makes nothing that backward needs"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
