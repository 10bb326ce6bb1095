"""The outer optimizer on the workers: global values and momentum, installed routines, and outer steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onebox.engine.compile.compiler import Compiler
from onebox.engine.compile.definition_numbers import DefinitionNumbers
from onebox.engine.compile.routine import StepRoutine
from onebox.engine.install.deferred_replies import DeferredReplies, begin_group_formation
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.install.program_cache import ProgramCache
from onebox.engine.islands.outer_layout import fragments_of, global_bytes, global_sharding, outer_buckets, outer_parts
from onebox.engine.islands.outer_program import BETWEEN_ISLANDS, WEIGHT, OuterCompiler, OuterNumbers, WorkerOuterStep
from onebox.engine.partition.sharding_spec import Members
from onebox.engine.partition.weight_versions import WeightVersions
from onebox.engine.state.move_executor import upload
from onebox.engine.state.moves import CLIENT, StateItem, StateLayout, plan_moves
from onebox.engine.state.pieces import Key, TensorSource
from onebox.engine.state.remote import RemoteState, StartState
from onebox.engine.state.transfer import StateTransfer
from onebox.engine.workload.parameter_groups import options_of
from onebox.errors import OneboxError, ReplicasParted
from onebox.pool import Pool, WorkerReply
from onebox.trainer_options import Outer
from onebox.wire import DTYPES, Hole, KernelSpec, SlotArgument, to_frame
from onebox.wire.protocol.eager import Operate
from onebox.wire.protocol.instructions import Free, Get
from onebox.wire.protocol.requests import Define, Instruction, Put, Run
from onebox.wire.protocol.responses import Digest

_COPY = KernelSpec(
    name="aten.copy_.default",
    args=(SlotArgument(0), SlotArgument(1)),
    kwargs={},
    inputs=2,
    floats=0,
    outs=(None,),
)
"""Overwrites its first tensor in place by the second."""

_BLEND = KernelSpec(
    name="aten.lerp_.Scalar",
    args=(SlotArgument(0), SlotArgument(1), Hole(0)),
    kwargs={},
    inputs=2,
    floats=1,
    outs=(None,),
)
"""Moves its first tensor in place towards the second, by a fraction of the way."""

_WAITING = 8
"""Most outer steps, or halves of them, whose replies are pending: a bound that inner steps in flight keep usually."""


_TIMED = 100
"""Sums of each fragment whose times are kept."""


def _sums_ns(routine: StepRoutine | None, answer: WorkerReply) -> int | None:
    """Return the nanoseconds from the first sum between islands that a worker began to the end of its last one."""
    if routine is None or not answer.times_ns:
        return None
    places = [place for place, label in enumerate(routine.labels) if label.name == BETWEEN_ISLANDS]
    times = [answer.times_ns[2 * place : 2 * place + 2] for place in places]
    return max(end for _, end in times) - min(start for start, _ in times) if times else None


def averaged_buffers(compiler: Compiler) -> tuple[str, ...]:
    """Return the buffers that islands average: floating-point ones that change with the data, as of batch norm."""
    return tuple(name for name in compiler.affine if DTYPES[compiler.state.spec(name).dtype].is_floating_point)


def outer_state_bytes(compiler: Compiler, outer: Outer) -> Mapping[int, int]:
    """Return the bytes of global values and of the outer optimizer's state on the workers of an island.

    Args:
        compiler: The compiler of the island's plan.
        outer: The outer optimizer.
    """
    averaged = averaged_buffers(compiler)
    specs = {name: compiler.state.spec(name) for name in (*compiler.trained, *averaged)}
    copies = 1 + bool(outer.momentum) + bool(outer.overlap)
    return global_bytes(compiler.holdings, compiler.trained, averaged, specs, copies)


class OuterOptimizer:
    """The outer optimizer of islands whose plans are installed.

    Its parameters are the global ones, on a leader of each island; all leaders of a parameter make the same update.

    Args:
        pool: The pool.
        model: The user's model.
        loss: The user's loss.
        installed: The installed plan of each island.
        locals_: State of each island.
        outer: The options.
        start: State of the outer optimizer in a checkpoint; ``None`` for a new one.
        trace: Whether workers report the times of sums.

    Raises:
        UsageError: Islands split a parameter differently.
        OneboxError: A worker was lost, or refuses something.
    """

    def __init__(
        self,
        pool: Pool,
        model: nn.Module,
        loss: Any,
        installed: Sequence[InstalledPlan],
        locals_: Sequence[RemoteState],
        outer: Outer,
        start: StartState | None,
        *,
        trace: bool = False,
    ) -> None:
        self._pool, self._trace = pool, trace
        self.sum_times_s: dict[int, deque[float]] = {}
        """For each fragment, seconds of its last sums, from when all islands had come until these had ended; none for
        sums that travel while islands go on, whose ends workers do not report."""
        holdings = [each.holdings for each in installed]
        named, trained = locals_[0].named, installed[0].trained
        self.trained = trained
        self.averaged = averaged_buffers(installed[0].compiler)
        names = [name for name in named.tensors if name in {*trained, *self.averaged}]
        parts = outer_parts(holdings, names)
        sgd = torch.optim.SGD(
            [named.tensors[name] for name in trained],
            lr=outer.lr,
            momentum=outer.momentum,
            nesterov=outer.momentum > 0,
        )
        self.remote = RemoteState(model, loss, sgd, pool, start)
        self.transfer = StateTransfer(pool, self.remote)
        specs = {name: named.spec(name) for name in names}
        buckets = outer_buckets(parts, specs, set(trained))
        leaders = dict.fromkeys(bucket.leaders for bucket in buckets if len(bucket.leaders) > 1)
        self._groups: dict[Members, int] = {members: pool.new_number() for members in leaders}
        self._optimizer, self._copy, self._blend = (self.remote.new_number() for _ in range(3))
        self._keep = outer.keep
        self._workers = tuple(itertools.chain.from_iterable(own.devices for own in holdings))
        self._holdings = global_sharding(parts, holdings)
        self._compiler = OuterCompiler(
            holdings=holdings,
            global_holdings=self._holdings,
            buckets=buckets,
            trained=trained,
            specs=specs,
            numbers=OuterNumbers(
                values=self.remote.named.numbers,
                local=[each.named.numbers for each in locals_],
                optimizer=self._optimizer,
                between=self._groups,
                within=lambda island, members: installed[island].group_of(members),
                new=self.remote.new_number,
            ),
        )
        self._programs = ProgramCache(pool, DefinitionNumbers(self.remote.new_number))
        self._fragments = [
            outer_buckets([part for part in parts if part.name in own], specs, set(trained))
            for own in map(set, fragments_of(names, outer.fragments))
        ]
        self._steps: dict[tuple[str, int], dict[int, WorkerOuterStep]] = {}
        self._around: tuple[dict[int, WorkerOuterStep], dict[int, WorkerOuterStep]] | None = None
        self._pending: list[DeferredReplies] = []
        self._bring(trained)

    def _bring(self, trained: tuple[str, ...]) -> None:
        try:
            asked = [
                begin_group_formation(self._pool, members, "workers", number)
                for members, number in self._groups.items()
            ]
            for each in asked:
                each.take()
            with self._pool.order:
                self.remote.upload(self._holdings)
                self.remote.define_optimizer(self._optimizer, trained, WeightVersions())
                for worker in self._workers:
                    self._pool.post(worker, [Define(self._copy, _COPY), Define(self._blend, _BLEND)])
        except BaseException:
            with contextlib.suppress(OneboxError):
                self.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        """The parameters and buffers that have global values."""
        return frozenset((*self.trained, *self.averaged))

    def step(self, fragment: int, weights: Sequence[float], workers_of: Sequence[Members], number: int) -> None:
        """Begin an outer step, which workers make when they come to it in their streams.

        Args:
            fragment: The part of the model.
            weights: Weight of each island in the average; they add up to 1.
            workers_of: The workers of each island.
            number: Number of inner steps so far.

        Raises:
            OneboxError: An earlier one failed, or a worker was lost.
        """
        self._begin("step", fragment, weights, workers_of, number)

    def begin(self, fragment: int, weights: Sequence[float], workers_of: Sequence[Members], number: int) -> None:
        """Begin the sums of an outer step, which travel while workers go on; see :meth:`step`."""
        self._begin("begin", fragment, weights, workers_of, number)

    def apply(self, fragment: int, number: int) -> None:
        """Apply the sums begun before, once workers have made the steps requested so far.

        Args:
            fragment: The part of the model.
            number: Number of inner steps so far.

        Raises:
            OneboxError: An earlier outer step failed, or a worker was lost.
        """
        self._settle()
        self._post(self._routines("apply", fragment), {}, number)

    def _begin(
        self,
        kind: Literal["step", "begin"],
        fragment: int,
        weights: Sequence[float],
        workers_of: Sequence[Members],
        number: int,
    ) -> None:
        self._settle()
        weight_of = {worker: weights[island] for island, own in enumerate(workers_of) for worker in own}
        timed = self.sum_times_s.setdefault(fragment, deque(maxlen=_TIMED)) if kind == "step" and self._trace else None
        self._post(self._routines(kind, fragment), weight_of, number, timed=timed)

    def _routines(self, kind: Literal["step", "begin", "apply"], fragment: int) -> dict[int, WorkerOuterStep]:
        """Return the parts of an outer step of a fragment, which workers have."""
        if (kind, fragment) not in self._steps:
            compiler = self._compiler
            make = {"step": compiler.step, "begin": compiler.begin, "apply": compiler.apply}[kind]
            self._steps[kind, fragment] = self._installed(make(self._fragments[fragment]))
        return self._steps[kind, fragment]

    def sums(self, fragments: Collection[int]) -> dict[Key, TensorSource]:
        """Return the locations of sums that have begun and are not applied.

        Args:
            fragments: Parts of the model of which there are such.
        """
        names = {name for place in fragments for bucket in self._fragments[place] for name in bucket.names}
        found = {}
        for key, source in self.transfer.sources().items():
            if key[0] not in names:
                continue
            pieces = []
            for piece in source.pieces:
                asked = piece.instruction
                assert isinstance(asked, Get)
                instruction = Get((self._compiler.sums[key[0]],), asked.first, asked.rows)
                pieces.append(dataclasses.replace(piece, instruction=instruction))
            found[key] = dataclasses.replace(source, pieces=tuple(pieces))
        return found

    def bring_sums(self, tensors: Mapping[str, Tensor]) -> None:
        """Upload sums that a checkpoint holds.

        Raises:
            OneboxError: A worker was lost.
        """
        own = self._holdings
        parts: dict[int, list[StateItem]] = {CLIENT: [StateItem(name, "", 0) for name in tensors]}
        after = {w: [StateItem(n, "", own.share(w, n)) for n in own.held_by(w, tensors)] for w in own.devices}
        moves = plan_moves(StateLayout(parts=parts), StateLayout(parts=after, placements=own.placements))
        upload(self._pool, moves, own.placements, tensors, self._compiler.sums, copy=True)

    def enter(self) -> None:
        """Put the global values in the place of each island's own, which are kept aside.

        Raises:
            OneboxError: A worker failed.
        """
        if self._around is None:
            self._around = self._installed(self._compiler.enter()), self._compiler.leave()
        self._post(self._around[0], {}, 0)
        self.take()

    def leave(self) -> None:
        """Undo :meth:`enter`.

        Raises:
            OneboxError: A worker failed.
        """
        assert self._around is not None
        self._post(self._around[1], {}, 0, after=lambda worker: [Free(self._compiler.aside(worker))])
        self.take()

    def _settle(self) -> None:
        """Take the replies that have come, without waiting for the others unless they are many."""
        while self._pending:
            first = self._pending[0]
            if len(self._pending) <= _WAITING and not all(future.done() for future in first.futures):
                return
            first.take()
            self._pending.pop(0)

    def take(self) -> None:
        """Wait for the outer steps begun so far.

        Raises:
            OneboxError: One failed.
        """
        while self._pending:
            self._pending[0].take()
            self._pending.pop(0)

    def check(self) -> None:
        """Require that all leaders of a value have the same bits.

        Raises:
            ReplicasParted: They have not.
        """
        checks = self.remote.checks()
        futures = {
            worker: self._pool.post(worker, [ask for _, ask in asked], answer=True) for worker, asked in checks.items()
        }

        def compare(answers: list[WorkerReply]) -> None:
            digests: dict[Members, set[bytes]] = {}
            for asked, answer in zip(checks.values(), answers, strict=True):
                found = [result.value for result in answer.results if isinstance(result, Digest)]
                for (members, _), digest in zip(asked, found, strict=True):
                    digests.setdefault(members, set()).add(digest)
            if any(len(found) > 1 for found in digests.values()):
                raise ReplicasParted(
                    "after an outer step the global parameters of the islands are no longer bit-identical; resume from "
                    "the last checkpoint, and look for faulty memory or an operator that is not deterministic"
                )

        self._pending.append(DeferredReplies(list(futures.values()), compare))

    def _installed(self, steps: Mapping[int, WorkerOuterStep]) -> dict[int, WorkerOuterStep]:
        """Send workers their routines, and return them."""
        for worker, each in steps.items():
            for routine in (each.routine, each.then.routine if each.then else None):
                if routine is not None:
                    self._programs.store(worker, routine)
        return dict(steps)

    def _post(
        self,
        steps: Mapping[int, WorkerOuterStep],
        weight_of: Mapping[int, float],
        number: int,
        after: Callable[[int], Sequence[Instruction]] = lambda worker: (),
        timed: deque[float] | None = None,
    ) -> None:
        """Send workers their parts: routines with the weights of their islands, and copies."""
        futures, routines = [], list[StepRoutine | None]()
        options = self.remote.changed_options(options_of(self.remote.optimizer)) if weight_of else ()
        with self._pool.order:
            for worker, each in steps.items():
                message: list[Instruction] = []
                frames = []
                if each.routine is not None and worker in weight_of:
                    weight = self._pool.new_number()
                    message.append(Put((weight,), (WEIGHT,)))
                    frames.append(to_frame(torch.tensor(weight_of[worker], dtype=torch.float64)))
                    trace = timed is not None
                    message.append(Run(each.routine.number, (weight,), number, options=options, trace=trace))
                elif each.routine is not None:
                    message.append(Run(each.routine.number, (), number))
                message += self._in_place(each)
                if each.then is not None:
                    message += [Run(each.then.routine.number, (), number)] if each.then.routine else []
                    message += self._in_place(each.then)
                message += after(worker)
                if message:
                    futures.append(self._pool.post(worker, message, frames, answer=True))
                    routines.append(each.routine)

        def take(answers: list[WorkerReply]) -> None:
            pairs = zip(routines, answers, strict=True)
            spans = [span for routine, answer in pairs if (span := _sums_ns(routine, answer)) is not None]
            if timed is not None and spans:
                timed.append(min(spans) * 1e-9)  # of the island that came last and waited for none

        self._pending.append(DeferredReplies(futures, take))

    def _in_place(self, each: WorkerOuterStep) -> list[Instruction]:
        """Return the instructions that change local values in place."""
        found: list[Instruction] = []
        if each.copies:
            found.append(Operate(tuple(n for pair in each.copies for n in (self._copy, *pair))))
        if each.blends:
            calls = tuple(n for pair in each.blends for n in (self._blend, *pair))
            found.append(Operate(calls, (1.0 - self._keep,) * len(each.blends)))
        return found

    def close(self) -> None:
        """Leave the groups and free everything on the workers."""
        for members, group in self._groups.items():
            self._pool.leave_group(group, members)
        self._groups = {}
        self.remote.free()
