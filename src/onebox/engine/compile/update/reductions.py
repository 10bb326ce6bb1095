"""Exchanges: the reductions of a worker in a step, in one order that all workers share. Pure.

All members of a group must begin its reductions in the same order, but each has its contribution ready at another time.
So each exchange waits in a queue of its group until the exchanges before it have begun.

A hierarchical reduction (:mod:`onebox.engine.partition.hierarchical_reduction`) takes three collectives: a reduction
within each part of the group to the part's first member; one over these leaders; and a broadcast within each part. A
leader waits for its part's reduction before it begins the second collective. If workers exchange nothing but
reductions, that happens when the next exchange begins, so that most second collectives overlap with the computation of
gradients. Otherwise another worker may depend on the one that waits: there the second and third collectives follow
after all actions. A sum in a lossy codec (:mod:`onebox.engine.compile.update.coded_buckets`) has phases, too; in a
hierarchical reduction it takes the place of the second collective.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from onebox.cost import DeviceGroups
from onebox.engine.compile.batch_job import BatchJob
from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
from onebox.engine.compile.update.coded_buckets import CodedBucket, Phase
from onebox.engine.partition.hierarchical_reduction import group_leaders
from onebox.engine.partition.sharding_spec import Members
from onebox.plan import Action
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Broadcast, Reduce


@dataclass
class GroupReduction:
    """A reduction over a group.

    Args:
        members: The group.
        prepare: Adds the instructions that precede it, and returns the buffers: for each message, those of one element
            type.
        ready: Whether this worker's contribution is complete.
        root: Rank of the only member that receives the sum; -1 for all.
        parts: Parts of a hierarchical reduction, which has one message and is for all members; empty for a flat one.
        specs: Specs of the buffers.
        coded: The sum in a lossy codec, of the members or of the leaders of the parts; ``None`` for an exact one.
        age: Age of its step, see :meth:`RoutineBuilder.of_step`.
    """

    members: Members
    prepare: Callable[[], list[tuple[int, ...]]]
    ready: bool = False
    root: int = -1
    parts: DeviceGroups = ()
    specs: Sequence[TensorSpec] = ()
    coded: CodedBucket | None = None
    age: int = 0


class ReductionQueue:
    """Exchanges of one worker's routine.

    Args:
        builder: The routine.
        worker: The worker.
        groups: Number of each group.
        shared: Groups that take part in exchanges of other groups, or sum something in a codec: all their exchanges
            share one order.
        early: Whether workers exchange nothing but reductions.
        before: Adds the instructions that precede any exchange.
    """

    def __init__(
        self,
        builder: RoutineBuilder,
        worker: int,
        groups: Mapping[Members, int],
        *,
        shared: Collection[Members] = (),
        early: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._builder = builder
        self._worker = worker
        self._groups = groups
        self._shared = frozenset(shared)
        self._early = early
        self._before = before
        self._queues: dict[Members, deque[GroupReduction]] = {}
        self._waiting: list[deque[Phase]] = []  # the phases to come of exchanges that have begun, oldest first

    def expect(
        self,
        members: Members,
        prepare: Callable[[], list[tuple[int, ...]]],
        owner: int | None = None,
        *,
        parts: DeviceGroups = (),
        specs: Sequence[TensorSpec] = (),
        coded: CodedBucket | None = None,
        age: int = 0,
    ) -> GroupReduction:
        """Append an exchange to its group's queue.

        Args:
            members: The group.
            prepare: See :class:`GroupReduction`.
            owner: The only member that receives the sum; ``None`` for all.
            parts: See :class:`GroupReduction`.
            specs: See :class:`GroupReduction`.
            coded: See :class:`GroupReduction`.
            age: See :class:`GroupReduction`.
        """
        root = -1 if owner is None else members.index(owner)
        parts = parts if len(parts) > 1 else ()
        exchange = GroupReduction(members, prepare, root=root, parts=parts, specs=specs, coded=coded, age=age)
        queue = () if parts or coded or members in self._shared else members
        self._queues.setdefault(queue, deque()).append(exchange)
        return exchange

    def flush(self) -> None:
        """Begin the exchanges that are due."""
        for queue in self._queues.values():
            while queue and queue[0].ready:
                exchange = queue.popleft()
                self._before()
                with self._builder.of_step(exchange.age):
                    messages = exchange.prepare()
                for buffers in messages:
                    self._begin(exchange, buffers)

    def finish(self) -> None:
        """Begin all remaining exchanges."""
        for queue in self._queues.values():
            for exchange in queue:
                exchange.ready = True
        self.flush()
        while self._waiting:
            left = max(map(len, self._waiting))
            for phases in self._waiting:
                if len(phases) == left:
                    phases.popleft()()
            self._drop_complete()

    def _begin(self, exchange: GroupReduction, buffers: tuple[int, ...]) -> None:
        """Begin the first collective of an exchange, and those of earlier exchanges that are due after it."""
        if not (exchange.parts or exchange.coded):
            with self._builder.of_step(exchange.age):
                self._reduce(buffers, exchange.members, exchange.root)
            return
        phases: deque[Phase] = deque()
        for phase in self._phases(exchange, buffers):
            phases.append(functools.partial(self._add, phase, exchange.age))
        phases.popleft()()
        if self._early:
            for earlier in reversed(self._waiting):
                earlier.popleft()()
            self._drop_complete()
        self._waiting.append(phases)

    def _add(self, phase: Phase, age: int) -> None:
        with self._builder.of_step(age):
            phase()

    def _drop_complete(self) -> None:
        self._waiting = [phases for phases in self._waiting if phases]

    def _phases(self, exchange: GroupReduction, buffers: tuple[int, ...]) -> list[Phase]:
        """Return the phases of an exchange of several collectives, as many on each member."""
        coded = exchange.coded
        if not exchange.parts:
            assert coded is not None
            return coded.phases(self._builder, self._worker, self._groups[exchange.members], buffers)
        own, leaders = self._part(exchange), group_leaders(exchange.parts)

        def within_part() -> None:
            if len(own) > 1:
                self._reduce(buffers, own, 0)

        def hand_on() -> None:
            if len(own) > 1:
                broadcast = Broadcast(buffers, self._groups[own], 0, tuple(exchange.specs))
                self._builder.add(broadcast, InstructionLabel("broadcast", "transfer"))

        leading = own[0] == self._worker
        if coded is None:
            return [within_part, lambda: self._reduce(buffers, leaders, -1) if leading else None, hand_on]
        over_parts: list[Phase] = [lambda: None] * 3
        if leading:
            over_parts = coded.phases(self._builder, self._worker, self._groups[leaders], buffers)
        return [within_part, *over_parts, hand_on]

    def _part(self, exchange: GroupReduction) -> Members:
        return next(part for part in exchange.parts if self._worker in part)

    def _reduce(self, buffers: tuple[int, ...], members: Members, root: int) -> None:
        self._builder.add(Reduce(buffers, self._groups[members], root), InstructionLabel("reduce", "transfer"))


@dataclass(frozen=True, kw_only=True)
class RoutineScope:
    """A worker's part of a step in one routine.

    Args:
        builder: The routine.
        worker: The worker.
        actions: Its actions; in a window, gradients and statistics use only those of their step.
        job: The job.
        exchanges: Its reductions.
    """

    builder: RoutineBuilder
    worker: int
    actions: Sequence[Action]
    job: BatchJob
    exchanges: ReductionQueue
