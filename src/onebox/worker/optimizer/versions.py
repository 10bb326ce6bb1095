"""Versions of parameters: the update count of each buffer, and the versions that the calls of a step read.

So the delay of a gradient is measured where it is applied, rather than derived from a schedule.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from onebox.errors import WireError
from onebox.wire.protocol.responses import Delays

_STEPS = 4
"""Number of steps whose reads are recorded; a schedule has two in flight."""


@dataclass(eq=False)
class _Owner:
    """An optimizer whose parameters have versions.

    Args:
        numbers: Buffers of the parameters.
        updates: Number of updates of each parameter since its oldest initial version.
        read: By step, the reads of its calls: for the position of a parameter, the oldest and the newest version.
    """

    numbers: tuple[int, ...]
    updates: list[int]
    read: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Version:
    """Version in a buffer.

    Args:
        owner: Optimizer of the parameter.
        position: Position of the parameter.
        updates: Number of updates of the parameter in this version.
        tensor: The buffer's tensor; if it has been replaced, the version is unknown. ``None`` while it is in transit.
    """

    owner: _Owner
    position: int
    updates: int
    tensor: weakref.ReferenceType[Tensor] | None


class ParameterVersions:
    """Versions of the parameters of a worker's optimizers; empty until :meth:`begin`."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}
        self._versions: dict[int, _Version] = {}  # by buffer

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __contains__(self, number: object) -> bool:
        return number in self._versions

    def owner(self, number: int) -> int | None:
        """Return the optimizer of whose parameter a buffer is a version."""
        version = self._versions.get(number)
        if version is None:
            return None
        return next(optimizer for optimizer, owner in self._owners.items() if owner is version.owner)

    def begin(
        self,
        optimizer: int,
        parameters: Sequence[tuple[int, Tensor]],
        previous: Sequence[tuple[int, Tensor]],
        ahead: Sequence[tuple[int, Tensor]],
        behind: int,
    ) -> None:
        """Begin to track versions of an optimizer's parameters.

        Earlier records of the optimizer are discarded, except those made by :meth:`expect`.

        Args:
            optimizer: Its number.
            parameters: Their buffers, with the tensors in them.
            previous: The same for the previous versions.
            ahead: The same for predicted versions; empty for none.
            behind: Number of updates that ``previous`` lacks.
        """
        read = self.end(optimizer)
        owner = _Owner(tuple(number for number, _ in parameters), [behind] * len(parameters), read)
        self._owners[optimizer] = owner
        for buffers, updates in ((parameters, behind), (previous, 0), (ahead, behind)):
            for position, (number, tensor) in enumerate(buffers):
                self._versions[number] = _Version(owner, position, updates, weakref.ref(tensor))

    def expect(
        self, optimizer: int, parameters: Sequence[int], previous: Sequence[int], ahead: Sequence[int], behind: int
    ) -> None:
        """Record versions whose buffers are in transit; reads before :meth:`begin` are counted.

        Args:
            optimizer: Its number.
            parameters: Their buffers.
            previous: The same for the previous versions.
            ahead: The same for predicted versions; empty for none.
            behind: Number of updates that ``previous`` lacks.
        """
        self.end(optimizer)
        self._owners[optimizer] = owner = _Owner(tuple(parameters), [behind] * len(parameters))
        for buffers, updates in ((parameters, behind), (previous, 0), (ahead, behind)):
            for position, number in enumerate(buffers):
                self._versions[number] = _Version(owner, position, updates, None)

    def end(self, optimizer: int) -> dict[int, dict[int, tuple[int, int]]]:
        """Remove the versions of an optimizer's parameters; return the recorded reads of those in transit."""
        owner = self._owners.pop(optimizer, None)
        if owner is None:
            return {}
        own = [version for version in self._versions.values() if version.owner is owner]
        self._versions = {n: version for n, version in self._versions.items() if version.owner is not owner}
        return owner.read if own and all(version.tensor is None for version in own) else {}

    def note(self, numbers: Iterable[int], tensors: Iterable[Tensor], step: int) -> None:
        """Record the reads of a call.

        Args:
            numbers: The buffers.
            tensors: The tensors in them.
            step: The step that it belongs to.
        """
        for number, tensor in zip(numbers, tensors, strict=True):
            version = self._versions.get(number)
            if version is None or (version.tensor is not None and version.tensor() is not tensor):
                continue
            steps = version.owner.read
            if step not in steps:
                while len(steps) >= _STEPS:
                    del steps[next(iter(steps))]
                steps[step] = {}
            known, updates = steps[step], version.updates
            oldest, newest = known.get(version.position, (updates, updates))
            known[version.position] = (min(oldest, updates), max(newest, updates))

    def check(self, optimizer: int, positions: Sequence[int], buffers: Sequence[tuple[int, Tensor]]) -> None:
        """Require that buffers hold versions of parameters.

        Args:
            optimizer: Its number.
            positions: The parameters.
            buffers: A buffer for each, with the tensor in it.

        Raises:
            WireError: One does not.
        """
        owner = self._owners.get(optimizer)
        if owner is None:
            raise WireError(f"optimizer {optimizer} has no versions of its parameters; they begin with 'branch'")
        for position, (number, tensor) in zip(positions, buffers, strict=True):
            version = self._versions.get(number)
            if version is None or version.owner is not owner or version.position != position:
                raise WireError(f"buffer {number} is no version of parameter {position} of optimizer {optimizer}")
            if version.tensor is None or version.tensor() is not tensor:
                raise WireError(f"buffer {number} holds something else since 'branch' made it a version of a parameter")

    def repeated(self, number: int, like: int) -> None:
        """Record that a buffer now holds the same version as another one."""
        version, other = self._versions.get(number), self._versions.get(like)
        if version is not None and other is not None:
            self._versions[number] = replace(version, updates=other.updates)

    def applied(self, optimizer: int, positions: Sequence[int], step: int) -> Delays | None:
        """Count an update of parameters with the gradients of a step.

        Args:
            optimizer: Its number.
            positions: The parameters.
            step: The step.

        Returns:
            The delay of the gradients; ``None`` if the optimizer's parameters have no versions.
        """
        owner = self._owners.get(optimizer)
        if owner is None:
            return None
        read = owner.read.get(step, {})
        counts: Counter[int] = Counter()
        mixed = unread = 0
        for position in positions:
            found = read.pop(position, None)
            if found is None:
                unread += 1
            else:
                counts[owner.updates[position] - found[0]] += 1
                mixed += found[0] != found[1]
            owner.updates[position] += 1
        if not read:
            owner.read.pop(step, None)
        return Delays(tuple(sorted(counts.items())), mixed, unread)

    def renamed(self, into: dict[int, int]) -> None:
        """Renumber buffers, all at once."""
        moved = {into[number]: self._versions.pop(number) for number in into if number in self._versions}
        self._versions.update(moved)

    def renewed(self, optimizer: int, positions: Sequence[int], buffers: Sequence[tuple[int, Tensor]]) -> None:
        """Record that buffers hold the present parameters.

        Args:
            optimizer: Its number.
            positions: The parameters.
            buffers: A buffer for each, with the tensor in it.
        """
        owner = self._owners.get(optimizer)
        if owner is not None:
            for position, (number, tensor) in zip(positions, buffers, strict=True):
                self._versions[number] = _Version(owner, position, owner.updates[position], weakref.ref(tensor))
