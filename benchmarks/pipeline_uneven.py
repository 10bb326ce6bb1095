"""The part of ``pipeline.py`` with devices of unequal speeds and a slow link; all emulated."""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack

import msgspec
from common import show, spread
from pipeline_models import Case, Linears
from pipeline_sides import Ours, Run, at_weights, in_turn, ratios, segments_of

import onebox
from onebox.plan import Links, Plan
from onebox.plan.evaluate.predict import predict
from onebox.plan.model.problem import ComputeTime, DeviceSpec, Problem, Segment, SegmentValue
from onebox.plan.search.baselines import even_plan
from onebox.plan.search.search import search
from onebox.pool.network.emulated import Link

SPEEDS = (1.0, 1.0, 0.5, 0.25)
SLOW = (1, 2)
"""The devices at the ends of the slow link."""

SLOW_LINK = Link(latency_s=0.5e-3, bandwidth_bps=12.5e6)
"""Fast Ethernet."""

NEAR_S, CALL_S = 0.05e-3, 0.05e-3
"""Seconds of a message between two processes of this machine, which takes 0.03 ms (``growth.py``), and of an action
beside its work, ahead of which hosts of emulated devices run; as the planner takes them to be."""

SAMPLE_S = 0.5e-3
"""Seconds of each of forward, input gradient and weight gradient of a layer for a sample, at speed 1."""

MODEL = Linears(parts=16, count=16, micro_batch=2, tokens=128, width=256)
SIZES = (1, 2, 4)
"""Samples of a micro-batch that planner and even cuts may choose from."""


def compare_uneven(rounds: int) -> dict[str, float]:
    """Compare the planner's plan with even cuts."""
    case = MODEL.case()
    problem = problem_of(case)
    found = search(problem)
    plans = {
        "gpipe, even cuts": even(problem, "gpipe"),
        "1f1b, even cuts": even(problem, "1f1b"),
        "planner": found.plan,
    }
    seconds = measure(case, problem, plans, rounds)
    bound = problem.batch * work_s(problem, range(len(problem.segments)), 1) / sum(SPEEDS)
    rows, result = [], {}
    for name, plan in plans.items():
        assert plan.predicted is not None
        times = seconds[name]
        gain = ratios(times, seconds["planner"])
        rows.append(
            [
                name,
                describe(plan),
                spread([1e3 * one for one in times], 0),
                f"{1e3 * plan.predicted.step_s:.0f}",
                spread(gain) if name != "planner" else "-",
                f"{statistics.median(times) / bound:.2f}",
            ]
        )
        if name != "planner":
            result[f"uneven_vs_{name.split(',')[0]}"] = round(statistics.median(gain), 4)
            result[f"uneven_bound_vs_{name.split(',')[0]}"] = round(statistics.median(times) / bound, 4)
    sent = 4 * MODEL.tokens * MODEL.width
    show(
        f"EMULATED devices of speeds {', '.join(map(str, SPEEDS))}; {MODEL.parts} equal layers of "
        f"{1e3 * SAMPLE_S:.1f} ms each for forward, input and weight gradient of a sample; batch {case.batch}; "
        f"{sent / 1e3:.0f} kB a sample between layers; link {SLOW[0]}-{SLOW[1]} has "
        f"{SLOW_LINK.bandwidth_bps * 8 / 1e6:.0f} Mbit/s, the others are as quick as memory. "
        "Bound: the work over the sum of speeds, what no plan can beat",
        ["plan", "stages", "step, ms", "predicted", "planner's gain", "step / bound"],
        rows,
    )
    return result


def describe(plan: Plan) -> str:
    """Return the stages of a plan: devices, and how many layers each has."""
    stages = (
        f"{'+'.join(str(replica[0]) for replica in stage.replicas)}: {len(stage.segments) or 'all'}"
        for stage in plan.stages
    )
    return f"{'; '.join(stages)}; {plan.schedule}, micro-batches of {plan.micro_batch}"


def even(problem: Problem, schedule: str) -> Plan:
    """Return the best of the plans with even cuts, over the sizes of a micro-batch."""
    devices = [device.number for device in problem.devices]
    plans = []
    for size in problem.micro_batches:
        plan = even_plan(problem, devices, schedule, size)
        plans.append(msgspec.structs.replace(plan, predicted=predict(problem, plan)[0]))
    return min(plans, key=lambda plan: plan.predicted.step_s if plan.predicted else math.inf)


