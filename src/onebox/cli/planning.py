"""Planning for a command's options: search for a plan, or prediction of one from a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch import Tensor, nn

from onebox.cli.options.jobs import DATA_PARALLEL, JobConfig, PlanConfig, StalenessConfig, TrainConfig
from onebox.cli.options.run_config import read_config
from onebox.cli.output_files import write_output
from onebox.cli.training.run_setup import make_loss, make_model, make_optimizer
from onebox.engine import Trainer
from onebox.engine.islands.division import Islands
from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.planning.make_plan import PlanningResult, make_plan, pool_links, with_coding_speeds
from onebox.engine.planning.partial_profile import PROFILING_S, profile_line
from onebox.engine.planning.profile import profile_model
from onebox.engine.planning.training_modes import IslandsPlanning
from onebox.engine.problem.memory_search import with_peaks
from onebox.engine.problem.planner_problem import make_problem
from onebox.engine.problem.split_costs import split_costs
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.delay_compensation import delays_of, extra_copies
from onebox.engine.workload.parameter_groups import Optimizers
from onebox.errors import UsageError
from onebox.feed import Data, Feed
from onebox.graph import Loss
from onebox.plan import (
    ACTIVATION_POLICIES,
    ASYNC,
    ChainPolicy,
    Plan,
    PlanCandidate,
    Problem,
    Schedule,
    Simulation,
    UpdateAt,
    predict,
    stage_work,
    validate,
)
from onebox.plan.evaluate.modes import TrainingMode
from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.pool import Pool, open_pool
from onebox.report import RunFolder
from onebox.sizes import enough_text
from onebox.trainer_options import Outer
from onebox.wire.protocol.instructions import GroupDelays

_TESTED, _TESTED_BATCHES = 256, 8
"""Samples of a batch of held-out data, and most such batches, that the loss of a probe is for."""


INTERRUPTED = "interrupted: the search has ended, with the best plan so far"
"""The message after Ctrl-C during a search."""


@dataclass(frozen=True, kw_only=True)
class PlanForecast:
    """A plan with its prediction.

    Args:
        plan: The plan, with its prediction.
        simulation: Its simulated step.
        problem: The problem that it was made or predicted for.
        candidates: The plans that the search compared, itself first; empty without a search.
        delays: Compensation of late gradients, if any.
        islands: The plans of islands, if they were asked for.
        modes: Exact, compressed and island training, as far as they were asked for.
        interrupted: Whether Ctrl-C has ended the search.
        measured: Part of the model's times that was measured, from 0 to 1; the rest was estimated.
        made: The result of the search, without the captured model; ``None`` without a search.
    """

    plan: Plan
    simulation: Simulation
    problem: Problem
    candidates: tuple[PlanCandidate, ...] = ()
    delays: GroupDelays = "none"
    islands: IslandsPlanning | None = None
    modes: tuple[TrainingMode, ...] = ()
    interrupted: bool = False
    measured: float = 1.0
    made: PlanningResult | None = None

    @property
    def shortfall(self) -> str:
        """Description of the devices that lack memory for it, and how much; empty if it fits."""
        room = self.problem.capacity_bytes
        over = {device: peak - room[device] for device, peak in self.peak_bytes.items() if device in room}
        lacks = ((device, enough_text(size)) for device, size in sorted(over.items()) if size > 0)
        return "; ".join(f"device {device} lacks {size}" for device, size in lacks)

    @property
    def peak_bytes(self) -> dict[int, int]:
        """Peak memory of each device of the plan."""
        assert self.plan.predicted is not None
        return dict(zip(self.plan.devices, self.plan.predicted.peak_bytes, strict=True))


def job_of(config: JobConfig, data: Data) -> tuple[nn.Module, Loss, Optimizers, Tensor, Tensor]:
    """Return the model, the loss, the optimizer, and a batch in the form of a step's input."""
    model = make_model(config, data)
    return model, make_loss(config), make_optimizer(config, model), *data.example(config.batch)


