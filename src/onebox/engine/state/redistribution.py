"""What travels from worker to worker when the state of a run is to be spread in another way. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from onebox.engine.state.snapshot_layout import StateItem, WorkerStateSpec
from onebox.errors import UsageError


class StateMove(NamedTuple):
    """Something that travels.

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
    """All that travels; the rest stays where it is.

    Args:
        tensors: Parameters and buffers; of each pair of workers in the order in which both know them.
        remembered: Parameters of which what the optimizer remembers travels, likewise.
        freed: For each worker what it holds no more.
        changed: The workers whose optimizers step other parameters than before.
    """

    tensors: tuple[StateMove, ...]
    remembered: tuple[StateMove, ...]
    freed: Mapping[int, tuple[str, ...]]
    changed: frozenset[int]

    @property
    def workers(self) -> frozenset[int]:
        """Who sends or receives."""
        return frozenset(worker for move in (*self.tensors, *self.remembered) for worker in (move.source, move.target))

    def size_bytes(self, tensors: Mapping[str, int], remembered: Mapping[str, int]) -> int:
        """Return the bytes of all that travels.

        Args:
            tensors: Of each parameter and buffer.
            remembered: Of what the optimizer remembers of each.
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
    """Return what has to travel so that each worker has its part: what it lacks, once, from one that has it.

    Where several have it, one on the same host gives it, and of these the one that gives least so far.

    Args:
        before: What each worker has now.
        after: What each worker is to have.
        sizes: Bytes of each name.
        hosts: Of each worker.

    Raises:
        UsageError: Something is to be split in another way than it is, which is more than moving it.
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
