"""Application of activation policies: stages cut into spans that fit a device's memory; and baseline policies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isqrt

from onebox.plan.evaluate.evaluator import Evaluator, LayoutEvaluation
from onebox.plan.model.cost_model import CostModel
from onebox.plan.model.layout import LayoutStage, StageLayout, single
from onebox.plan.model.problem import DeviceSpec, Problem
from onebox.plan.policies.policy_costs import ChainCosts, ChainLink, PolicySpan
from onebox.plan.policies.solver import choose_policies, least_budget
from onebox.plan.schedules.named import warm_up
from onebox.plan.simulate.instance import instance_of
from onebox.plan_names import ChainPolicy, UpdateAt

_MOST_LINKS = 64
"""Maximum number of links of a chain; longer ones are joined at the smallest boundaries."""

_FEW = 24
"""Number of segments up to which any number of the first ones may be on the CPU; above it, eighths."""

_TRIES = 4
"""Maximum number of retries with less memory, when a stage takes more than its links say one by one."""


@dataclass(frozen=True, kw_only=True)
class StageChain:
    """A stage as a chain.

    Args:
        costs: Costs of its links.
        links: The segments of each link.
        part: The stage.
        processor: The device that computes ``cpu`` spans; ``None`` if there is none.
    """

    costs: ChainCosts
    links: tuple[tuple[int, ...], ...]
    part: LayoutStage
    processor: int | None

    def parts(self, spans: Sequence[PolicySpan]) -> list[LayoutStage]:
        """Return spans as stages."""
        found = []
        for start, end, policy in spans:
            segments = tuple(index for link in self.links[start:end] for index in link)
            if policy == "cpu":
                assert self.processor is not None
                found.append(single(segments, self.processor))
            else:
                found.append(self.part._replace(segments=segments, policy=policy))
        return found


def processor_of(problem: Problem, device: int) -> int | None:
    """Return the processor beside a device of the same host, or ``None``.

    For a device that is itself a share of the processor, but with a memory limit, it is a share with more memory.
    """
    own = problem.device[device]

    def room(spec: DeviceSpec) -> float:
        return inf if spec.capacity_bytes is None else spec.capacity_bytes

    beside = [other for other in problem.devices if other.processor and other.host == own.host]
    if own.processor:
        beside = [other for other in beside if room(other) > room(own)]
    return max(beside, key=room).number if beside else None


def chain_of(costs: CostModel, part: LayoutStage, samples: int, in_flight: int = 1) -> StageChain:
    """Return a stage as a chain.

    Args:
        costs: Costs of the segments.
        part: The stage, on one device or on replicas, represented by the first.
        samples: Samples of a micro-batch.
        in_flight: Micro-batches that the device holds at once.
    """
    problem, links = costs.problem, _links(costs, part)
    device = problem.device[part.devices[0]]
    processor = processor_of(problem, device.number) if len(part.devices) == 1 else None
    crossing, into = _crossing(problem, links)
    found = []
    for place, segments in enumerate(links):
        own, sizes = costs.seconds(segments), costs.sizes(segments)
        times = [(fixed + each * samples) / device.speed for fixed, each in own[device.type][:3]]
        on_cpu: list[float] | None = None
        if processor is not None:
            other = problem.device[processor]
            on_cpu = [(fixed + each * samples) / other.speed for fixed, each in own[other.type][:3]]
        found.append(
            ChainLink(
                forward_s=times[0],
                backward_s=times[1] + times[2],
                saved_bytes=sizes.saved * samples,
                boundary_bytes=crossing[place] * samples,
                forward_work_bytes=sizes.forward_work * samples,
                backward_work_bytes=sizes.backward_work * samples,
                cpu_forward_s=on_cpu[0] if on_cpu else None,
                cpu_backward_s=on_cpu[1] + on_cpu[2] if on_cpu else 0.0,
                spared=place + 1 < len(links) and costs.spared(segments[-1], links[place + 1]),
            )
        )
    cpu_bps = problem.links.bandwidth_bps[device.number][processor] if processor is not None else float("inf")
    chain = ChainCosts(
        links=tuple(found),
        host_bps=device.host_bps,
        in_flight=in_flight,
        call_s=2 * problem.call_s,
        input_bytes=into * samples,
        cpu_bps=cpu_bps,
    )
    return StageChain(costs=chain, links=links, part=part, processor=processor)


def _links(costs: CostModel, part: LayoutStage) -> tuple[tuple[int, ...], ...]:
    """Join the segments of a stage into at most the maximum number of links, those that save least first."""
    links: list[tuple[int, ...]] = [(index,) for index in part.segments]
    while len(links) > _MOST_LINKS:
        sizes = [costs.sizes(one).saved for one in links]
        place = min(range(len(links) - 1), key=lambda place: sizes[place] + sizes[place + 1])
        links[place : place + 2] = [links[place] + links[place + 1]]
    return tuple(links)


def _crossing(problem: Problem, links: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """Return the bytes per sample of values that cross the end of each link, and of those from elsewhere."""
    where = {index: place for place, link in enumerate(links) for index in link}
    forward, into = [0] * len(links), 0
    for value in problem.values:
        ends = [where[consumer] for consumer in value.consumers if consumer in where]
        if not ends:
            continue
        if value.source not in where:
            into += value.forward_bytes
            continue
        for place in range(where[value.source], max(ends)):
            forward[place] += value.forward_bytes
    return forward, into


def apply_policies(evaluator: Evaluator, base: StageLayout, update: UpdateAt) -> LayoutEvaluation | None:
    """Return the evaluation of a layout with the activation policies that make it fit, or ``None``.

    Args:
        evaluator: Evaluates it.
        base: A layout without policies, of one stage a device.
        update: Place of the optimizer's state.
    """
    if base.micro_batch is None or _several(base):
        return None
    base = base._replace(update=None if update == evaluator.problem.updates[0] else update)
    chains = _chains(evaluator, base)
    less = dict.fromkeys(evaluator.problem.device, 0)
    found: LayoutEvaluation | None = None
    for _ in range(_TRIES):
        layout = _fitted(evaluator, base, chains, less)
        if layout is None:
            break
        evaluation = evaluator.evaluate(layout)
        if found is None or evaluation.rank < found.rank:
            found = evaluation
        if not evaluation.over_bytes:
            break
        for device, missing in evaluation.simulation.over_bytes.items():
            less[device] += missing
    return found


def least_memory_layout(evaluator: Evaluator, device: int, samples: int) -> LayoutEvaluation:
    """Evaluate the whole model on a device under the activation policies with about the least memory.

    Args:
        evaluator: Evaluates it.
        device: The device.
        samples: Samples of a micro-batch.
    """
    problem = evaluator.problem
    chain = chain_of(evaluator.costs, single(tuple(range(len(problem.segments))), device), samples)
    policies = tuple(policy for policy in problem.policies if policy != "cpu" or chain.processor is not None)
    spans = choose_policies(chain.costs, least_budget(chain.costs, policies), policies)
    update: UpdateAt | None = "host" if "host" in problem.updates and problem.updates[0] != "host" else None
    parts = chain.parts(spans) if spans is not None else [chain.part]
    found = evaluator.evaluate(StageLayout(tuple(parts), samples, "1f1b", update))
    if "swap" in problem.policies and len(chain.links) > 1:
        swapped = StageLayout(tuple(chain.parts(_even(chain, 1, "swap"))), samples, "1f1b", update)
        found = min(found, evaluator.evaluate(swapped), key=lambda evaluation: evaluation.rank)
    return found


def _several(layout: StageLayout) -> bool:
    """Return whether a device has several stages."""
    devices = [device for part in layout.parts for device in part.devices]
    return len(set(devices)) < len(devices)


def _chains(evaluator: Evaluator, layout: StageLayout) -> list[StageChain]:
    case = evaluator.case(layout)
    assert layout.micro_batch is not None
    in_flight = [1] * len(layout.parts)
    if len(layout.parts) > 1:
        instance = instance_of(case.routes, case.work, case.sizes)
        limits, turns_of = warm_up(instance), Counter(instance.slot_of)
        for number, (slot, limit) in enumerate(zip(instance.slots, limits, strict=True)):
            turns = turns_of[number]
            most = turns if layout.schedule == "gpipe" else min(limit, turns)
            in_flight[slot.stage] = max(in_flight[slot.stage], most)
    return [
        chain_of(evaluator.costs, part, layout.micro_batch, count)
        for part, count in zip(layout.parts, in_flight, strict=True)
    ]


def _fitted(
    evaluator: Evaluator, base: StageLayout, chains: Sequence[StageChain], less: dict[int, int]
) -> StageLayout | None:
    """Return a layout whose stages are cut into spans, each within the device's remaining memory."""
    problem, case = evaluator.problem, evaluator.case(base)
    parts: list[LayoutStage] = []
    for chain, work in zip(chains, case.work.stages, strict=True):
        caps = [problem.capacity_bytes[d] - less[d] for d in chain.part.devices if d in problem.capacity_bytes]
        if not caps:
            parts.append(chain.part)
            continue
        allowed = tuple(policy for policy in problem.policies if policy != "cpu" or chain.processor is not None)
        room = min(caps) - work.state_bytes
        spans = choose_policies(chain.costs, room, allowed)
        if spans is None and (base.update or problem.updates[0]) == "host" and "swap" in allowed:
            # Gradients of swapped stages are not on the device; the others' are missing here, and appear in the
            # evaluation.
            away = evaluator.costs.streamed_bytes(chain.part._replace(policy="swap"), on_host=True)
            spans = choose_policies(chain.costs, room + away, ("keep", "swap"))
        if spans is None:
            return None
        parts += chain.parts(spans)
    return base._replace(parts=tuple(parts))


