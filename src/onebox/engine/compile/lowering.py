"""Lowering: a step of a plan becomes one routine for each worker. Pure.

A worker executes its row of the schedule (``worker_program.py``). The other work of a step is in ``update``:
gradients (accumulate, sum over holders, clip), the optimizer's step, buffers that replicas share, and the windows of
steps that overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from onebox.engine.compile.batch_job import BatchJob, BufferNumbers
from onebox.engine.compile.message_order import in_send_order
from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder, StepRoutine
from onebox.engine.compile.update.async_window import DueUpdate, LateUpdate, Window, WindowWeights, WorkerWindows
from onebox.engine.compile.update.batchnorm import BatchNormStatistics, WorkerStatistics
from onebox.engine.compile.update.gradients import Gradients, WorkerGradients
from onebox.engine.compile.update.optimizer_update import WorkerUpdate
from onebox.engine.compile.update.reductions import ReductionQueue, RoutineScope
from onebox.engine.compile.value_numbers import ValueNumbers
from onebox.engine.compile.worker_program import CodedValues, WorkerProgramBuilder
from onebox.engine.partition.gradient_buckets import CodecState
from onebox.engine.partition.phase_programs import PhaseProgram
from onebox.engine.partition.sharding_spec import Members, ShardingSpec, all_workers_group
from onebox.engine.workload.emulated_costs import EmulatedCosts
from onebox.graph import ModelPrograms
from onebox.plan import Action, Plan
from onebox.plan.model.window import drain_of, fill_of
from onebox.wire.protocol.instructions import Vote


class Lowering:
    """Lowers the steps of a plan.

    Args:
        plan: The plan.
        holdings: The sharding spec.
        numbers: Shared numbers.
        trained: Names of the trained parameters, in the optimizer's order.
        model: Returns the programs for a micro-batch size.
        max_norm: Gradient clipping norm; 0 for none.
        costs: Costs of actions on emulated devices.
        gpus: The workers that are GPUs.
        untagged: Members of the groups whose messages have no tags, by number: they are received in the order in
            which they are sent.
        hosts: Host of each worker.

    Raises:
        CaptureError: A buffer changes in a way that replicas cannot share.
    """

    def __init__(
        self,
        plan: Plan,
        holdings: ShardingSpec,
        numbers: BufferNumbers,
        *,
        trained: Sequence[str],
        model: ModelPrograms,
        max_norm: float,
        costs: EmulatedCosts,
        gpus: Collection[int] = (),
        untagged: Mapping[int, Members] = MappingProxyType({}),
        hosts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._plan = plan
        self._far = {
            worker: frozenset() if untagged else frozenset(other for other in hosts if hosts[other] != host)
            for worker, host in hosts.items()
        }
        self._costs = costs
        self._holdings = holdings
        self._numbers = numbers
        self._untagged = untagged
        self._trial = numbers.new()  # the number under which failures of evaluations are counted
        self._gradients = Gradients(holdings, numbers, trained=trained, model=model, max_norm=max_norm, gpus=gpus)
        self._coded = CodedValues([stage.activations for stage in plan.stages])
        self._moved: dict[str, int] = {}
        BatchNormStatistics(holdings, numbers, model, self._moved)  # refuses buffers that replicas cannot share

    def missing(self, programs: ModelPrograms) -> str:
        """Return a parameter or buffer that programs read on a device that lacks it, if there is one."""
        for phase, program in programs.phases.items():
            needed = {device for replica in self._plan.stages[phase.stage].replicas for device in replica}
            for port in program.inputs:
                if port.kind in ("parameter", "rounded", "buffer"):
                    name = str(port.name)
                    if needed.difference(self._holdings.holders.get(name, ())):
                        return name
        return ""

    @property
    def gradients(self) -> dict[int, str]:
        """Parameter of each gradient buffer, for micro-batches and their sums."""
        shared = self._gradients
        fresh = {number: f"{name}, of one micro-batch" for name, number in shared.fresh.items()}
        late = {number: f"{name}, of the step before" for name, number in shared.late.items()}
        return fresh | late | {number: name for name, number in shared.sums.items()}

    def residuals(self, worker: int) -> dict[int, CodecState]:
        """Return the buffers that a worker's lossy codecs keep from step to step."""
        return self._gradients.residuals(worker)

    @property
    def replicated(self) -> Iterable[Members]:
        """The groups of which each member computes the result of sums by itself, which must have the same bits."""
        return self._gradients.replicated

    def train(self, job: BatchJob) -> dict[int, StepRoutine]:
        """Return the routine of each worker for a training step."""
        values, shared = ValueNumbers(job, self._numbers.new, self._holdings.ranks), self._statistics(job)
        found = {}
        for worker in self._plan.devices:
            row = self._row(worker, job, values, job.schedule.rows.get(worker, ()))
            scope = self._scope(row, worker, job)
            statistics, gradients = WorkerStatistics(shared, scope), WorkerGradients(self._gradients, scope)
            rounding = row.round()
            row.run(lambda action, own=gradients: own, [statistics], moved=statistics.moved)  # type: ignore[misc]
            row.offload(gradients.own if self._plan.update == "host" else ())
            rounding.finish()
            scope.exchanges.finish()
            statistics.finish()
            self._vote(row.builder)
            WorkerUpdate(self._gradients, row.builder, worker).finish()
            row.answer()
            found[worker] = row.builder.finish(row.leaves, row.results, self._numbers.optimizer)
        return self._alone(found)

    def _vote(self, builder: RoutineBuilder, *, age: int = 0) -> None:
        """Add the vote of all workers on a step, which puts new contents in the place of lasting ones.

        Args:
            builder: The routine.
            age: Age of the step: positive in a window that ends the step before, whose buffers have their new contents.
        """
        everybody = all_workers_group(self._plan.devices, self._numbers.groups)
        group = self._numbers.groups[everybody] if len(everybody) > 1 else 0
        renewed = ((), ()) if age else _renewed(builder)
        builder.add(Vote(self._numbers.optimizer, group, *renewed, age), InstructionLabel("vote"))

    def _keep(self, builder: RoutineBuilder, optimizer: int) -> None:
        """Put new contents in the place of the model's buffers without a vote of other workers: in an evaluation; and
        where a step ends in the next window, which reads them, and which others may have to come to before they vote.
        """
        if builder.renewed:
            vote = Vote(optimizer, 0, *_renewed(builder), final=False)
            builder.add(vote, InstructionLabel("vote"))

    def windows(self, job: BatchJob) -> dict[int, WorkerWindows]:
        """Return each worker's routines for overlapping steps; the job's schedule is that of a steady-state window."""
        values = ValueNumbers(job, self._numbers.new, self._holdings.ranks)
        fill, drain = fill_of(job.schedule).rows, drain_of(job.schedule).rows
        found = {}
        for worker in self._plan.devices:
            first = RoutineBuilder(self._numbers.new, self._numbers.program)
            filling = self._window(first, worker, job, values, fill.get(worker, ()), "fill")
            second = first.another()
            steady = self._window(second, worker, job, values, job.schedule.rows.get(worker, ()), "steady")
            draining = self._window(second.another(), worker, job, values, drain.get(worker, ()), "drain")
            assert filling.leaves == steady.leaves, "the windows of a step are given different things"
            found[worker] = (filling, steady, draining)
        return {
            worker: WorkerWindows(fill=filling, steady=steady, drain=draining)
            for worker, (filling, steady, draining) in self._in_order(found).items()
        }

    def _in_order(self, routines: Mapping[int, Sequence[StepRoutine]]) -> Mapping[int, Sequence[StepRoutine]]:
        """Return the routines or windows of each worker with messages in one order, where they have no tags."""
        return in_send_order(routines, self._untagged, self._numbers.new) if self._untagged else routines

    def _alone(self, routines: Mapping[int, StepRoutine]) -> dict[int, StepRoutine]:
        """Return routines of one step in order."""
        return {w: own for w, (own,) in self._in_order({w: (own,) for w, own in routines.items()}).items()}

    def _window(
        self,
        builder: RoutineBuilder,
        worker: int,
        job: BatchJob,
        values: ValueNumbers,
        actions: Sequence[Action],
        window: Window,
    ) -> StepRoutine:
        row = self._row(worker, job, values, actions, builder, windowed=True)
        update = None if window == "fill" else WorkerUpdate(self._gradients, builder, worker, age=1)
        if self._numbers.previous:
            self._stale(row, job, worker, window, update)
        else:
            self._exact(row, job, worker, window, update)
        row.answer()
        return builder.finish(row.leaves, row.results, self._numbers.optimizer)

    def _stale(
        self, row: WorkerProgramBuilder, job: BatchJob, worker: int, window: Window, update: WorkerUpdate | None
    ) -> None:
        """Add a window that uses older weights, and the rest of the previous step."""
        scope, shared = self._scope(row, worker, job), self._gradients
        weights = WindowWeights(self._numbers, window)
        late = None if window == "fill" else WorkerGradients(shared, scope, half="late")
        statistics = None if window == "drain" else WorkerStatistics(self._statistics(job), scope)
        early = None if window == "drain" else WorkerGradients(shared, scope, half="early")
        vote, early_vote = functools.partial(self._vote, row.builder, age=1), self._votes_early
        updating = LateUpdate(update, vote, weights, row.actions, early=early_vote)
        before = row.rounded_before()
        rounding = None if window == "drain" else row.round_for_step(weights.number)
        scope.exchanges.flush()
        updating.begin()
        row.run(
            lambda action: late if action.micro_batch < 0 else early,  # type: ignore[arg-type, return-value]
            [before, updating, *([] if statistics is None else [statistics])],
            moved={} if statistics is None else statistics.moved,
            weight_of=weights.number,
        )
        if rounding is not None:
            rounding.finish(before.handed_on)
        scope.exchanges.finish()
        if statistics is not None:
            statistics.finish()
        updating.finish()
        self._keep(row.builder, self._numbers.optimizer)
        if early is not None:
            row.hand_on({**early.handed_on, **before.handed_on})

    @property
    def _votes_early(self) -> bool:
        """True if a vote on the step before begins as early as it can: a worker's window may wait for what another one
        sends in its next window. Not where all workers share a stage: they sum its buffers at some place of the window,
        and have to vote before or after it.
        """
        everybody = {*self._plan.devices}
        shared = any(everybody == {one for replica in stage for one in replica} for stage in self._holdings.stages)
        return len(self._plan.stages) > 1 and not shared

    def _exact(
        self, row: WorkerProgramBuilder, job: BatchJob, worker: int, window: Window, update: WorkerUpdate | None
    ) -> None:
        """Add a window that uses the new weights, and the update of the previous step."""
        updating = DueUpdate(update, lambda action: _read(job.part(worker, action)))
        if window == "drain" or self._plan.split or self._plan.narrow:
            updating.finish()
        if window == "drain":
            return
        scope = self._scope(row, worker, job, before=updating.finish)
        statistics = WorkerStatistics(self._statistics(job), scope)
        gradients = WorkerGradients(self._gradients, scope)
        rounding = row.round()
        row.run(lambda action: gradients, [updating, statistics], moved=statistics.moved)
        rounding.finish()
        scope.exchanges.finish()
        updating.finish()
        statistics.finish()
        self._vote(row.builder)

    def _statistics(self, job: BatchJob) -> BatchNormStatistics:
        return BatchNormStatistics(self._holdings, self._numbers, job.programs(0), self._moved)

    def _scope(
        self, row: WorkerProgramBuilder, worker: int, job: BatchJob, before: Callable[[], None] = lambda: None
    ) -> RoutineScope:
        """Return a worker's part of a step; ``before`` adds the instructions that precede its reductions."""
        coding = [members for members, _ in self._gradients.coded]
        shared, alone = [*self._holdings.shared_groups, *coding], len(self._plan.stages) == 1 and not self._plan.split
        queue = ReductionQueue(row.builder, worker, self._numbers.groups, shared=shared, early=alone, before=before)
        return RoutineScope(builder=row.builder, worker=worker, actions=row.actions, job=job, exchanges=queue)

    def evaluate(self, job: BatchJob, *, apart: bool = False) -> dict[int, StepRoutine]:
        """Return the routine of each worker for an evaluation; its schedule is forward only.

        Args:
            job: The job.
            apart: Whether its programs are not kept for other routines.
        """
        values = ValueNumbers(job, self._numbers.new, self._holdings.ranks)
        found = {}
        for worker in self._plan.devices:
            builder = RoutineBuilder(self._numbers.new) if apart else None
            row = self._row(worker, job, values, job.schedule.rows.get(worker, ()), builder, exact=True)
            rounding = row.round()
            row.run()
            rounding.finish()
            self._keep(row.builder, self._trial)
            row.answer()
            found[worker] = row.builder.finish(row.leaves, row.results, self._trial)
        return self._alone(found)

    def probe(self, job: BatchJob) -> dict[int, StepRoutine]:
        """Return the routine of each worker that changes no state and returns the squared 2-norm of its gradients.

        The norm precedes the losses. The routines use buffers of their own, and nothing is summed over workers.
        """
        values, found = ValueNumbers(job, self._numbers.new, self._holdings.ranks), {}
        for worker in self._plan.devices:
            actions = job.schedule.rows.get(worker, ())
            row = self._row(worker, job, values, actions, RoutineBuilder(self._numbers.new), exact=True)
            gradients = WorkerGradients(self._gradients, self._scope(row, worker, job), half="early")
            rounding = row.round()
            row.run(lambda action, own=gradients: own)  # type: ignore[misc]
            rounding.finish()
            gradients.norm()
            self._keep(row.builder, self._trial)
            row.answer()
            found[worker] = row.builder.finish(row.leaves, row.results, self._trial)
        return self._alone(found)

    def _row(
        self,
        worker: int,
        job: BatchJob,
        values: ValueNumbers,
        actions: Sequence[Action],
        builder: RoutineBuilder | None = None,
        *,
        exact: bool = False,
        windowed: bool = False,
    ) -> WorkerProgramBuilder:
        return WorkerProgramBuilder(
            worker,
            job,
            values,
            self._plan,
            self._numbers,
            costs=self._costs,
            ranks=self._holdings.ranks,
            builder=builder or RoutineBuilder(self._numbers.new, self._numbers.program),
            actions=actions,
            coded=None if exact else self._coded,
            far=() if windowed else self._far.get(worker, ()),
        )


def _renewed(builder: RoutineBuilder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the buffers with new contents of lasting ones, and these, which have them from here on."""
    found, builder.renewed = builder.renewed, {}
    return tuple(found.values()), tuple(found)


def _read(part: PhaseProgram) -> list[str]:
    """Return the parameters that a part reads."""
    return [str(port.name) for port in part.inputs if port.kind in ("parameter", "rounded")]
