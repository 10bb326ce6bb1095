"""Exchanges: what a worker sums with others in a step, in one order that all of them keep. Pure.

A group's sums must be begun in the same order by all of its members, while each is ready with its part at a time of its
own. So each exchange waits in a queue of its group until those before it have begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onebox.engine.holdings import Members
from onebox.engine.routine import Label, RoutineBuilder
from onebox.wire.messages import Reduce


@dataclass
class Exchange:
    """A sum over a group.

    Args:
        prepare: Adds what is to be done before it, and returns the buffers: those of one element type for each message.
        ready: Whether this worker's part is there.
        root: The rank of the only member that gets the sum; -1 where all do.
    """

    prepare: Callable[[], list[tuple[int, ...]]]
    ready: bool = False
    root: int = -1


class Exchanges:
    """The exchanges of one worker's routine.

    Args:
        builder: The routine.
        worker: The worker.
        groups: The number of each group.
    """

    def __init__(self, builder: RoutineBuilder, worker: int, groups: Mapping[Members, int]) -> None:
        self._builder = builder
        self._worker = worker
        self._groups = groups
        self._queues: dict[Members, deque[Exchange]] = {}

    def expect(
        self, members: Members, prepare: Callable[[], list[tuple[int, ...]]], owner: int | None = None
    ) -> Exchange:
        """Put an exchange at the end of its group's queue.

        Args:
            members: The group.
            prepare: See :class:`Exchange`.
            owner: The only member that gets the sum; ``None`` where all do.
        """
        exchange = Exchange(prepare, root=-1 if owner is None else members.index(owner))
        self._queues.setdefault(members, deque()).append(exchange)
        return exchange

    def flush(self) -> None:
        """Begin the exchanges whose turn it is."""
        for members, queue in self._queues.items():
            while queue and queue[0].ready:
                exchange = queue.popleft()
                for buffers in exchange.prepare():
                    reduce = Reduce(buffers, self._groups[members], exchange.root)
                    self._builder.add(reduce, Label("reduce", "transfer"))

    def finish(self) -> None:
        """Begin all that is left."""
        for queue in self._queues.values():
            for exchange in queue:
                exchange.ready = True
        self.flush()
