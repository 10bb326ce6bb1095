"""A small net with everything that lowering has to heed, and plans for it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.cost import AllReduceAlgorithm
from onebox.engine.compile.batch_job import BatchJob, BufferNumbers
from onebox.engine.compile.lowering import Lowering
from onebox.engine.compile.routine import StepRoutine
from onebox.engine.compile.update.async_window import WorkerWindows
from onebox.engine.compile.update.gradients import Gradients
from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.partition.schedules import forward_only, make_schedule, make_window
from onebox.engine.partition.sharding_spec import Members, ShardingSpec, find_sharding_spec
from onebox.engine.workload.emulated_costs import EmulatedCosts
from onebox.graph import Captured, ModelPrograms, TracedModel
from onebox.plan import ActivationPolicy, Plan, Stage, block_numbers
from tests.kit.captures import capture

HALVES = ("zb-h1", "zbv", "auto", "table")


class Net(nn.Module):
    """Four layers: batch norm and a counter in two of them, a weight in two places, a skip from the first to the last.

    Segments: ``a``, ``b``, ``c`` (with the weight of ``b``), ``d``. One parameter is frozen, and one has no segment of
    its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6, bias=False)
        self.norm = nn.BatchNorm1d(6, momentum=0.25)
        self.b = nn.Linear(6, 6)
        self.b.bias.requires_grad_(False)
        self.c = nn.Linear(6, 6, bias=False)
        self.c.weight = self.b.weight
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale = nn.Parameter(torch.ones(6))
        self.d = nn.Linear(6, 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return values [B, 3]."""
        first = self.norm(self.a(x_BD)).tanh()
        y_BD = self.c(self.b(first).tanh()).tanh() * self.scale
        if self.training:
            self.calls += 1
            self.mean.mul_(0.5).add_(y_BD.detach().mean(0), alpha=0.5)
        return self.d(y_BD + first)


def build() -> nn.Module:
    """Return the net in float64, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return Net().double()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 5] and targets [B, 3], the same each time."""
    generator = torch.Generator().manual_seed(size)
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    return draw(size, 5), draw(size, 3)


@functools.cache
def captured(size: int, *, train: bool) -> Captured:
    """Return the net, captured for micro-batches of a size."""
    example = torch.zeros(size, 5, dtype=torch.float64), torch.zeros(size, 3, dtype=torch.float64)
    return capture(build(), functional.mse_loss, example, mode="train" if train else "evaluate")


@functools.cache
def programs(
    size: int,
    stages: tuple[tuple[str, ...], ...] | None,
    *,
    train: bool,
    halves: bool,
    policies: tuple[ActivationPolicy, ...] | None = None,
    blocks: tuple[int, ...] = (),
) -> ModelPrograms:
    """Return the net's programs for micro-batches of a size."""
    traced = TracedModel(captured(size, train=train), backward=train, halves=halves)
    return traced.divide(stages, policies=policies, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A batch, lowered.

    Args:
        plan: The plan.
        model: The programs of the first micro-batch.
        holdings: Who holds what.
        numbers: Shared numbers.
        trained: The trained parameters.
        job: What was lowered.
        routines: Of each worker.
        gradients: What lowering knows of gradients: the buffers of their sums, and of fresh ones.
        windows: Of each worker, where steps are to overlap.
        moved: Buffers of statistics that stand for others.
    """

    plan: Plan
    model: ModelPrograms
    holdings: ShardingSpec
    numbers: BufferNumbers
    trained: tuple[str, ...]
    job: BatchJob
    routines: Mapping[int, StepRoutine]
    gradients: Gradients
    windows: Mapping[int, WorkerWindows] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by the names that programs have for them, each tensor once."""
    return {f"model.{name}": t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def lower(
    plan: Plan,
    size: int,
    *,
    max_norm: float = 0.0,
    train: bool = True,
    speeds: Mapping[int, float] | None = None,
    ways: Mapping[Members, tuple[AllReduceAlgorithm, ...]] | None = None,
    overlap: Literal["", "exact", "stale"] = "",
    untagged: bool = False,
    apart: bool = False,
) -> Lowered:
    """Lower a batch of the net as a compiler does, with numbers from 1000 for what is new."""
    parts, routes = plan.micro_batches(size), plan.routes(size)
    stages = None if len(plan.stages) == 1 else tuple(stage.segments for stage in plan.stages)
    halves = plan.schedule in HALVES and stages is not None
    divide = functools.partial(
        programs, policies=tuple(found.policy for found in plan.stages), blocks=block_numbers(plan.stages)
    )
    model = divide(parts[0].size, stages, train=True, halves=halves)
    split = range(len(plan.stages)) if halves else ()
    divided = {part.size: divide(part.size, stages, train=train, halves=train and halves) for part in parts}
    found = {size: PhasePrograms(each, plan, halves=split if train else ()) for size, each in divided.items()}
    holdings = replace(find_sharding_spec(plan, PhasePrograms(model, plan, halves=split)), ways=ways or {})
    backwards = [part for phase, part in model.phases.items() if phase.kind == "B"]
    gradients = {str(port.name) for part in backwards for port in part.outputs if port.kind == "gradient"}
    trained = tuple(name for name in state_of(build()) if name in gradients)
    new = itertools.count(1000)
    affine = [name for name, update in model.updates.items() if update.kind == "affine"]
    sets = holdings.groups(trained, affine)
    numbers = BufferNumbers(
        state={name: 10 + place for place, name in enumerate(state_of(build()))},
        optimizer=9,
        groups={members: 900 + place for place, members in enumerate(sets)},
        new=lambda: next(new),
        previous={name: 300 + place for place, name in enumerate(trained)} if overlap == "stale" else {},
    )
    make = make_window if overlap else make_schedule
    schedule = make(plan, parts, routes, model) if train else forward_only(routes)
    constants = {n: {name: 500 + i for i, name in enumerate(sorted(m.constants))} for n, m in divided.items()}
    job = BatchJob(micro_batches=parts, routes=routes, schedule=schedule, models=found, constants=constants, leaves=2)
    lowering = Lowering(
        plan, holdings, numbers, trained=trained, model=model, max_norm=max_norm,
        costs=EmulatedCosts(plan=plan, speeds=dict.fromkeys(plan.devices, 1.0) | dict(speeds or {})),
        untagged={number: members for members, number in numbers.groups.items()} if untagged else {},
        hosts={device: f"host{device}" if apart else "host" for device in plan.devices},
    )  # fmt: skip
    windows = lowering.windows(job) if overlap else {}
    steady = {worker: found.steady for worker, found in windows.items()}
    routines = steady or (lowering.train(job) if train else lowering.evaluate(job))
    return Lowered(
        plan=plan, model=model, holdings=holdings, numbers=numbers, trained=trained, job=job, routines=routines,
        gradients=lowering._gradients, windows=windows, moved=lowering._moved,
    )  # fmt: skip


def stage(segments: str, *devices: int, shares: Sequence[float] = (), policy: ActivationPolicy = "keep") -> Stage:
    """Return a stage of segments that are named by one letter each, its replicas on one device each."""
    return Stage(
        policy=policy,
        segments=tuple(f"model.{letter}" for letter in segments),
        replicas=tuple((d,) for d in devices),
        shares=tuple(shares or (1.0,) * len(devices)),
    )


def plan(*stages: Stage, micro_batch: int = 2, schedule: str = "1f1b", **more: Any) -> Plan:
    """Return a plan of stages; none for one device."""
    return Plan(stages=stages, micro_batch=micro_batch, schedule=schedule, **more)


SPANS: tuple[ActivationPolicy, ...] = ("recompute", "recompute", "offload", "keep")

PLANS: dict[str, Plan] = {
    "one device": Plan.data_parallel([0], [1.0], micro_batch=2),
    "two replicas": Plan.data_parallel([0, 1], [0.5, 0.5], micro_batch=2),
    "uneven replicas": Plan.data_parallel([2, 0, 1], [0.5, 0.1, 0.4], micro_batch=2),
    "two stages": plan(stage("ab", 0), stage("cd", 1)),
    "gpipe": plan(stage("ab", 0), stage("cd", 1), schedule="gpipe"),
    "four stages": plan(*(stage(letter, place) for place, letter in enumerate("abcd")), schedule="zb-h1"),
    "interleaved": plan(
        *(stage(letter, place % 2) for place, letter in enumerate("abcd")), schedule="interleaved"
    ),
    "zbv": plan(stage("a", 0), stage("b", 1), stage("c", 1), stage("d", 0), schedule="zbv"),
    "two by two": plan(stage("ab", 0, 1), stage("cd", 2, 3)),
    "one by two": plan(stage("ab", 0), stage("cd", 1, 2, shares=(0.6, 0.4)), schedule="zb-h1"),
    "two by one": plan(stage("a", 1, 2, shares=(1.0, 2.0)), stage("bc", 0), stage("d", 3)),
    "replicas across": plan(stage("ab", 0, 1), stage("cd", 1, 0)),
    "spans": plan(*(stage(letter, 0, policy=policy) for letter, policy in zip("abcd", SPANS, strict=True))),
    "recomputed": plan(stage("ab", 0, policy="recompute"), stage("cd", 1, policy="recompute"), schedule="zb-h1"),
    "recomputed replicas": plan(stage("a", 0, 1, policy="recompute"), stage("bcd", 0, 1, policy="recompute")),
}  # fmt: skip
"""Every kind of plan: batches of them are lowered, looked at and played."""
