"""Exchanges: the reductions of a worker in a step, in one order that all workers share. Pure.

All members of a group must begin its reductions in the same order, but each has its contribution ready at another time.
So each exchange waits in a queue of its group until the exchanges before it have begun.

A hierarchical reduction (:mod:`onebox.engine.partition.hierarchical_reduction`) takes three collectives: a reduction
within each part of the group to the part's first member; one over these leaders; and a broadcast within each part. A
leader waits for its part's reduction before it begins the second collective. If workers exchange nothing but
reductions, that happens when the next exchange begins, so that most second collectives overlap with the computation of
gradients. Otherwise another worker may depend on the one that waits: there the second and third collectives follow
after all actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from onebox.cost import DeviceGroups
from onebox.engine.compile.batch_job import BatchJob
from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
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
    """

    members: Members
    prepare: Callable[[], list[tuple[int, ...]]]
    ready: bool = False
    root: int = -1
    parts: DeviceGroups = ()
    specs: Sequence[TensorSpec] = ()


class ReductionQueue:
    """Exchanges of one worker's routine.

    Args:
        builder: The routine.
        worker: The worker.
        groups: Number of each group.
        shared: Groups that take part in exchanges of other groups: their exchanges share one order.
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
        self._second: deque[tuple[GroupReduction, tuple[int, ...]]] = deque()
        self._third: deque[tuple[GroupReduction, tuple[int, ...]]] = deque()

    def expect(
        self,
        members: Members,
        prepare: Callable[[], list[tuple[int, ...]]],
        owner: int | None = None,
        *,
        parts: DeviceGroups = (),
        specs: Sequence[TensorSpec] = (),
    ) -> GroupReduction:
        """Append an exchange to its group's queue.

        Args:
            members: The group.
            prepare: See :class:`GroupReduction`.
            owner: The only member that receives the sum; ``None`` for all.
            parts: See :class:`GroupReduction`.
            specs: See :class:`GroupReduction`.
        """
        root = -1 if owner is None else members.index(owner)
        exchange = GroupReduction(members, prepare, root=root, parts=parts if len(parts) > 1 else (), specs=specs)
        queue = () if exchange.parts or members in self._shared else members
        self._queues.setdefault(queue, deque()).append(exchange)
        return exchange

    def flush(self) -> None:
        """Begin the exchanges that are due."""
        for queue in self._queues.values():
            while queue and queue[0].ready:
                exchange = queue.popleft()
                self._before()
                for buffers in exchange.prepare():
                    if exchange.parts:
                        self._begin(exchange, buffers)
                    else:
                        self._reduce(buffers, exchange.members, exchange.root)

    def finish(self) -> None:
        """Begin all remaining exchanges."""
        for queue in self._queues.values():
            for exchange in queue:
                exchange.ready = True
        self.flush()
        while self._second:
            self._over_parts()
        while self._third:
            self._hand_on()

    def _begin(self, exchange: GroupReduction, buffers: tuple[int, ...]) -> None:
        """Begin the first collective of a hierarchical reduction, and those of earlier exchanges that are due after
        it.
        """
        own = self._part(exchange)
        if len(own) > 1:
            self._reduce(buffers, own, 0)
        if self._early:
            due = len(self._third)
            if self._second:
                self._over_parts()
            for _ in range(due):
                self._hand_on()
        self._second.append((exchange, buffers))

    def _over_parts(self) -> None:
        """Begin the second collective of the exchange that has waited longest."""
        exchange, buffers = self._second.popleft()
        if self._part(exchange)[0] == self._worker:
            self._reduce(buffers, group_leaders(exchange.parts), -1)
        self._third.append((exchange, buffers))

    def _hand_on(self) -> None:
        """Begin the third collective of the exchange that has waited longest."""
        exchange, buffers = self._third.popleft()
        own = self._part(exchange)
        if len(own) > 1:
            broadcast = Broadcast(buffers, self._groups[own], 0, tuple(exchange.specs))
            self._builder.add(broadcast, InstructionLabel("broadcast", "transfer"))

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
