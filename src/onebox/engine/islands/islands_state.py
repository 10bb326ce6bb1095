"""The training state of islands as the client reads it: global parameters, and each island's own for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from onebox.engine.islands.membership import Membership
from onebox.engine.islands.outer_optimizer import OuterOptimizer
from onebox.engine.session import TrainingSession
from onebox.engine.state.checkpoint_files import IslandsEntry
from onebox.engine.state.pieces import Key, TensorSource
from onebox.engine.state.remote import RESIDUAL, RemoteState, StartState
from onebox.engine.state.transfer import OptimizerContents, StateTransfer
from onebox.engine.workload.named_state import OptimizerEntries
from onebox.errors import CheckpointError
from onebox.pool import Pool

_OUTER = "outer"
"""Owner of the outer optimizer's entries in a checkpoint; that of an island's is its number."""


class IslandsTransfer(StateTransfer):
    """Reads the state of islands: the global parameters, and the optimizer state and other buffers of the first island
    that takes part.

    Args:
        pool: The pool.
        sessions: The sessions of the islands.
        states: State of each island on its workers.
        start: State in the checkpoint of a run that is resumed.
        membership: The islands that take part.
        regroup: After a loss, makes the outer optimizer's state that of the islands that are left.
    """

    def __init__(
        self,
        pool: Pool,
        sessions: Sequence[TrainingSession],
        states: Sequence[RemoteState],
        start: IslandsStart | None,
        membership: Membership,
        regroup: Callable[[], None],
    ) -> None:
        super().__init__(pool, states[0])
        self._membership = membership
        self._regroup = regroup
        self._start = start
        self._sessions = sessions
        self._states = states
        self.outer: OuterOptimizer | None = None
        """The outer optimizer, once the first step has begun."""

    def outer_began(self, outer: OuterOptimizer) -> None:
        """Read the outer optimizer's state from workers, instead of that in the checkpoint."""
        self.outer, self._start = outer, None

    def sources(self) -> dict[Key, TensorSource]:
        """Return the locations of parameters and buffers that workers hold, of the global ones where there are such.

        Raises:
            OneboxError: The pool is broken or closed.
        """
        if self.outer is None:
            return super().sources()
        self._regroup()
        return super().sources() | self.outer.transfer.sources()

    def whole(self) -> OptimizerContents:
        """Return the locations of everything that a resumed run needs beside global parameters: each island's optimizer
        state, parameters and changing buffers, and the outer optimizer's state. Keys end with their owner.

        Raises:
            OneboxError: A worker failed, or the pool is closed.
        """
        present = self._membership.present
        parts = [
            owned(each, str(place))
            for place in present
            for each in (self._sessions[place].transfer.remembered(), self._sessions[place].transfer.residuals())
        ]
        outer = self.outer
        if outer is not None:
            parts.append(owned(outer.contents(self._membership.travelling), _OUTER))
            for place in present:
                own = {*outer.names, *self._sessions[place].changed_buffers}
                sources = {key: at for key, at in self._states[place].tensor_sources().items() if key[0] in own}
                parts.append(owned(OptimizerContents(tensors=sources), str(place)))
        elif self._start is not None:
            outer_start = self._start.outer
            sums = [(name, "", tensor) for name, tensor in self._start.sums.items()]
            residuals = [(name, RESIDUAL, tensor) for name, tensor in outer_start.residuals.items()]
            parts.append(owned(_local_contents([*outer_start.optimizer, *sums, *residuals]), _OUTER))
            for place, tensors in enumerate(self._start.tensors):
                parts.append(owned(_local_contents([(n, "", tensor) for n, tensor in tensors.items()]), str(place)))
        return OptimizerContents(
            tensors={key: source for part in parts for key, source in part.tensors.items()},
            numbers={key: value for part in parts for key, value in part.numbers.items()},
            here={key: tensor for part in parts for key, tensor in part.here.items()},
        )


