"""How right are predictions? Step time and memory of many plans, predicted and measured.

On CPU workers: a convolutional net is profiled, a plan is timed by the simulator from that profile, and then runs;
profile and run in turn for each plan, for the machine's speed wanders. On emulated devices of several speeds with
emulated links: the stages' times are given, and what is measured is whether the runtime takes as long as the simulator
says. Two pairs of these are joined by slow links, over which they train in exact steps, with lossy messages, and as
islands. Memory is predicted from buffer lifetimes alone, and compared with the workers' own accounting (on CPU
workers; a worker's peak is that of one plan in a pool of its own).

By default there are fewer CPU plans, and fewer rounds where four minutes are over; ``--long`` has all of them.

With ``--disturbed`` the CPU plans are predicted and run beside a process that keeps half of a core busy
(:mod:`disturbance`): in each round all of them from one profile, then steps of each in turn. The median of a few of
them says little: beside bursts of 10 to 200 ms that of eight steps errs by 7 % for two replicas and 3 % for a pipeline,
that of 32 by 4 % and 2 %.

- ``disturbed_error``: mean relative error of the predicted median of a step;
- ``inside_interval``: share of the steps inside their predicted interval, the 10th to the 90th percentile;
- ``order_correlation``: Spearman's coefficient of predicted and measured medians, the mean of the rounds;
- ``order_of_halves``: the same of the medians of every other step and those of the steps between them: of plans that
  differ by less than that, no prediction has the order;
- ``chosen_over_idle``: measured step of the plan that is predicted to be the fastest, the mean of the rounds, over that
  of the plan that a profile without the disturbance makes the fastest.

Predictions are also corrected by the first steps of runs (:mod:`onebox.plan.replan.profile_correction`), from step 4 to
step 12 or, where they spread, up to step 43, and compared with later steps:

- ``corrected_error``, ``corrected_inside`` and ``corrected_order``: each plan by its own first steps; one whose steps
  are too noisy keeps its prediction (``noisy``: the share of them);
- ``carried_error``, ``carried_order`` and ``carried_over_idle``: all plans by a profile that the first steps of one
  plan have corrected, the one that is predicted to be the fastest: what a later ``plan="auto"`` knows.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from common import Budget, finish, show, spread
from disturbance import disturbance
from torch import Tensor, nn

import onebox
from onebox.cost.model_profile import ModelProfile
from onebox.engine.adaptive.first_steps import MOST_STEPS, SKIPPED
from onebox.engine.adaptive.measurements import step_context, time_step
from onebox.engine.planning.make_plan import pool_links
from onebox.engine.planning.profile import profile_model
from onebox.engine.problem.planner_problem import make_problem
from onebox.engine.problem.stage_formats import with_formats
from onebox.engine.steps.observer import EndedStep, StepObserver
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import (
    ASYNC,
    ComputeTime,
    DeviceSpec,
    Links,
    Plan,
    Prediction,
    Problem,
    Segment,
    SegmentValue,
    Stage,
    predict,
)
from onebox.plan.replan.profile_correction import FEWEST_STEPS, ProfileCorrection, TimedStep, correct_profile, is_sure
from onebox.pool import Link

BATCH = 64
STEPS = 8
DISTURBED_STEPS = 32
ROUNDS = 3
SIM_SPEEDS = (1.0, 1.0, 0.5, 0.25)
LINK = Link(latency_s=0.001, bandwidth_bps=200e6)
SLOW = Link(latency_s=0.005, bandwidth_bps=7e5)
PAIRS = ((0, 1), (2, 3))
PERIODS = 3

_CPU_SHARE, _SLOW_SHARE = 0.6, 0.8
"""Parts of the time after which plans on CPU workers, and over slow links, have the least number of rounds."""


@dataclass
class Row:
    """One plan.

    Args:
        kind: Where it ran.
        name: What it is.
        predicted_s: Seconds of a step.
        measured_s: Medians of each round.
        memory: (predicted, measured) peak bytes of each device.
        corrected_s: Seconds of a step, as corrected by the first steps; ``None`` where they are not compared.
    """

    kind: str
    name: str
    predicted_s: float
    measured_s: list[float]
    memory: list[tuple[int, int]]
    corrected_s: float | None = None

    @property
    def error(self) -> float:
        """Error of the time, as a part of the measured one."""
        return abs(self.predicted_s / statistics.median(self.measured_s) - 1)

    @property
    def corrected_error(self) -> float:
        """Error of the corrected time, or of the predicted one where it was not corrected."""
        corrected_s = self.predicted_s if self.corrected_s is None else self.corrected_s
        return abs(corrected_s / statistics.median(self.measured_s) - 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--long", action="store_true", help="all plans and rounds")
    parser.add_argument("--emulated", action="store_true", help="only plans on emulated devices")
    parser.add_argument("--disturbed", action="store_true", help="only plans on CPU workers, beside a disturbing load")
    options = parser.parse_args()
    if options.disturbed:
        finish(beside_load(options.rounds), as_json=options.json)
        return
    budget = Budget(long=options.long)
    real = [] if options.emulated else on_cpus(options.rounds, budget, every=options.long)
    slow = over_slow_links(options.rounds, budget)
    emulated = on_sims(options.rounds, budget) + slow
    rows = real + emulated
    memory = [abs(expected / found - 1) for row in real for expected, found in row.memory]
    orders = [round(rank_correlation(group), 4) if group else None for group in (real, emulated)]
    result = {
        "mean_error": round(statistics.fmean(row.error for row in rows), 4),
        "corrected_error": round(statistics.fmean(row.corrected_error for row in rows), 4),
        "spearman": round(rank_correlation(rows), 4),
        "spearman_of_cpu_plans": orders[0],
        "spearman_of_emulated_plans": orders[1],
        "mean_error_over_slow_links": round(statistics.fmean(row.error for row in slow), 4),
        "memory_error": round(max(memory, default=0.0), 4),
        "plans": len(rows),
    }
    show(
        f"Predicted and measured, batch {BATCH}: mean error {result['mean_error']:.1%}, "
        f"{result['corrected_error']:.1%} once corrected by first steps, rank correlation "
        f"{result['spearman']} ({orders[0]} of the CPU plans, {orders[1]} of the emulated ones), largest error "
        f"of memory {result['memory_error']:.2%}",
        ["plan", "devices", "predicted ms", "measured ms", "error", "corrected", "memory error"],
        [
            [
                row.name,
                row.kind,
                f"{1e3 * row.predicted_s:.1f}",
                spread([1e3 * seconds for seconds in row.measured_s], 1),
                f"{row.predicted_s / statistics.median(row.measured_s) - 1:+.1%}",
                "" if row.corrected_s is None else f"{row.corrected_s / statistics.median(row.measured_s) - 1:+.1%}",
                f"{max((abs(a / b - 1) for a, b in row.memory), default=0):.2%}" if row.memory else "",
            ]
            for row in rows
        ],
    )
    finish(result, as_json=options.json)


def rank_correlation(rows: Sequence[Row]) -> float:
    """Return Spearman's coefficient of predicted and measured times."""
    return correlation([row.predicted_s for row in rows], [statistics.median(row.measured_s) for row in rows])


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's coefficient of two series."""
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order; equal ones share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


