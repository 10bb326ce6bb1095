"""Gate of lossy codecs: for the stages of a plan whose step they make clearly shorter. Pure.

In most set-ups compression does not pay: encoding takes longer than what it saves, or the sum would have been hidden
behind backward anyway (Agarwal, Wang, Venkataraman and Papailiopoulos, On the utility of gradient compression in
distributed training systems, 2022, arXiv:2103.00543: in 6 of 200 set-ups it did). So each choice is compared with exact
traffic by what the whole step takes, with the speed of encoding that was measured on the devices, as in Espresso
(Wang, Zeng, Xie, Shen and others, 2023, arXiv:2205.14465).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from onebox.plan.evaluate.predict import predict
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import layout_of
from onebox.plan.model.plan import Plan
from onebox.plan.model.problem import Problem
from onebox.plan_names import ActivationCodec, LossyPart

WORTH = 0.9
"""Most of a step's time that a lossy plan may take: it has to gain 10 %."""

_NEGLIGIBLE = 0.005
"""Part of a step by which a stage's codec has to shorten it."""

_SHOWN = 0.8
"""Part of a sum that may be hidden behind the backward of a step: the last bucket begins when it ends."""

_CODECS: tuple[ActivationCodec, ...] = ("bf16", "int8")
"""The codecs, the one that loses least first."""


def exposed_step_s(problem: Problem, plan: Plan) -> float:
    """Return the seconds of a step without what sums of a plan of one stage hide behind the last backward.

    The simulator begins a sum when the last backward of its stage ends. In a pipeline the backwards of other stages
    hide it then. In a plan of one stage workers begin to exchange full buckets before: up to that backward's time is
    hidden, except for encoding, which takes the device's own time.
    """
    predicted, _ = predict(problem, plan)
    if len(plan.stages) > 1 or len(plan.devices) < 2 or plan.split:
        return predicted.step_s
    problem = replace(problem, sharded=plan.optimizer == "sharded")
    work, sizes = CostModel(problem).work(layout_of(problem, plan), plan.micro_batches(problem.batch))
    (stage,) = work.stages
    sum_s = work.links.sum_seconds([(device,) for device in plan.devices], stage) - stage.coding_s
    backward_s = min(stage.input_s[device] + stage.weight_s[device] for device in plan.devices) * min(sizes)
    return predicted.step_s - _SHOWN * min(sum_s, backward_s)


def with_codecs(problem: Problem, plan: Plan, part: LossyPart) -> Plan:
    """Return a plan with lossy codecs for a part of the traffic in the stages where they pay, and its prediction; the
    same where none does.

    Every able stage first takes the codec, the same for all; those that gain nothing by it become exact again. The
    lossier codec has to gain as much again as the other one.

    Args:
        problem: The problem, with the devices' speeds of encoding.
        plan: A plan whose traffic of this part is exact.
        part: The part.
    """
    if plan.late or plan.sync == "client" or plan.split:
        return plan
    best, best_s = plan, exposed_step_s(problem, plan)
    for codec in _CODECS:
        stages = _able(problem, plan, codec, part)
        if not stages:
            continue
        found = _coded(plan, stages, codec, part)
        found_s = exposed_step_s(problem, found)
        for stage in list(stages):
            fewer = [number for number in stages if number != stage]
            without = _coded(plan, fewer, codec, part)
            without_s = exposed_step_s(problem, without)
            if without_s <= found_s * (1 + _NEGLIGIBLE):
                stages, found, found_s = fewer, without, without_s
        if stages and found_s <= WORTH * best_s:
            best, best_s = found, found_s
    return best if best is plan else msgspec.structs.replace(best, predicted=predict(problem, best)[0])


def best_of(problem: Problem, plans: Iterable[Plan], parts: Sequence[LossyPart] = ("gradients",)) -> Plan:
    """Return the first of some exact plans, or a lossy one that is clearly faster.

    Args:
        problem: The problem, with the devices' speeds of encoding.
        plans: The plans: the best exact one first, then others that may be better with lossy traffic.
        parts: The parts of the traffic that may be compressed; each has to gain enough by itself.
    """
    first, *others = plans
    best, best_s = first, exposed_step_s(problem, first)
    limit_s = WORTH * best_s
    for plan in (first, *others):
        found = plan
        for part in parts:
            found = with_codecs(problem, found, part)
        if not found.lossy:
            continue
        found_s = exposed_step_s(problem, found)
        if found_s <= limit_s and (found_s < best_s or not best.lossy):
            best, best_s = found, found_s
    return best


def _able(problem: Problem, plan: Plan, codec: ActivationCodec, part: LossyPart) -> list[int]:
    """Return the stages that send something between devices on which the codec has been measured."""
    if part == "activations" and any(stage.policy in ("offload", "swap") for stage in plan.stages):
        return []
    measured = {device.number for device in problem.devices if device.coding_bps.get(codec)}
    found = []
    for number, stage in enumerate(plan.stages):
        own = {device for replica in stage.replicas for device in replica}
        apart = len(own) > 1 if part == "gradients" else bool(set(plan.devices) - own)
        if apart and own <= measured and (part == "gradients" or measured.issuperset(plan.devices)):
            found.append(number)
    return found


def _coded(plan: Plan, stages: Sequence[int], codec: ActivationCodec, part: LossyPart) -> Plan:
    """Return a plan with a codec for a part of the traffic of some stages, and without for that of the others."""
    return msgspec.structs.replace(
        plan,
        stages=tuple(
            msgspec.structs.replace(stage, **{part: codec if number in stages else "none"})
            for number, stage in enumerate(plan.stages)
        ),
    )
