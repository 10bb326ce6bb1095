"""Infeasibility: the memory that a layout's devices lack, and remedies. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from onebox.errors import PlanError
from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.model.problem import Problem
from onebox.plan.model.stage import POLICY_WORDS
from onebox.sizes import enough_text, size_text


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A device that lacks memory.

    Args:
        stage: The stage with most of the device's bytes.
        device: The device.
        missing_bytes: Missing memory.
        capacity_bytes: Memory of the device.
    """

    stage: int
    device: int
    missing_bytes: int
    capacity_bytes: int

    def __str__(self) -> str:
        return f"stage {self.stage} misses device {self.device} by {enough_text(self.missing_bytes)}"


def shortfalls(problem: Problem, evaluation: LayoutEvaluation) -> tuple[Shortfall, ...]:
    """Return the missing memory of each device, most first.

    Args:
        problem: The planning problem.
        evaluation: An evaluated layout.
    """
    found = []
    stages = evaluation.case.work.stages
    for device, missing in evaluation.simulation.over_bytes.items():
        held = [stage for stage, part in enumerate(evaluation.layout.parts) if device in part.devices]
        largest = max(held, key=lambda stage: stages[stage].state_bytes + stages[stage].saved_bytes)
        found.append(
            Shortfall(
                stage=largest,
                device=device,
                missing_bytes=missing,
                capacity_bytes=problem.capacity_bytes[device],
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.missing_bytes, one.device)))


def infeasible_error(evaluator: Evaluator) -> PlanError:
    """Return the error that no plan fits, with the closest one and remedies."""
    problem = evaluator.problem
    allowed = [evaluation for evaluation in evaluator.evaluations.values() if evaluator.allows(evaluation.layout)]
    closest = min(allowed or evaluator.evaluations.values(), key=lambda evaluation: evaluation.rank)
    short = shortfalls(problem, closest)
    worst = short[0]
    count = len(closest.layout.parts)
    enough = ", ".join(f"{enough_text(one.capacity_bytes + one.missing_bytes)} on device {one.device}" for one in short)
    samples = closest.layout.micro_batch or max(part.size for part in closest.case.micro_batches)
    message = (
        f"no plan fits the memory of the devices: of {evaluator.simulated} that were tried, the closest has {count} "
        f"stage{'s' * (count > 1)}{_ranks(closest)}{_policies(closest)} and micro-batches of {samples}, "
        f"and {'; '.join(map(str, short))}. "
        f"What would help: {enough}{_smaller(problem, closest)}; or more devices{_total(problem)}"
    )
    return PlanError(message, stage=worst.stage, device=worst.device, missing_bytes=worst.missing_bytes)


def _ranks(evaluation: LayoutEvaluation) -> str:
    """Describe the number of devices over which a layout splits layers, at most."""
    ranks = max(part.ranks for part in evaluation.layout.parts)
    return f", split over {ranks} devices," if ranks > 1 else ""


def _policies(evaluation: LayoutEvaluation) -> str:
    """Describe how many stages of a layout are recomputed, offloaded and swapped."""
    policies = [part.policy for part in evaluation.layout.parts]
    found = [f"{policies.count(policy)} of them {name}" for policy, name in POLICY_WORDS.items() if policy in policies]
    return f", {' and '.join(found)}," if found else ""


def _smaller(problem: Problem, evaluation: LayoutEvaluation) -> str:
    """Describe the size of a micro-batch that would fit; empty where the state alone is too large."""
    size = evaluation.layout.micro_batch
    if size is None or size == 1:
        return ""
    fitting = size
    for device, peak in evaluation.simulation.peak_bytes.items():
        capacity = problem.capacity_bytes.get(device)
        if capacity is None:
            continue
        held = zip(evaluation.layout.parts, evaluation.case.work.stages, strict=True)
        state = sum(stage.state_bytes for part, stage in held if device in part.devices)
        if capacity < state:
            return ""
        if peak > capacity:
            fitting = min(fitting, size * (capacity - state) // (peak - state))
    return f"; or micro-batches of {fitting}" if 1 <= fitting < size else ""


def _total(problem: Problem) -> str:
    """Describe the state of the whole model relative to all memory."""
    state = sum(segment.state_bytes for segment in problem.segments) + sum(tie.state_bytes for tie in problem.ties)
    if len(problem.capacity_bytes) < len(problem.devices):
        return ""
    room = sum(problem.capacity_bytes.values())
    return f" (parameters, gradients and optimizer state take {enough_text(state)}, all devices have {size_text(room)})"