# ---- CPU workers


def net() -> nn.Module:
    """Return a convolutional net of eight layers with batch norm, for images of 32 x 32."""
    layers: list[nn.Module] = []
    before = 3
    for after, pool in ((24, False), (24, True), (48, False), (48, True), (96, False), (96, True)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
        before = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * before, 128), nn.ReLU(), nn.Linear(128, 10))


def data() -> tuple[Tensor, Tensor]:
    """Return a batch of random images and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(10, (BATCH,), generator=generator)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the net and its optimizer."""
    torch.manual_seed(0)
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


LOSS = nn.functional.cross_entropy


def on_cpus(rounds: int, budget: Budget, *, every: bool) -> list[Row]:
    """Predict and run plans on two CPU workers, each from a profile that is measured just before it runs.

    Args:
        rounds: Of each.
        budget: The time.
        every: Whether to run all of them.
    """
    model, optimizer = fresh()
    segments = TracedModel(capture(model, LOSS, data()), backward=True).segments
    rows = []
    for name, plan in cpu_plans(segments) if every else some_cpu_plans(segments):
        with onebox.open("cpu*2", threads=1) as pool:
            assert plan.micro_batch is not None
            size = plan.micro_batch
            profile, _ = profile_model(model, LOSS, optimizer, *data(), pool=pool, sizes=[size], cache=False)
            links = pool_links(pool)
            problem = make_problem(profile, pool.devices, links, batch=BATCH, micro_batches=(size,))
            plan = with_formats(plan, profile, pool.devices)  # noqa: PLW2901
        prediction, _ = predict(problem, plan)
        measured_s, memory, first = run_on_cpus(plan, budget.rounds(rounds, _CPU_SHARE))
        corrected = correct_profile(msgspec.structs.replace(plan, predicted=prediction), first, problem)
        rows.append(Row("cpu*2", name, prediction.step_s, measured_s, memory, corrected.predicted.step_s))
    return rows