def search_plan(
    config: StalenessConfig,
    data: Data,
    pool: Pool,
    *,
    micro_batches: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    policies: Sequence[ChainPolicy] = ACTIVATION_POLICIES,
    update: Sequence[UpdateAt] = ("device",),
    split_layers: bool = True,
    preparing: float = 0.0,
    budget_s: float = 5.0,
    profiling_s: float = math.inf,
    fresh: bool = False,
    overlap: bool = False,
    islands: Islands | None = None,
    outer: Outer | None = None,
) -> PlanForecast:
    """Measure, and search for the best plan; Ctrl-C ends the search with the best one so far.

    Args:
        config: The options, resolved.
        data: The data set.
        pool: The devices.
        micro_batches: Allowed sizes of micro-batches.
        schedules: Allowed schedules.
        policies: Allowed activation policies.
        update: Allowed places of the optimizer's state.
        split_layers: Whether devices of a host may split layers.
        preparing: Cores of this machine that the preparation of batches keeps busy.
        budget_s: Approximate time limit of the search in seconds.
        profiling_s: Time limit in seconds for measuring the model.
        fresh: Whether to measure again what is cached.
        overlap: Whether exact steps overlap, for the simulation.
        islands: Devices of each island, or ``auto``, for plans of islands.
        outer: The outer optimizer of islands.

    Raises:
        UsageError: The batch cannot be divided as requested, or islands are not possible.
        PlanError: Nothing fits.
    """
    job = job_of(config, data)
    planned = make_plan(
        *job,
        pool=pool,
        micro_batches=micro_batches,
        schedules=schedules,
        policies=policies,
        update=update,
        split_layers=split_layers,
        preparing=preparing,
        memory=config.memory,
        precision=config.precision,
        budget_s=budget_s,
        profiling_s=profiling_s,
        fresh=fresh,
        stale=config.stale,
        lossy=config.lossy_parts,
        islands=islands,
        outer=outer,
        interruptible=True,
    )
    _, simulation = predict(planned.problem, planned.plan, overlap=overlap)  # with details, which a search leaves out
    return PlanForecast(
        plan=planned.plan,
        simulation=simulation,
        problem=planned.problem,
        candidates=planned.result.candidates,
        delays=delays_of(job[2], config.correction),
        islands=planned.islands,
        modes=planned.modes,
        interrupted=planned.interrupted,
        measured=planned.profile.measured,
        made=replace(planned, captures=None),
    )


def probe_modes(
    config: PlanConfig, data: Data, pool: Pool, found: PlanForecast, say: Callable[[str], None] = lambda text: None
) -> PlanForecast:
    """Train for a few steps in each way that was planned, and return the forecast with the losses on held-out data.

    All train from the same weights over the same batches, so that they have seen the same samples.

    Args:
        config: The options, resolved, with the number of steps.
        data: The data set.
        pool: The devices.
        found: The forecast.
        say: Function that prints a message about slow work.

    Raises:
        UsageError: A device is emulated without computing.
        OneboxError: A worker failed.
    """
    idle = [device.number for device in pool.devices if device.kind == "sim"]
    if idle:
        raise UsageError(
            f"--probe {config.probe}: device {idle[0]} is a sim device, which computes nothing; leave it out"
        )
    modes = []
    for mode in found.modes:
        if mode.plans:
            say(f"probe: {config.probe} steps, {mode.name}")
            modes.append(replace(mode, loss=_probed_loss(config, data, pool, mode, found.islands)))
        else:
            modes.append(mode)
    return replace(found, modes=tuple(modes))


def _probed_loss(
    config: PlanConfig, data: Data, pool: Pool, mode: TrainingMode, islands: IslandsPlanning | None
) -> float:
    """Return the loss on held-out data after the steps of a probe."""
    model, steps = make_model(config, data), config.probe or 0
    joined = islands if mode.name == "islands" else None
    with Trainer(
        model,
        make_loss(config),
        make_optimizer(config, model),
        pool=pool,
        plan=mode.plans[0] if joined is None else list(mode.plans),
        precision=config.precision,
        seed=config.seed,
        lossy=config.lossy_parts,
        loss_reduction="mean" if config.loss is None else None,  # None: checked before the first step
        recovery=None,
        islands=None if joined is None else joined.islands,
        outer=None if joined is None else replace(joined.outer, quorum=None, grace_s=Outer.grace_s),  # all are awaited
    ) as trainer:
        batches = Feed(data.train, batch_size=config.batch, seed=config.seed, upload=trainer.upload)
        for epoch in itertools.count():
            with batches.epoch(epoch) as each:
                for uploaded in itertools.islice(each, steps - trainer.steps_done):
                    trainer.step(uploaded)
            if trainer.steps_done >= steps:
                break
        if joined is not None:
            trainer.synchronize()
        with Feed(data.test, batch_size=_TESTED, shuffle=False).epoch(0) as each:
            return trainer.evaluate(itertools.islice(each, _TESTED_BATCHES)).loss


