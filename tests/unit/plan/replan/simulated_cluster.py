"""A simulated cluster for tests of the run-time scheduler: what it measures, and what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from onebox.plan import (
    CarriedBytes,
    Links,
    LinkTime,
    Plan,
    Problem,
    ReplanController,
    ReplanDecision,
    ReplanOptions,
    StepMeasurement,
    TaskTime,
    TimedTask,
    predict,
    stage_work,
)

Noise = Callable[[], float]


@dataclass(frozen=True)
class State:
    """What devices and links truly do.

    Args:
        slow: By what factor devices take longer than the problem says.
        links: Likewise for links, both ways.
        hidden: Seconds that a step takes longer under some plans, which no measurement tells.
    """

    slow: dict[int, float] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    hidden: Callable[[Plan], float] = lambda _: 0.0


def truth(problem: Problem, state: State) -> Problem:
    """Return the problem that a state amounts to."""
    devices = tuple(replace(one, speed=one.speed / state.slow.get(one.number, 1.0)) for one in problem.devices)
    latency = {a: dict(row) for a, row in problem.links.latency_s.items()}
    bandwidth = {a: dict(row) for a, row in problem.links.bandwidth_bps.items()}
    for (a, b), factor in state.links.items():
        for one, other in ((a, b), (b, a)):
            bandwidth[one][other] /= factor
    return replace(problem, devices=devices, links=Links(latency_s=latency, bandwidth_bps=bandwidth))


def step_s(problem: Problem, plan: Plan) -> float:
    """Return what a step takes."""
    return predict(problem, plan)[0].step_s


def measured(problem: Problem, state: State, plan: Plan) -> StepMeasurement:
    """Return what is measured of a step without noise."""
    true = truth(problem, state)
    work, routes = stage_work(true, plan), plan.routes(true.batch)
    actions = {}
    for number, (stage, row) in enumerate(zip(work.stages, routes, strict=True)):
        for device in {replica[0] for replica in row}:
            turns = [index for index, replica in enumerate(row) if replica[0] == device]
            both = stage.input_s[device] + stage.weight_s[device]
            actions[TimedTask(device, number, "F")] = TaskTime(stage.forward_s[device], len(turns))
            actions[TimedTask(device, number, "B")] = TaskTime(both, len(turns))
    links: dict[tuple[int, int], LinkTime] = {}
    for edge in work.edges:
        for (a, *_), (b, *_) in zip(routes[edge.source], routes[edge.target], strict=True):
            for source, target, size in ((a, b, edge.forward_bytes), (b, a, edge.backward_bytes)):
                if source != target:
                    before = links.get((source, target), LinkTime(0, 0.0, 0))
                    took = true.links.seconds(source, target, size)
                    links[source, target] = LinkTime(before[0] + size, before[1] + took, before[2] + 1)
    sent = set(links)
    for stage, row in zip(work.stages, routes, strict=True):  # gradients are summed in a ring of the replicas
        ring = sorted({replica[0] for replica in row})
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True) if len(ring) > 1 else ():
            before = links.get((a, b), LinkTime(0, 0.0, 0))
            size = 2 * stage.gradient_bytes * (len(ring) - 1) // len(ring)
            links[a, b] = LinkTime(before[0] + size, before[1] + true.links.seconds(a, b, size), before[2] + 1)
    hosts = {device.number: device.host for device in problem.devices}
    apart = {pair for pair in links if hosts[pair[0]] != hosts[pair[1]]}
    carried = {
        (a, b): CarriedBytes(links[a, b].size_bytes, links[a, b].size_bytes / true.links.bandwidth_bps[a][b])
        for a, b in apart
        if links[a, b].size_bytes
    }
    updates = {device: sum(s.update_s.get(device, 0.0) for s in work.stages) for device in plan.devices}
    return StepMeasurement(
        step=0,
        step_s=step_s(true, plan) + state.hidden(plan),
        actions=actions,
        links={pair: found for pair, found in links.items() if pair not in apart and pair in sent},
        update_s=updates,
        carried=carried,
    )


APART = 0.2
"""By this part the quickest and the slowest action of a step differ from their mean."""


def noisy(seen: StepMeasurement, step: int, noise: Noise) -> StepMeasurement:
    """Return a step's measurements with noise on each; a step sums up much, so its own is a quarter."""
    actions, links = {}, {}
    for task, took in seen.actions.items():
        mean_s = took.mean_s * noise()
        actions[task] = TaskTime(mean_s, took.actions, mean_s * (1 - APART), mean_s * (1 + APART))
    for link, carried in seen.links.items():
        seconds = carried.seconds * noise()
        each_s = seconds / carried.messages
        links[link] = carried._replace(seconds=seconds, least_s=each_s * (1 - APART), most_s=each_s * (1 + APART))
    return StepMeasurement(
        step=step,
        step_s=seen.step_s * (1 + (noise() - 1) / 4),
        actions=actions,
        links=links,
        update_s={device: seconds * noise() for device, seconds in seen.update_s.items()},
        carried={pair: CarriedBytes(size, seconds * noise()) for pair, (size, seconds) in seen.carried.items()},
    )


@dataclass
class Run:
    """What became of a run.

    Args:
        plans: The plan of each step.
        steps_s: What each step took.
        decisions: What was decided.
        follower: Who decided.
    """

    plans: list[Plan]
    steps_s: list[float]
    decisions: list[ReplanDecision]
    follower: ReplanController

    @property
    def lines(self) -> list[str]:
        """What a person is told."""
        return [one.line for one in (*self.decisions, *self.follower.outcomes)]


def follow(
    problem: Problem,
    plan: Plan,
    steps: int,
    state: Callable[[int], State],
    *,
    noise: Noise = lambda: 1.0,
    options: ReplanOptions | None = None,
    late: int = 1,
) -> Run:
    """Run steps with the scheduler in the loop.

    Args:
        problem: What the plan was made for.
        plan: The first plan.
        steps: How many.
        state: What devices and links truly do in each step; the same object where they do the same.
        noise: Factor on each thing that is measured.
        options: Of the scheduler.
        late: Steps after which a decision is carried out.
    """
    follower = ReplanController(problem, plan, problem.batch, options or ReplanOptions())
    run = Run([], [], [], follower)
    known: dict[tuple[Plan, int], StepMeasurement] = {}
    waiting: list[tuple[int, ReplanDecision]] = []
    for step in range(steps):
        if waiting and waiting[0][0] <= step:
            decision = waiting.pop()[1]
            follower.applied(decision, decision.cost_s)
        now = state(step)
        key = (follower.plan, id(now))
        if key not in known:
            known[key] = measured(problem, now, follower.plan)
        run.plans.append(follower.plan)
        run.steps_s.append(known[key].step_s)
        found = follower.see(noisy(known[key], step, noise))
        if found is not None:
            run.decisions.append(found)
            waiting.append((step + late, found))
    return run


def even_noise(seed: int, part: float = 0.2) -> Noise:
    """Return noise that is even from ``1 - part`` to ``1 + part``."""
    random = Random(seed)
    return lambda: random.uniform(1 - part, 1 + part)


def normal_noise(seed: int, part: float = 0.2) -> Noise:
    """Return normal noise of a standard deviation, cut off where no time is."""
    random = Random(seed)
    return lambda: max(0.3, random.gauss(1.0, part))