@dataclass
class DisturbedRow:
    """One plan beside a disturbing process.

    Args:
        name: What it is.
        idle_s: Seconds of a step, as predicted without the disturbance.
        predicted: Prediction of each round.
        corrections: Comparison of the first steps of each round with it.
        carried_s: Predicted seconds of a step of each round, from the profile that another run has corrected.
        measured_s: Seconds of each later step of each round.
    """

    name: str
    idle_s: float
    predicted: list[Prediction] = field(default_factory=list)
    corrections: list[ProfileCorrection] = field(default_factory=list)
    carried_s: list[float] = field(default_factory=list)
    measured_s: list[list[float]] = field(default_factory=list)

    @property
    def medians_s(self) -> list[float]:
        """Measured medians of each round."""
        return list(map(statistics.median, self.measured_s))

    @property
    def predicted_s(self) -> list[float]:
        """Predicted seconds of a step of each round."""
        return [own.step_s for own in self.predicted]

    @property
    def corrected(self) -> list[Prediction]:
        """Prediction of each round, corrected by the plan's own first steps."""
        return [own.predicted for own in self.corrections]

    @property
    def corrected_s(self) -> list[float]:
        """Seconds of a step of each round, as corrected."""
        return [own.step_s for own in self.corrected]

    def errors(self, predicted_s: Sequence[float]) -> list[float]:
        """Return the errors of predictions of each round's median, as parts of the measured one."""
        return [own_s / median_s - 1 for own_s, median_s in zip(predicted_s, self.medians_s, strict=True)]

    def inside(self, predicted: Sequence[Prediction]) -> list[bool]:
        """Return for each step whether it was inside its predicted interval."""
        bounds = [own.interval_s or (own.step_s, own.step_s) for own in predicted]
        return [low <= each <= high for (low, high), own in zip(bounds, self.measured_s, strict=True) for each in own]

    def cells(self) -> list[str]:
        """Return its row of the table."""
        predicted_ms = [1e3 * own_s for own_s in self.predicted_s]
        around = [
            [end / own.step_s - 1 for end in own.interval_s] for own in self.predicted if own.interval_s is not None
        ]
        ends = [statistics.median(each) for each in zip(*around, strict=True)]
        return [
            self.name,
            f"{1e3 * self.idle_s:.1f}",
            f"{statistics.median(predicted_ms):.1f}",
            " to ".join(f"{end:+.0%}" for end in ends),
            percentiles([each for own in self.measured_s for each in own]),
            f"{statistics.fmean(self.errors(self.predicted_s)):+.1%}",
            f"{statistics.fmean(self.errors(self.corrected_s)):+.1%}",
            f"{statistics.fmean(self.errors(self.carried_s)):+.1%}",
            " ".join(f"{statistics.median(own.devices[n] for own in self.corrections):.2f}" for n in self.devices),
            f"{statistics.median(own.rest for own in self.corrections):.2f}",
        ]

    @property
    def devices(self) -> list[int]:
        """The devices of the plan."""
        return sorted(self.corrections[0].devices)