BaselinePolicy = Callable[[StageChain], list[PolicySpan]]


def baseline_policies(problem: Problem, device: int) -> Iterator[tuple[str, BaselinePolicy]]:
    """Yield the baseline policies for the whole model on one device, each with its name.

    They are: each segment recomputed; segments recomputed in spans of the root of their number, which takes least
    memory where all are alike (Chen et al. 2016, arXiv:1604.06174); everything offloaded, or swapped; and, where there
    is a processor beside the device, the first one to seven eighths of the segments on it.
    """
    if "recompute" in problem.policies:
        yield "recompute all, each segment", lambda chain: _even(chain, 1, "recompute")
        yield "recompute all, in spans of the root", lambda chain: _even(chain, _root(chain), "recompute")
    if "offload" in problem.policies:
        yield "offload all", lambda chain: _even(chain, 1, "offload")
    if "swap" in problem.policies:
        yield "swap all", lambda chain: _even(chain, 1, "swap")
    if "cpu" in problem.policies and processor_of(problem, device) is not None:
        count = len(problem.segments)
        counts = range(1, count) if count <= _FEW else sorted({count * turn // 8 for turn in range(1, 8)})
        for first in counts:
            yield "the first segments on the CPU", _first_on_cpu(first)


def _root(chain: StageChain) -> int:
    return max(1, isqrt(len(chain.links)))


def _even(chain: StageChain, length: int, policy: ChainPolicy) -> list[PolicySpan]:
    """Return even spans of one policy; the last one, whose backward follows its forward at once, is kept."""
    count = len(chain.links)
    starts = list(range(0, count, length))
    return [
        PolicySpan(start, min(start + length, count), policy if start != starts[-1] else "keep") for start in starts
    ]


def _first_on_cpu(first: int) -> BaselinePolicy:
    def spans(chain: StageChain) -> list[PolicySpan]:
        until = min(first, len(chain.links) - 1)
        return [PolicySpan(0, until, "cpu"), PolicySpan(until, len(chain.links), "keep")]

    return spans


def baseline_layouts(evaluator: Evaluator, device: int, samples: int) -> Iterator[tuple[str, StageLayout]]:
    """Yield the layouts of :func:`baseline_policies` on a device."""
    every = single(tuple(range(len(evaluator.problem.segments))), device)
    chain = chain_of(evaluator.costs, every, samples)
    if len(chain.links) == 1:
        return
    for name, policy in baseline_policies(evaluator.problem, device):
        yield name, StageLayout(tuple(chain.parts(policy(chain))), samples, "1f1b")
