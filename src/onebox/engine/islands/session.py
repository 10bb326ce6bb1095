"""A run of islands: one session for each, and the outer optimizer that joins them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onebox.cost import DeviceGroups
from onebox.engine.compile.compiler import CompiledStep, Compiler
from onebox.engine.data.batch_transfer import WorkerBatch
from onebox.engine.data.prefetch import BatchPrefetcher, UploadedBatch
from onebox.engine.islands.division import divided, island_seed
from onebox.engine.islands.island_uploads import IslandUploads
from onebox.engine.islands.islands_state import IslandsStart, IslandsTransfer, WholeTransfer
from onebox.engine.islands.outer_layout import due_fragments, global_bytes
from onebox.engine.islands.outer_optimizer import OuterOptimizer, averaged_buffers
from onebox.engine.memory.simulator import InitialContents
from onebox.engine.recovery.manager import RecoveryManager
from onebox.engine.session import TrainingSession
from onebox.engine.state.checkpoint_files import IslandsEntry
from onebox.engine.state.remote import RemoteState
from onebox.engine.state.transfer import StateChanges
from onebox.engine.steps.evaluation import evaluate
from onebox.engine.steps.launch import StepSettings
from onebox.engine.steps.link_use import LinkUse
from onebox.engine.steps.observer import StepObserver
from onebox.engine.steps.results import Evaluation, StepLoss, StepValues, TraceEvent
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures
from onebox.engine.workload.loss_reduction import normalisers, shares_of, total_of
from onebox.errors import OneboxError, ReplicasParted, UsageError
from onebox.plan import MicroBatch, Plan
from onebox.pool import Pool, WorkerReply
from onebox.trainer_options import Outer, Staging


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandPlans:
    """Plan of each island, and the islands' shares of a batch.

    Args:
        plans: The plans.
        shares: One weight for each.
    """

    plans: tuple[Plan, ...]
    shares: tuple[float, ...]


_NOTHING = 1e-9
"""Weight of samples whose targets weigh nothing: an island that had only such ones has made its steps nevertheless."""

ResolveIslands = Callable[[Captures, Batch, RemoteState], IslandPlans]
"""Returns plans and shares, given the captured model, the first batch, and a state to measure with."""


class IslandsSession:
    """The state of a trainer of islands on a pool; its interface is that of
    :class:`~onebox.engine.session.TrainingSession`.

    Args:
        pool: The pool.
        islands: Devices of each island.
        outer: Options of the outer optimizer.
        resolve: Returns plans and shares with the first batch.
        captures: The captured model.
        states: State of each island on its workers.
        settings: Settings shared by all steps.
        staging: Memory for batches beside a step's.
        step: Number of steps done before, by the run that is resumed.
        start: State of the islands in its checkpoint.
        saved: Path of the checkpoint.
    """

    adaptive = None
    snapshots = None

    def __init__(
        self,
        pool: Pool,
        islands: DeviceGroups,
        outer: Outer,
        resolve: ResolveIslands,
        captures: Captures,
        states: Sequence[RemoteState],
        settings: StepSettings,
        staging: Staging,
        *,
        step: int = 0,
        start: IslandsStart | None = None,
        saved: Path | None = None,
    ) -> None:
        self.steps_done = step
        self.captures = captures
        self.islands = islands
        self.outer = outer
        self.plans: tuple[Plan, ...] = ()
        """The plan of each island, once the first batch is known."""
        self._pool = pool
        self._resolve = resolve
        self._states = states
        self._settings = settings
        self._start = start
        self._shares: tuple[float, ...] = ()
        begun = start.entry.samples if start else [[0.0] * len(islands)] * outer.fragments
        self._samples = [list(own) for own in begun]
        self._due = list(start.entry.due) if start else [0] * outer.fragments
        """For each fragment the number of steps after which its sums are applied; 0 if none have begun."""
        self._optimizer: OuterOptimizer | None = None
        self._error: Exception | None = None
        prefetchers = [BatchPrefetcher(pool, staging.ahead_bytes, staging.cache_bytes) for _ in islands]
        self._sessions = [
            TrainingSession(
                pool,
                functools.partial(self._plan_of, place),
                captures,
                state,
                dataclasses.replace(settings, seed=island_seed(settings.seed, place)),
                prefetcher,
                recovery=None,
                step=step,
                saved=saved,
                beside=self._outer_bytes,
            )
            for place, (state, prefetcher) in enumerate(zip(states, prefetchers, strict=True))
        ]
        self.uploads = IslandUploads(prefetchers, lambda batch: divided(batch, self._shares) if self._shares else None)
        self.transfer = IslandsTransfer(
            pool, self._sessions, states, start, lambda: [place for place, due in enumerate(self._due) if due]
        )
        self.whole_transfer = WholeTransfer(pool, states[0], self.transfer)
        """Reads what a checkpoint holds."""

    def _plan_of(self, island: int, captures: Captures, batch: Batch) -> Plan:
        return self.plans[island]

    def _outer_bytes(self, compiler: Compiler) -> Mapping[int, int]:
        """Return the bytes of global values and of the outer optimizer's state on an island's workers."""
        averaged = averaged_buffers(compiler)
        specs = {name: compiler.state.spec(name) for name in (*compiler.trained, *averaged)}
        copies = 1 + bool(self.outer.momentum) + bool(self.outer.overlap)
        return global_bytes(compiler.holdings, compiler.trained, averaged, specs, copies)

    @property
    def recovery(self) -> RecoveryManager:
        """The supervisor of what the run does on its workers; it recovers from nothing."""
        return self._sessions[0].recovery

    @property
    def error(self) -> Exception | None:
        """The failure that made the state on the workers void, if there was one."""
        return next((each for each in (self._error, *(own.error for own in self._sessions)) if each is not None), None)

    @property
    def begun(self) -> bool:
        """True if the state is on the workers rather than in the user's model."""
        return self._sessions[-1].begun or self.error is not None

    @property
    def plan(self) -> Plan | None:
        """The plan of the first island; ``None`` before it is known."""
        return self.plans[0] if self.plans else None

    def subscribe(self, observer: StepObserver) -> None:
        """Call an observer at the events of the first island's steps."""
        self._sessions[0].subscribe(observer)

    def share_captures(self, captures: Captures) -> None:
        """Use the captures of another trainer of an equal model instead of own ones.

        Raises:
            UsageError: The model has been captured.
        """
        for session in self._sessions:
            session.share_captures(captures)
        self.captures = captures

    # ---- steps

    def step(self, batch: Batch, uploaded: UploadedBatch | None = None) -> StepLoss:
        """Begin a step of every island, and the outer step that follows it, if one is due; see :meth:`Trainer.step`."""
        uploads = () if uploaded is None else self.uploads.claim(uploaded)
        parts = self._set_up(batch, steps=True)
        number, losses = self.steps_done, list[StepLoss]()
        weights = [0.0 if part is None else self._weight(part) for part in parts]
        for place, (session, part) in enumerate(zip(self._sessions, parts, strict=True)):
            if part is None:
                continue
            session.steps_done = number  # it may have had no samples in the step before
            try:
                losses.append(session.step(part, uploads[place] if uploads else None))
            except BaseException as error:
                if losses or session.steps_done != number:  # some islands have the step and others not
                    self._fail(error if isinstance(error, Exception) else _interrupted(f"step {number}"))
                raise
        for own in self._samples:
            for place, weight in enumerate(weights):
                own[place] += weight
        self.steps_done += 1
        result = self._combined(number, losses, [weight for part, weight in zip(parts, weights, strict=True) if part])
        self._apply([place for place, due in enumerate(self._due) if due == self.steps_done])
        for fragment in due_fragments(self.steps_done, self.outer.every, self.outer.fragments):
            self._outer_step(fragment, overlap=self.outer.overlap)
        return result

    def _weight(self, part: Batch) -> float:
        """Return the weight of a part of a batch in averages: its samples, or the user's weight of it."""
        reduction = self.captures.recipe.reduction
        whole = [MicroBatch(index=0, start=0, size=part.size)]
        found = float(part.size) if reduction == "sum" else normalisers(reduction, part, whole)[0]
        return found or _NOTHING

    def _combined(self, number: int, losses: Sequence[StepLoss], weights: Sequence[float]) -> StepLoss:
        """Return the loss of a step from those of its islands."""
        fractions = shares_of(weights, [1] * len(losses))
        factors = (1.0,) * len(losses) if self.captures.recipe.reduction == "sum" else fractions

        def finish(_: list[WorkerReply]) -> StepValues:
            values = [loss.values() for loss in losses]
            norms = [each.gradient_norm for each in values]
            known = [norm for norm in norms if norm is not None]
            return StepValues(
                loss=total_of([each.loss for each in values], factors),
                gradient_norm=total_of(known, fractions) if len(known) == len(norms) else None,
            )

        result = StepLoss(number, lambda action: action(), self.drain)
        result.expect([future for loss in losses for future in loss.pending], finish)
        return result

    def _apply(self, fragments: Iterable[int]) -> None:
        """Apply the sums of outer steps that have begun, if there are any."""
        for fragment in fragments:
            assert self._optimizer is not None
            self._due[fragment] = 0
            with self._voiding("an outer step"):
                self._optimizer.apply(fragment, self.steps_done)

    def _outer_step(self, fragment: int, *, overlap: int = 0) -> None:
        """Begin an outer step of a part of the model, which is applied so many steps later."""
        samples = self._samples[fragment]
        if self._optimizer is None or not any(samples):
            return
        weights = [own / sum(samples) for own in samples]
        self._samples[fragment] = [0.0] * len(samples)
        with self._voiding("an outer step"):
            begin = self._optimizer.begin if overlap else self._optimizer.step
            begin(fragment, weights, [plan.devices for plan in self.plans], self.steps_done)
            self._due[fragment] = self.steps_done + overlap if overlap else 0
            every = self._settings.check_every
            if every and self.steps_done // every != (self.steps_done - self.outer.every) // every:
                self._optimizer.check()

    def synchronize(self) -> None:
        """Make outer steps now, with the inner steps since the last ones; see :meth:`Trainer.synchronize`."""
        self.drain()
        self._apply([place for place, due in enumerate(self._due) if due])
        for fragment in range(self.outer.fragments):
            self._outer_step(fragment)
        self.wait(0)

    @property
    def in_step(self) -> bool:
        """True if there was no inner step since the last outer steps, so that all islands have the global values."""
        return not self.outer.overlap and not any(any(own) for own in self._samples)

    def drain(self) -> None:
        """Finish the newest step and wait for it.

        Raises:
            OneboxError: It failed.
        """
        self._require()
        for session in self._sessions:
            session.drain()

    def wait(self, most: int) -> None:
        """Wait until at most a given number of steps are in flight, and for the outer steps so far if it is 0.

        Raises:
            OneboxError: One of them failed.
        """
        self._require()
        for session in self._sessions:
            session.wait(most)
        if not most and self._optimizer is not None:
            with self._voiding("an outer step"):
                self._optimizer.take()

    def evaluate(self, batches: Iterable[Batch], metrics: Sequence[str]) -> Evaluation:
        """Return the loss and metrics of the global parameters over batches, which islands take in turn; see
        :meth:`Trainer.evaluate`."""
        turns = itertools.cycle(self._sessions)
        owners: dict[CompiledStep, int] = {}

        def prepare(batch: Batch) -> CompiledStep:
            session = next(turns)
            compiled = session.evaluation(batch)
            owners[compiled] = self._sessions.index(session)
            return compiled

        def parts(batch: Batch, compiled: CompiledStep) -> Mapping[int, WorkerBatch]:
            return self._sessions[owners[compiled]].uploads.parts_beside(batch, compiled)

        left = iter(batches)
        first = next(left, None)
        if first is None:
            raise UsageError("evaluate() was given no batch")
        self._set_up(first, steps=False)
        with self.uploads.out_of_the_way(), self._globally():
            return evaluate(
                itertools.chain([first], left),
                pool=self._pool,
                prepare=prepare,
                parts=parts,
                metrics=metrics,
                numerics=self._settings.numerics,
                in_flight=self._settings.in_flight * len(self._sessions),
                retry=self.recovery.run,
                poisoning=self.recovery.poisoning,
            )

    @contextlib.contextmanager
    def _globally(self) -> Iterator[None]:
        """Let islands have the global values for the duration of the context."""
        if self._optimizer is None or self.in_step:
            yield
            return
        with self._voiding("an evaluation"):
            self._optimizer.enter()
        try:
            yield
        finally:
            with self._voiding("the end of an evaluation"):
                self._optimizer.leave()

    # ---- observation

    def events(self) -> list[TraceEvent]:
        """Return the workers' activity in the last steps; see :meth:`Trainer.events`."""
        return [event for session in self._sessions for event in session.events()]

    @property
    def links(self) -> tuple[LinkUse, ...]:
        """The use of links between hosts so far, of each island; see :attr:`Trainer.links`."""
        return tuple(used for session in self._sessions for used in session.links)

    @property
    def overlap(self) -> Any:
        """Overlapping remains of the first island's steps."""
        return self._sessions[0].overlap

    def peaks(self, batch: Batch, *, ahead: int = 0) -> dict[int, int]:
        """Return the peak bytes of each worker in a step with a batch."""
        parts = zip(self._sessions, self._set_up(batch, steps=True), strict=True)
        return {d: peak for own, part in parts if part for d, peak in own.peaks(part, ahead=ahead).items()}

    def contents(self, batch: Batch) -> dict[int, InitialContents]:
        """Return the memory contents of each worker at the beginning of a step with a batch."""
        parts = zip(self._sessions, self._set_up(batch, steps=True), strict=True)
        return {d: found for own, part in parts if part for d, found in own.contents(part).items()}

    def entry(self) -> IslandsEntry:
        """Return the description of the islands for a checkpoint."""
        if not self.plans and self._start is not None:
            return self._start.entry
        return IslandsEntry(
            devices=self.islands,
            outer=self.outer,
            shares=self._shares,
            plans=self.plans,
            samples=tuple(tuple(own) for own in self._samples),
            due=tuple(self._due),
        )

    # ---- user changes

    def change(self, changes: StateChanges) -> None:
        """Change the state on the workers of all islands, and the global values.

        Args:
            changes: The changes.

        Raises:
            OneboxError: A worker was lost.
        """
        with self._voiding("a change by hand"):
            for session in self._sessions:
                session.change(changes)
            if self._optimizer is not None:
                own = {n: tensor for n, tensor in changes.tensors.items() if n in self._optimizer.names}
                self._optimizer.remote.write(own)

    # ---- setting up

    def _set_up(self, batch: Batch, *, steps: bool) -> tuple[Batch | None, ...]:
        """Plan and install for the first batch; return each island's part of a batch."""
        self._require()
        if not self.plans:
            if batch.size < len(self.islands):
                raise UsageError(
                    f"the first batch has {batch.size} sample(s) for {len(self.islands)} islands; begin with one that "
                    "has at least a sample for each"
                )
            self._pool.follow_default_type()
            found = self._resolve(self.captures, self.captures.stamped(batch), self._states[0])
            self.plans, self._shares = found.plans, found.shares
        parts = divided(batch, self._shares)
        if not self.begun:
            for state in self._states[1:]:
                if self._start is None:
                    state.use_optimizer_state(self._states[0].remembered)
            for session, part in zip(self._sessions, parts, strict=True):
                if part is None:
                    raise UsageError(
                        f"the first batch has {batch.size} samples, of which an island with a share of "
                        f"{min(self._shares):.0%} gets none; begin with a larger one, or give Outer(shares=...)"
                    )
                session.set_up(self.captures.stamped(part), steps=steps)
            if self._start is not None:
                for state, tensors in zip(self._states, self._start.tensors, strict=True):
                    state.write({name: tensor for name, tensor in tensors.items() if name in state.held})
        if steps or self._start is not None:
            self._begin_outer()
        return parts

    def _begin_outer(self) -> None:
        """Install the outer optimizer, unless it is there."""
        if self._optimizer is not None:
            return
        recipe, start = self.captures.recipe, self._start.outer if self._start else None
        installed = [session.installed for session in self._sessions]
        with self._voiding("the installation of the outer optimizer"):
            self._optimizer = OuterOptimizer(
                self._pool,
                recipe.model,
                recipe.loss,
                installed,
                self._states,
                self.outer,
                start,
            )
            if self._start is not None and self._start.sums:
                self._optimizer.bring_sums(self._start.sums)
        self.transfer.outer = self._optimizer

    @contextlib.contextmanager
    def _voiding(self, what: str) -> Iterator[None]:
        """Make the state void if a part of the context fails, or is interrupted."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise
        except BaseException:  # such as KeyboardInterrupt
            self._fail(_interrupted(what))
            raise

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error

    def _require(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Free everything on the workers."""
        if self._optimizer is not None:
            with contextlib.suppress(OneboxError):
                self._optimizer.close()
        for session in self._sessions:
            session.close()


def _interrupted(what: str) -> ReplicasParted:
    return ReplicasParted(f"{what} was interrupted; make another trainer, or resume from the last checkpoint")


Session = TrainingSession | IslandsSession
"""A run of a trainer."""