def beside_load(rounds: int) -> dict[str, Any]:
    """Predict and run plans on two CPU workers beside a disturbing process; print the table, return the figures."""
    model, optimizer = fresh()
    plans = cpu_plans(TracedModel(capture(model, LOSS, data()), backward=True).segments)
    with onebox.open("cpu*2", threads=1) as pool, ExitStack() as stack:
        alone, profile = cpu_problem(model, optimizer, pool, plans)
        plans = [(name, with_formats(plan, profile, pool.devices)) for name, plan in plans]
        rows = [DisturbedRow(name, predict(alone, plan)[0].step_s) for name, plan in plans]
        trainers = [stack.enter_context(cpu_trainer(pool, plan)) for _, plan in plans]
        clocks = [StepClock(pool) for _ in plans]
        for trainer, clock in zip(trainers, clocks, strict=True):
            timed(trainer, data(), 0)
            trainer.subscribe(clock)
        stack.enter_context(disturbance())
        for _ in range(rounds):
            problem, _ = cpu_problem(model, optimizer, pool, plans)
            for row, (_, plan), trainer, clock in zip(rows, plans, trainers, clocks, strict=True):
                row.predicted.append(predict(problem, plan)[0])
                first = clock.first_steps(trainer)
                row.corrections.append(
                    correct_profile(msgspec.structs.replace(plan, predicted=row.predicted[-1]), first, problem)
                )
                row.measured_s.append(ends_apart(trainer, data(), DISTURBED_STEPS))
            factors = min(rows, key=lambda row: row.predicted[-1].step_s).corrections[-1].factors
            corrected = problem if factors is None else factors.applied(problem)
            for row, (_, plan) in zip(rows, plans, strict=True):
                row.carried_s.append(predict(corrected, plan)[0].step_s)
    typical_s = [statistics.median(row.medians_s) for row in rows]
    of_idle_s = typical_s[min(range(len(rows)), key=lambda number: rows[number].idle_s)]
    by_kind = {
        "disturbed_error": [row.predicted_s for row in rows],
        "corrected_error": [row.corrected_s for row in rows],
        "carried_error": [row.carried_s for row in rows],
    }
    errors = {
        name: statistics.fmean(abs(error) for row, own in zip(rows, found, strict=True) for error in row.errors(own))
        for name, found in by_kind.items()
    }
    orders, chosen = [], []
    for found in by_kind.values():
        each = [[own[turn] for own in found] for turn in range(rounds)]
        orders.append(
            statistics.fmean(correlation(own, [row.medians_s[turn] for row in rows]) for turn, own in enumerate(each))
        )
        chosen.append(statistics.fmean(typical_s[own.index(min(own))] / of_idle_s for own in each))
    halves = [
        correlation(*([statistics.median(row.measured_s[turn][half::2]) for row in rows] for half in range(2)))
        for turn in range(rounds)
    ]
    noisy = statistics.fmean(own.noisy for row in rows for own in row.corrections)
    figures = {
        **errors,
        "inside_interval": statistics.fmean(step for row in rows for step in row.inside(row.predicted)),
        "corrected_inside": statistics.fmean(step for row in rows for step in row.inside(row.corrected)),
        "order_correlation": orders[0],
        "corrected_order": orders[1],
        "carried_order": orders[2],
        "order_of_halves": statistics.fmean(halves),
        "chosen_over_idle": chosen[0],
        "carried_over_idle": chosen[2],
        "noisy": noisy,
    }
    result = {**{name: round(value, 4) for name, value in figures.items()}, "plans": len(rows), "rounds": rounds}
    show(
        f"Predicted and measured beside a disturbing process: mean error {result['disturbed_error']:.1%}, "
        f"{result['corrected_error']:.1%} once corrected by each plan's first steps, {result['carried_error']:.1%} by "
        f"those of one plan; {result['inside_interval']:.0%} of the steps inside the interval, rank correlation "
        f"{result['order_correlation']}, chosen plan {result['chosen_over_idle']} x that of the idle profile",
        [
            "plan",
            "idle ms",
            "predicted ms",
            "interval",
            "measured ms",
            "error",
            "corrected",
            "carried",
            "actions x",
            "rest x",
        ],
        [row.cells() for row in rows],
    )
    return result