class WholeTransfer(StateTransfer):
    """Reads the state of islands for a checkpoint.

    Args:
        pool: The pool.
        remote: State of the first island.
        islands: The state of all.
    """

    def __init__(self, pool: Pool, remote: RemoteState, islands: IslandsTransfer) -> None:
        super().__init__(pool, remote)
        self._islands = islands

    def sources(self) -> dict[Key, TensorSource]:
        """Return the locations of the global parameters and of the first island's other tensors."""
        return self._islands.sources()

    def remembered(self) -> OptimizerContents:
        """Return the locations of everything else, with owners in the keys."""
        return self._islands.whole()

    def residuals(self) -> OptimizerContents:
        """Return nothing: those of all islands are with everything else."""
        return OptimizerContents()


def _local_contents(entries: OptimizerEntries) -> OptimizerContents:
    """Return entries that have not been uploaded to the workers yet."""
    return OptimizerContents(
        numbers={(name, key): value for name, key, value in entries if not isinstance(value, Tensor)},
        here={(name, key): value for name, key, value in entries if isinstance(value, Tensor)},
    )


def owned(contents: OptimizerContents, owner: str) -> OptimizerContents:
    """Return a state whose keys end with their owner."""

    def key_of(key: Key) -> Key:
        return key[0], f"{key[1]}@{owner}"

    return OptimizerContents(
        tensors={
            key_of(key): replace(source, pieces=tuple(replace(each, key=key_of(key)) for each in source.pieces))
            for key, source in contents.tensors.items()
        },
        numbers={key_of(key): value for key, value in contents.numbers.items()},
        here={key_of(key): tensor for key, tensor in contents.here.items()},
    )


@dataclass(frozen=True, kw_only=True)
class IslandsStart:
    """State of a checkpoint beside the global parameters.

    Args:
        entry: The description of the islands.
        islands: The optimizer's state of each island.
        tensors: Parameters and buffers of each island.
        outer: State of the outer optimizer.
        sums: Sums of outer steps that had begun and were not applied.
    """

    entry: IslandsEntry
    islands: tuple[StartState, ...]
    tensors: tuple[Mapping[str, Tensor], ...]
    outer: StartState
    sums: Mapping[str, Tensor]


def islands_start(entries: OptimizerEntries, entry: IslandsEntry) -> IslandsStart:
    """Return the state of islands from the entries of a checkpoint, whose keys end with their owners.

    An island that did not take part then begins with the global parameters and the optimizer state of the first that
    did.

    Args:
        entries: All entries.
        entry: The description of the islands in its manifest.

    Raises:
        CheckpointError: An entry has no such owner.
    """
    count = len(entry.devices)
    islands: list[OptimizerEntries] = [[] for _ in range(count)]
    tensors: list[dict[str, Tensor]] = [{} for _ in range(count)]
    outer: OptimizerEntries = []
    sums: dict[str, Tensor] = {}
    residuals: dict[str, dict[str, Tensor]] = {}
    for name, key, value in entries:
        own, _, owner = key.rpartition("@")
        if owner != _OUTER and (not owner.isdecimal() or int(owner) >= count):
            raise CheckpointError(f"the checkpoint has {key!r} of {name}, which belongs to none of its {count} islands")
        if own == RESIDUAL and isinstance(value, Tensor):
            residuals.setdefault(owner, {})[name] = value
        elif owner == _OUTER and not own and isinstance(value, Tensor):
            sums[name] = value
        elif owner == _OUTER:
            outer.append((name, own, value))
        elif own:
            islands[int(owner)].append((name, own, value))
        elif isinstance(value, Tensor):
            tensors[int(owner)][name] = value
    first = next((place for place in range(count) if tensors[place]), 0)
    islands = (
        [own if tensors[place] else islands[first] for place, own in enumerate(islands)] if tensors[first] else islands
    )
    return IslandsStart(
        entry=entry,
        islands=tuple(
            StartState(optimizer=own, versions={}, residuals=residuals.get(str(place), {}))
            for place, own in enumerate(islands)
        ),
        tensors=tuple(tensors),
        outer=StartState(optimizer=outer, versions={}, residuals=residuals.get(_OUTER, {})),
        sums=sums,
    )
