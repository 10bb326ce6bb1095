"""Exchanges: what a worker sums with others in a step, in one order that all of them keep. Pure.

A group's sums must be begun in the same order by all of its members, while each is ready with its part at a time of its
own. So each exchange waits in a queue of its group until those before it have begun.

A sum in each host first (:mod:`onebox.engine.partition.hierarchical_reduction`) takes three: a sum over each part of
the group, for the first member of the part; one over these; and a broadcast in each part. Who is first waits for the
sum of its part before it begins the second one. Where workers need nothing of each other but sums, that happens when
the next exchange begins, so that most second ones travel while gradients are still computed. Where they do, a worker
that waits might be waited for: there the second and the third ones come when all actions are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from onebox.cost import DeviceGroups
from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
from onebox.engine.partition.hierarchical_reduction import group_leaders
from onebox.engine.partition.sharding_spec import Members
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Broadcast, Reduce


@dataclass
class GroupReduction:
    """A sum over a group.

    Args:
        members: The group.
        prepare: Adds what is to be done before it, and returns the buffers: those of one element type for each message.
        ready: Whether this worker's part is there.
        root: The rank of the only member that gets the sum; -1 where all do.
        parts: Who sums up first; empty where all do at once. It is for all members then, and has one message.
        specs: What the buffers are.
    """

    members: Members
    prepare: Callable[[], list[tuple[int, ...]]]
    ready: bool = False
    root: int = -1
    parts: DeviceGroups = ()
    specs: Sequence[TensorSpec] = ()


class ReductionQueue:
    """The exchanges of one worker's routine.

    Args:
        builder: The routine.
        worker: The worker.
        groups: The number of each group.
        shared: Groups that have a part in the exchanges of others: all of those begin in one order.
        early: Whether workers need nothing of each other but sums.
        before: Adds what has to come before any exchange.
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
        """Put an exchange at the end of its group's queue.

        Args:
            members: The group.
            prepare: See :class:`GroupReduction`.
            owner: The only member that gets the sum; ``None`` where all do.
            parts: See :class:`GroupReduction`.
            specs: Likewise.
        """
        root = -1 if owner is None else members.index(owner)
        exchange = GroupReduction(members, prepare, root=root, parts=parts if len(parts) > 1 else (), specs=specs)
        queue = () if exchange.parts or members in self._shared else members
        self._queues.setdefault(queue, deque()).append(exchange)
        return exchange

    def flush(self) -> None:
        """Begin the exchanges whose turn it is."""
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
        """Begin all that is left."""
        for queue in self._queues.values():
            for exchange in queue:
                exchange.ready = True
        self.flush()
        while self._second:
            self._over_parts()
        while self._third:
            self._hand_on()

    def _begin(self, exchange: GroupReduction, buffers: tuple[int, ...]) -> None:
        """Begin the first of three sums, and what is due behind it of exchanges before."""
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
        """Begin the second one of the exchange that waits longest for it."""
        exchange, buffers = self._second.popleft()
        if self._part(exchange)[0] == self._worker:
            self._reduce(buffers, group_leaders(exchange.parts), -1)
        self._third.append((exchange, buffers))

    def _hand_on(self) -> None:
        """Begin the third one of the exchange that waits longest for it."""
        exchange, buffers = self._third.popleft()
        own = self._part(exchange)
        if len(own) > 1:
            broadcast = Broadcast(buffers, self._groups[own], 0, tuple(exchange.specs))
            self._builder.add(broadcast, InstructionLabel("broadcast", "transfer"))

    def _part(self, exchange: GroupReduction) -> Members:
        return next(part for part in exchange.parts if self._worker in part)

    def _reduce(self, buffers: tuple[int, ...], members: Members, root: int) -> None:
        self._builder.add(Reduce(buffers, self._groups[members], root), InstructionLabel("reduce", "transfer"))