class StepClock(StepObserver):
    """Times of a run's steps and actions.

    Args:
        pool: The devices.
    """

    def __init__(self, pool: onebox.Pool) -> None:
        self._pool = pool
        self._ended: list[EndedStep] = []

    def ended(self, step: EndedStep) -> None:
        """Keep a step."""
        self._ended.append(step)

    def first_steps(self, trainer: onebox.Trainer) -> list[TimedStep]:
        """Train steps as at the beginning of a run, and return those that are compared with a prediction."""
        self._ended.clear()
        more, found = SKIPPED + FEWEST_STEPS, list[TimedStep]()
        while True:
            for _ in range(more):
                trainer.step(*data())
            trainer.wait()
            traces = [step.trace for step in self._ended]
            for step, trace, before in list(zip(self._ended[1:], traces[1:], traces, strict=False))[-more:]:
                assert trace is not None
                found.append(time_step(step_context(step, trace, pool=self._pool), before))
            first = found[SKIPPED - 1 :]
            more = min(STEPS, MOST_STEPS - len(first))
            if is_sure([step.step_s for step in first]) or not more:
                return first


def percentiles(seconds: Sequence[float]) -> str:
    """Return the median of times in milliseconds, with the 10th and the 90th percentile."""
    cuts = statistics.quantiles(seconds, n=10, method="inclusive")
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * cuts[0]:.1f} to {1e3 * cuts[-1]:.1f})"


def cpu_problem(
    model: nn.Module, optimizer: torch.optim.Optimizer, pool: onebox.Pool, plans: Sequence[tuple[str, Plan]]
) -> tuple[Problem, ModelProfile]:
    """Return the planner's problem and its basis, a new profile with the micro-batches of some plans."""
    sizes = sorted({plan.micro_batch for _, plan in plans if plan.micro_batch is not None})
    profile, _ = profile_model(model, LOSS, optimizer, *data(), pool=pool, sizes=sizes, cache=False)
    return make_problem(profile, pool.devices, pool_links(pool), batch=BATCH, micro_batches=sizes), profile


def cpu_trainer(pool: onebox.Pool, plan: Plan) -> onebox.Trainer:
    """Return a trainer of the net."""
    model, optimizer = fresh()
    return onebox.Trainer(model, LOSS, optimizer, pool=pool, plan=plan, engine=onebox.Engine(check_every=0))


def ends_apart(trainer: onebox.Trainer, batch: tuple[Tensor, Tensor], steps: int, *, warm: int = 2) -> list[float]:
    """Return the seconds from the end of each step to that of the next, after some warm-up steps."""
    losses, ends_s = [trainer.step(*batch)], []
    for _ in range(warm + steps):
        losses.append(trainer.step(*batch))
        losses[-2].item()
        ends_s.append(time.perf_counter())
    losses[-1].item()
    return [later - earlier for earlier, later in itertools.pairwise(ends_s)][warm - 1 :]