def problem_of(case: Case) -> Problem:
    """Return what the planner is told: the names and bytes of the real model, and the times that are emulated."""
    names = segments_of(case)
    numbers = range(len(SPEEDS))
    slow = {SLOW, SLOW[::-1]}
    links = Links(
        latency_s={a: {b: SLOW_LINK.latency_s if (a, b) in slow else NEAR_S for b in numbers} for a in numbers},
        bandwidth_bps={
            a: {b: SLOW_LINK.bandwidth_bps if (a, b) in slow else math.inf for b in numbers} for a in numbers
        },
    )
    size = 4 * MODEL.tokens * MODEL.width
    embedding, *layers = names
    return Problem(
        segments=(segment(embedding, 0.0), *(segment(name, SAMPLE_S) for name in layers)),
        devices=tuple(DeviceSpec(number=n, type="sim", speed=speed) for n, speed in zip(numbers, SPEEDS, strict=True)),
        links=links,
        batch=case.batch,
        micro_batches=SIZES,
        values=tuple(
            SegmentValue(source=index, consumers=(index + 1,), forward_bytes=size, backward_bytes=size)
            for index in range(len(layers))
        ),
        call_s=CALL_S,
    )


def segment(name: str, sample_s: float) -> Segment:
    """Return a layer that takes so long for a sample, three times."""
    time = {"sim": ComputeTime(sample_s=sample_s)}
    size = 4 * MODEL.width * (MODEL.width + 1)
    return Segment(
        name=name, forward_s=time, input_s=time, weight_s=time, update_s={}, parameter_bytes=size, state_bytes=3 * size
    )


def work_s(problem: Problem, segments: range, samples: int) -> float:
    """Return the seconds of forward and both gradients of some segments at speed 1."""
    times = (problem.segments[index] for index in segments)
    return sum(part["sim"].at(samples) for one in times for part in (one.forward_s, one.input_s, one.weight_s))


def at_full_speed(problem: Problem, plan: Plan) -> Plan:
    """Return a plan that says what its stages take at speed 1: an emulated device divides by its speed itself."""
    assert plan.predicted is not None
    samples = plan.micro_batch or max(part.size for part in plan.micro_batches(problem.batch))
    stages_s = []
    for stage in plan.stages:
        segments = [problem.segments[problem.index[name]] for name in stage.segments] or list(problem.segments)
        stages_s.append(
            (
                sum(one.forward_s["sim"].at(samples) for one in segments),
                sum(one.input_s["sim"].at(samples) for one in segments),
                sum(one.weight_s["sim"].at(samples) for one in segments),
            )
        )
    return msgspec.structs.replace(
        plan, predicted=msgspec.structs.replace(plan.predicted, stages_s=tuple(at_weights(stages_s)), replicas_s=())
    )


def work_of(plan: Plan, batch: int) -> dict[int, float]:
    """Return the seconds that each device works in a step of a plan that says what stages take at speed 1."""
    assert plan.predicted is not None
    full = plan.micro_batch or max(part.size for part in plan.micro_batches(batch))
    found = dict.fromkeys(plan.devices, 0.0)
    for route, times in zip(plan.routes(batch), plan.predicted.stages_s, strict=True):
        for replica, part in zip(route, plan.micro_batches(batch), strict=True):
            found[replica[0]] += sum(times) * part.size / full / SPEEDS[replica[0]]
    return found


def measure(case: Case, problem: Problem, plans: dict[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Return seconds of a step of each plan in each round."""
    spec = ",".join(f"sim@{speed}" for speed in SPEEDS)
    sides: dict[str, Run] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(onebox.open(spec, links={SLOW: SLOW_LINK}))
        for name, found in plans.items():
            plan = at_full_speed(problem, found)
            ours = Ours(case, pool, plan, stack)
            ours.run(1)
            ours.require_work(work_of(plan, case.batch))
            sides[name] = ours.run
        return in_turn(sides, rounds, steps=3, most_s=15.0)
