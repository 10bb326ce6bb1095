"""Versions of parameters: which update of a parameter each of its buffers holds, and which the calls of a step read.

So the delay of a gradient is measured where it is applied, and not believed of a schedule.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from onebox.errors import WireError
from onebox.wire.protocol.responses import Delays

_STEPS = 4
"""Of so many steps it is known what was read; a schedule has two under way."""


@dataclass(eq=False)
class _Owner:
    """An optimizer whose parameters have versions.

    Args:
        numbers: Buffers of the parameters.
        updates: How many updates each parameter has seen since the oldest version that it began with.
        read: From a step to what its calls read: for the position of a parameter the oldest and the newest version.
    """

    numbers: tuple[int, ...]
    updates: list[int]
    read: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Version:
    """What a buffer holds.

    Args:
        owner: Whose parameter.
        position: Which.
        updates: How many updates that one has seen there.
        tensor: The buffer's tensor; where it is another one by now, nothing is known of it. ``None`` as long as it is
            on its way.
    """

    owner: _Owner
    position: int
    updates: int
    tensor: weakref.ReferenceType[Tensor] | None


class ParameterVersions:
    """Versions of the parameters of a worker's optimizers; of none until :meth:`begin`."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}
        self._versions: dict[int, _Version] = {}  # from a buffer

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
        """Begin to note versions of an optimizer's parameters.

        What was noted of it before is forgotten, unless it was expected.

        Args:
            optimizer: Its number.
            parameters: Their buffers, and what these hold.
            previous: Likewise those of the versions before.
            ahead: Likewise those of expected versions; empty for none.
            behind: How many updates ``previous`` lacks.
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
        """Note versions whose buffers are on their way; :meth:`begin` follows, and what is read until then counts.

        Args:
            optimizer: Its number.
            parameters: Their buffers.
            previous: Likewise those of the versions before.
            ahead: Likewise those of expected versions; empty for none.
            behind: How many updates ``previous`` lacks.
        """
        self.end(optimizer)
        self._owners[optimizer] = owner = _Owner(tuple(parameters), [behind] * len(parameters))
        for buffers, updates in ((parameters, behind), (previous, 0), (ahead, behind)):
            for position, number in enumerate(buffers):
                self._versions[number] = _Version(owner, position, updates, None)

    def end(self, optimizer: int) -> dict[int, dict[int, tuple[int, int]]]:
        """Forget the versions of an optimizer's parameters; return what was read of those that were on their way."""
        owner = self._owners.pop(optimizer, None)
        if owner is None:
            return {}
        own = [version for version in self._versions.values() if version.owner is owner]
        self._versions = {n: version for n, version in self._versions.items() if version.owner is not owner}
        return owner.read if own and all(version.tensor is None for version in own) else {}

    def note(self, numbers: Iterable[int], tensors: Iterable[Tensor], step: int) -> None:
        """Note what a call reads.

        Args:
            numbers: The buffers.
            tensors: What they hold.
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
            buffers: For each a buffer, and what it holds.

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

    def applied(self, optimizer: int, positions: Sequence[int], step: int) -> Delays | None:
        """Count an update of parameters, by the gradients of a step.

        Args:
            optimizer: Its number.
            positions: The parameters.
            step: The step.

        Returns:
            How late the gradients were; ``None`` where the optimizer's parameters have no versions.
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
        """Note that buffers are known by other numbers, all at once."""
        moved = {into[number]: self._versions.pop(number) for number in into if number in self._versions}
        self._versions.update(moved)

    def renewed(self, optimizer: int, positions: Sequence[int], buffers: Sequence[tuple[int, Tensor]]) -> None:
        """Note that buffers hold what parameters are by now.

        Args:
            optimizer: Its number.
            positions: The parameters.
            buffers: For each a buffer, and what it holds.
        """
        owner = self._owners.get(optimizer)
        if owner is not None:
            for position, (number, tensor) in zip(positions, buffers, strict=True):
                self._versions[number] = _Version(owner, position, owner.updates[position], weakref.ref(tensor))