def cpu_plans(names: Sequence[str]) -> list[tuple[str, Plan]]:
    """Return plans of all kinds for two devices."""
    found = []
    for size in (16, 32):
        found.append((f"1 device, {size}", Plan.data_parallel([0], [1.0], micro_batch=size)))
        found.append((f"2 replicas, {size}", Plan.data_parallel([0, 1], [0.5, 0.5], micro_batch=size)))
    for cut in (1, 2, 4):
        for schedule, size in (("gpipe", 16), ("1f1b", 8)):
            found.append(
                (f"cut at {cut}, {schedule}, {size}", staged((names[:cut], names[cut:]), (0, 1), schedule, size))
            )
    found.append(("cut at 2, zb-h1, 16", staged((names[:2], names[2:]), (0, 1), "zb-h1", 16)))
    parts = (names[:1], names[1:2], names[2:4], names[4:])
    found.append(("4 stages, interleaved, 16", staged(parts, (0, 1, 0, 1), "interleaved", 16)))
    return found


def some_cpu_plans(names: Sequence[str]) -> list[tuple[str, Plan]]:
    """Return eight of these plans, of each kind."""
    return [(name, plan) for name, plan in cpu_plans(names) if not name.endswith("32") and "cut at 4" not in name]


def staged(parts: Sequence[Sequence[str]], devices: Sequence[int], schedule: str, size: int) -> Plan:
    """Return a plan of stages with a device each."""
    stages = tuple(
        Stage(segments=tuple(part), replicas=((device,),), shares=(1.0,))
        for part, device in zip(parts, devices, strict=True)
    )
    return Plan(stages=stages, micro_batch=size, schedule=schedule)


def run_on_cpus(plan: Plan, rounds: Iterable[int]) -> tuple[list[float], list[tuple[int, int]], list[TimedStep]]:
    """Return the seconds of a step, the median of each round, the memory of each device, and the first steps."""
    with onebox.open("cpu*2", threads=1) as pool, cpu_trainer(pool, plan) as trainer:
        clock = StepClock(pool)
        trainer.subscribe(clock)
        first = clock.first_steps(trainer)
        seconds = timed(trainer, data(), rounds)
        expected = trainer.predicted_memory(*data())
        used = trainer.memory()
        return seconds, [(expected[device], used[device].peak_bytes) for device in plan.devices], first


def timed(
    trainer: onebox.Trainer, batch: tuple[Tensor, Tensor], rounds: Iterable[int], *, steps: int = STEPS, warm: int = 3
) -> list[float]:
    """Return the mean seconds of a step in each round, steps following each other."""
    for _ in range(warm):
        trainer.step(*batch)
    trainer.wait()
    found = []
    for _ in rounds:
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step(*batch)
        trainer.wait()
        found.append((time.perf_counter() - start) / steps)
    return found


def apart(trainer: onebox.Trainer, batch: tuple[Tensor, Tensor], rounds: Iterable[int]) -> list[float]:
    """Return how far steps that follow one another are apart, in each round: filling and draining cancel out."""
    for _ in range(3):
        trainer.step(*batch)
    trainer.wait()
    found = []
    for _ in rounds:
        spent = []
        for count in (STEPS, 4 * STEPS):
            start = time.perf_counter()
            for _ in range(count):
                trainer.step(*batch)
            trainer.wait()
            spent.append(time.perf_counter() - start)
        found.append((spent[1] - spent[0]) / (3 * STEPS))
    return found


# ---- emulated devices


