"""Transfers between workers that redistribute the state of a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from onebox.engine.state.snapshot_layout import StateItem, WorkerStateSpec
from onebox.errors import UsageError


class StateMove(NamedTuple):
    """One transfer.

    Args:
        source: The worker that has it.
        target: The worker that needs it.
        name: The parameter or buffer.
    """

    source: int
    target: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Redistribution:
    """All transfers of a redistribution.

    Args:
        tensors: Parameters and buffers; for each pair of workers in an order that both know.
        remembered: Parameters whose optimizer state is transferred, in the same order.
        freed: For each worker, the names that it no longer holds.
        changed: Workers whose optimizers update other parameters than before.
    """

    tensors: tuple[StateMove, ...]
    remembered: tuple[StateMove, ...]
    freed: Mapping[int, tuple[str, ...]]
    changed: frozenset[int]

    @property
    def workers(self) -> frozenset[int]:
        """Workers that send or receive."""
        return frozenset(worker for move in (*self.tensors, *self.remembered) for worker in (move.source, move.target))

    def size_bytes(self, tensors: Mapping[str, int], remembered: Mapping[str, int]) -> int:
        """Return the bytes of all transfers.

        Args:
            tensors: Bytes of each parameter and buffer.
            remembered: Bytes of the optimizer state of each.
        """
        return sum(tensors[move.name] for move in self.tensors) + sum(
            remembered.get(move.name, 0) for move in self.remembered
        )


def find_redistribution(
    before: Mapping[int, WorkerStateSpec],
    after: Mapping[int, WorkerStateSpec],
    sizes: Mapping[str, int],
    hosts: Mapping[int, str],
) -> Redistribution:
    """Return the transfers that give each worker its part: missing names, once each, from a worker that has them.

    Of several possible senders, one on the same host is preferred, and of these the one with the fewest bytes to send
    so far.

    Args:
        before: Present part of each worker.
        after: New part of each worker.
        sizes: Bytes of each name.
        hosts: Host of each worker.

    Raises:
        UsageError: A name would have to be split differently, which a transfer cannot do.
    """
    load: Counter[int] = Counter()

    def moves(has: Mapping[int, set[StateItem]], wants: Mapping[int, list[StateItem]]) -> tuple[StateMove, ...]:
        found = []
        for target, items in wants.items():
            for item in items:
                if item in has.get(target, ()):
                    continue
                sources = [worker for worker, own in has.items() if item in own]
                if not sources:
                    raise UsageError(
                        f"the plan wants share {item.rank} of {item.name} on device {target}, and no device has that: "
                        "a plan that takes over a run splits layers as the plan before did"
                    )
                source = min(sources, key=lambda one: (hosts[one] != hosts[target], load[one], one))
                load[source] += sizes[item.name]
                found.append(StateMove(source, target, item.name))
        return tuple(found)

    tensors = moves(
        {worker: {part.item(name) for name in part.names} for worker, part in before.items()},
        {worker: [part.item(name) for name in part.names] for worker, part in after.items()},
    )
    remembered = moves(
        {worker: {part.item(name) for name in part.trained} for worker, part in before.items()},
        {worker: [part.item(name) for name in part.trained] for worker, part in after.items()},
    )
    nothing = WorkerStateSpec(names=(), trained=(), ranks={})
    everybody = sorted({*before, *after})
    freed = {
        worker: tuple(
            name for name in before.get(worker, nothing).names if name not in set(after.get(worker, nothing).names)
        )
        for worker in everybody
    }
    changed = [w for w in everybody if before.get(w, nothing).trained != after.get(w, nothing).trained]
    return Redistribution(
        tensors=tensors,
        remembered=remembered,
        freed={worker: names for worker, names in freed.items() if names},
        changed=frozenset(changed),
    )