def predict_plan(
    config: StalenessConfig, data: Data, pool: Pool, plan: Plan, *, preparing: float = 0.0, fresh: bool = False
) -> PlanForecast:
    """Measure, and predict a given plan.

    Args:
        config: The options, resolved.
        data: The data set.
        pool: The devices.
        plan: The plan; its own prediction is ignored.
        preparing: Cores of this machine that the preparation of batches keeps busy.
        fresh: Whether to measure again what is cached.

    Raises:
        UsageError: The plan is not for this model and pool, or its schedule cannot be run.
    """
    strangers = [device for device in plan.devices if device >= len(pool)]
    if strangers:
        raise UsageError(f"the plan uses device {strangers[0]}, but the pool has {len(pool)}, numbered from 0")
    job = job_of(config, data)
    optimizer, images, labels = job[2:]
    if plan.micro_batch is not None and plan.micro_batch > len(labels):
        raise UsageError(f"the plan has micro-batches of {plan.micro_batch}, but the batch has {len(labels)} samples")
    sizes = sorted({part.size for part in plan.micro_batches(len(labels))})
    profile, captures = profile_model(
        *job,
        pool=pool,
        sizes=sizes,
        precision="auto" if plan.narrow and config.precision == "fp32" else config.precision,
        fresh=fresh,
    )
    links = pool_links(pool, fresh=fresh)
    late = delays_of(optimizer, config.correction)
    problem = make_problem(
        profile,
        pool.devices,
        links,
        batch=len(labels),
        micro_batches=sizes,
        preparing=preparing,
        staleness=int(plan.late),
        versions=2 + extra_copies(late),
    )
    if plan.lossy:
        problem = with_coding_speeds(problem, pool, fresh=fresh)
    if plan.split:
        ranks, batch = sorted({stage.ranks for stage in plan.stages} - {1}), as_batch(images, labels)
        problem = replace(problem, splits=split_costs(captures, batch, sizes, problem, ranks, profile.times))
    if plan.schedule == "table":
        edges = [(edge.source, edge.target) for edge in stage_work(problem, plan).edges]
        validate(Schedule.parse(plan.table), plan.routes(problem.batch), edges)
    predicted, simulation = predict(problem, plan)
    counted = TrainingJob(
        captures=captures,
        optimizer=optimizer,
        batch=as_batch(images, labels),
        devices=pool.devices,
        links=pool.links,
        plain_links=pool.plain_links,
        delay=late,
    )
    plan = with_peaks(msgspec.structs.replace(plan, predicted=predicted), counted.peaks(plan))
    return PlanForecast(plan=plan, simulation=simulation, problem=problem, delays=late, measured=profile.measured)


def plan_of_run(
    config: TrainConfig, folder: RunFolder, data: Data, say: Callable[[str], None] = lambda text: None
) -> tuple[Plan | None, PlanForecast | None]:
    """Return the plan of a run, and its forecast if it was searched for here.

    A resumed run uses the plan in its folder, or another one with the same micro-batches. ``auto`` opens the devices
    for planning, and closes them again.

    Args:
        config: The options, resolved.
        folder: The run's folder.
        data: The data set.
        say: Function that prints a message about slow work.

    Raises:
        UsageError: The plan cannot be read, or would change the computation of a resumed run.
        PlanError: Nothing fits.
    """
    if config.plan in (None, DATA_PARALLEL) or config.islands is not None:  # the trainer plans for each island
        return None, None
    before = read_config(config.resume) if config.resume is not None else None
    if before is not None and before.plan == config.plan:
        return Plan.read(folder.plan), None
    size = None
    if before is not None:
        parallel = before.plan == DATA_PARALLEL or not folder.plan.exists()
        size = before.micro_batch if parallel else Plan.read(folder.plan).micro_batch
    found = None
    if config.plan == "auto":
        say("planning: the model, the devices and the links are measured unless they are known")
        with open_pool(
            config.pool, threads=config.threads, memory=config.memory, plain_links=config.plain_links
        ) as pool:
            # Transfers to a host's memory at the end of a step cannot continue in the next one.
            policies = [
                policy for policy in ACTIVATION_POLICIES if policy not in OFFLOADING_POLICIES or not config.overlap
            ]
            sizes = [size] if size else None
            found = search_plan(
                config,
                data,
                pool,
                micro_batches=sizes,
                policies=policies,
                split_layers=not config.adaptive,
                profiling_s=PROFILING_S,
                overlap=config.overlap,
            )
        if found.measured < 1:
            say(f"{profile_line(found.measured)}; onebox plan measures everything")
        if found.interrupted:
            say(INTERRUPTED)
        plan = found.plan
    else:
        plan = Plan.read(Path(config.plan).expanduser())
    check_staleness(config, plan)
    if before is not None and plan.micro_batch != size:
        raise UsageError(
            f"--plan {config.plan} has micro-batches of {plan.micro_batch or 'a share'}, the run to be resumed of "
            f"{size or 'a share'}; that would change what is computed"
        )
    return plan, found


def check_staleness(config: TrainConfig, plan: Plan) -> None:
    """Require that a plan and a run agree about late gradients.

    Raises:
        UsageError: Only one of them has late gradients.
    """
    if plan.late and not config.staleness:
        raise UsageError(
            f"--plan {config.plan} has the schedule {ASYNC}, with which gradients are applied a step late: train it "
            "with --staleness 1, or make an exact plan"
        )
    if config.staleness and config.plan != "auto" and len(plan.stages) > 1 and not plan.late:
        raise UsageError(
            f"--staleness 1 needs a plan with the schedule {ASYNC}, and --plan {config.plan} has {plan.schedule}: "
            "onebox plan --staleness 1 makes one; or leave --staleness out"
        )


def write_plan(path: Path, plan: Plan, flag: str = "--out") -> None:
    """Write a plan file.

    Raises:
        UsageError: It cannot be written.
    """
    write_output(flag, path, plan.to_json().encode())