def on_sims(rounds: int, budget: Budget) -> list[Row]:
    """Predict and run plans on emulated devices and links."""
    blocks = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    problem = sim_problem(blocks)
    links = {(a, b): LINK for a in range(4) for b in range(4) if a < b}
    spec = ",".join("sim" if speed == 1 else f"sim@{speed}" for speed in SIM_SPEEDS)
    batch = (torch.zeros(BATCH, 64), torch.zeros(BATCH, 64))
    rows = []
    with onebox.open(spec, links=links) as pool:
        for name, plan in sim_plans([segment.name for segment in problem.segments]):
            prediction, _ = predict(problem, plan)
            plan = msgspec.structs.replace(plan, predicted=prediction)  # noqa: PLW2901
            optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
            late = plan.schedule == ASYNC
            with onebox.Trainer(
                blocks,
                nn.functional.mse_loss,
                optimizer,
                pool=pool,
                plan=plan,
                stale=onebox.StaleGradients(correction="none", warm_up=0) if late else None,
                engine=onebox.Engine(check_every=0),
            ) as trainer:
                measured = (apart if late else timed)(trainer, batch, budget.rounds(rounds, 1.0, least=1))
                corrected = trainer.profile_correction
                corrected_s = None if corrected is None else corrected.predicted.step_s
                rows.append(Row("emulated", name, prediction.step_s, measured, [], corrected_s))
    return rows


def over_slow_links(rounds: int, budget: Budget) -> list[Row]:
    """Predict and run exact and lossy plans, and islands, on two pairs of emulated devices with slow links between."""
    blocks = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    links = {(a, b): LINK if any({a, b} == {*pair} for pair in PAIRS) else SLOW for a in range(4) for b in range(a)}
    problem = sim_problem(blocks, links)
    names = [segment.name for segment in problem.segments]
    batch = (torch.zeros(BATCH, 64), torch.zeros(BATCH, 64))
    spec = ",".join("sim" if speed == 1 else f"sim@{speed}" for speed in SIM_SPEEDS)
    replicas = Plan.data_parallel(range(4), SIM_SPEEDS, micro_batch=4)
    stages = staged([names[i : i + 2] for i in range(0, 8, 2)], (0, 1, 2, 3), "1f1b", 8)
    rows = []
    with onebox.open(spec, links=links) as pool:
        for name, plan in (("replicas", replicas), ("4 stages", stages)):
            for part, codec in (("gradients", "none"), ("gradients", "int8"), ("activations", "int8")):
                if part != ("gradients" if plan is replicas else "activations") and codec != "none":
                    continue
                coded = [msgspec.structs.replace(stage, **{part: codec}) for stage in plan.stages]
                own = msgspec.structs.replace(plan, stages=tuple(coded))
                prediction, _ = predict(problem, own)
                own = msgspec.structs.replace(own, predicted=prediction)
                with slow_trainer(blocks, pool, plan=own) as trainer:
                    label = f"{name}, slow links" + ("" if codec == "none" else f", {part} {codec}")
                    measured = timed(trainer, batch, budget.rounds(rounds, _SLOW_SHARE, least=1))
                    rows.append(Row("emulated", label, prediction.step_s, measured, []))
        for name, outer in (
            ("every 4", onebox.Outer(every=4)),
            ("every 4, 2 fragments", onebox.Outer(every=4, fragments=2)),
            ("every 4, overlap 1", onebox.Outer(every=4, overlap=1)),
        ):
            for inside in ("replicas", "stages"):
                plans = [island_plan(problem, names, inside, island) for island in range(2)]
                shares = [plan.predicted.batch for plan in plans if plan.predicted is not None]
                outer = replace(outer, shares=shares)  # noqa: PLW2901
                with slow_trainer(blocks, pool, plan=plans, islands=PAIRS, outer=outer) as trainer:
                    trainer.step(*batch)
                    predicted = trainer.predicted_islands(problem.links)
                    assert predicted is not None
                    turns = budget.rounds(rounds, _SLOW_SHARE, least=1)
                    measured = timed(trainer, batch, turns, steps=PERIODS * outer.every, warm=2 * outer.every - 1)
                    rows.append(Row("emulated", f"islands of {inside}, {name}", predicted.step_s, measured, []))
    return rows


def slow_trainer(blocks: nn.Module, pool: onebox.Pool, **options: Any) -> onebox.Trainer:
    """Return a trainer of the blocks."""
    optimizer, engine = torch.optim.SGD(blocks.parameters(), lr=0.01), onebox.Engine(check_every=0)
    lossy = () if "islands" in options else ("gradients", "activations")
    return onebox.Trainer(blocks, nn.functional.mse_loss, optimizer, pool=pool, engine=engine, lossy=lossy, **options)


def island_plan(problem: Problem, names: Sequence[str], inside: str, island: int) -> Plan:
    """Return the plan of a pair of devices, with its prediction for its share of the batch."""
    devices = PAIRS[island]
    size = (48, 16)[island]
    own = replace(
        problem,
        devices=tuple(problem.device[device] for device in devices),
        links=problem.links.among(devices),
        batch=size,
    )
    plan = Plan.data_parallel(devices, [SIM_SPEEDS[device] for device in devices], micro_batch=4)
    if inside == "stages":
        plan = staged((names[:4], names[4:]), devices, "1f1b", 4)
    return msgspec.structs.replace(plan, predicted=predict(own, plan)[0])


def sim_problem(blocks: nn.Sequential, links: Mapping[tuple[int, int], Link] | None = None) -> Problem:
    """Return eight equal segments of 2 ms, 2 ms and 2 ms for eight samples, on devices of four speeds.

    Links that are not given are alike.

    The first has no gradient of its input, as nothing needs that.
    """
    example = (torch.zeros(8, 64), torch.zeros(8, 64))
    names = TracedModel(capture(blocks, nn.functional.mse_loss, example), backward=True).segments
    each, none = {"cpu": ComputeTime(sample_s=0.00025)}, {"cpu": ComputeTime()}
    segments = tuple(
        Segment(
            name=name,
            forward_s=each,
            input_s=each if index else none,
            weight_s=each,
            update_s={"cpu": 0.0},
            parameter_bytes=16640,
        )
        for index, name in enumerate(names)
    )
    values = tuple(
        SegmentValue(source=i, consumers=(i + 1,), forward_bytes=256, backward_bytes=256) for i in range(len(names) - 1)
    )
    devices = tuple(DeviceSpec(number=i, type="cpu", speed=speed) for i, speed in enumerate(SIM_SPEEDS))
    given = links or {}
    pairs = {a: {b: given.get((max(a, b), min(a, b)), LINK) for b in range(4) if b != a} for a in range(4)}
    known = Links(
        latency_s={a: {b: link.latency_s for b, link in found.items()} for a, found in pairs.items()},
        bandwidth_bps={a: {b: link.bandwidth_bps for b, link in found.items()} for a, found in pairs.items()},
    )
    return Problem(
        segments=segments, devices=devices, links=known, batch=BATCH, micro_batches=(4, 8, 16), values=values
    )


def sim_plans(names: Sequence[str]) -> list[tuple[str, Plan]]:
    """Return plans of all kinds for four devices."""
    even = [names[i : i + 2] for i in range(0, 8, 2)]
    uneven = [names[:3], names[3:6], names[6:7], names[7:]]
    found = [("1 device, 8", Plan.data_parallel([0], [1.0], micro_batch=8))]
    found.append(("replicas by speed, 4", Plan.data_parallel(range(4), SIM_SPEEDS, micro_batch=4)))
    for parts, label in ((even, "even"), (uneven, "uneven")):
        for schedule, size in (("gpipe", 8), ("1f1b", 4), ("zb-h1", 8)):
            found.append((f"4 {label} stages, {schedule}, {size}", staged(parts, (0, 1, 2, 3), schedule, size)))
        found.append((f"4 {label} stages, {ASYNC}, 4", staged(parts, (0, 1, 2, 3), ASYNC, 4)))
    return found


if __name__ == "__main__":
    main()
