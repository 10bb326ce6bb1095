"""Versions of weights besides those that a worker's optimizer updates, in ordinary buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.engine.workload.delay_compensation import predicts
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Branch, Broadcast, GroupDelays, Options

PREVIOUS, AHEAD = "previous", "ahead"
"""Keys of versions where they are stored with the parameter itself and its optimizer state."""

KEYS = (PREVIOUS, AHEAD)


@dataclass(frozen=True, kw_only=True)
class WeightVersions:
    """Buffers of versions, with the same numbers on every worker.

    Args:
        previous: Buffers of trained parameters before the latest update, by name; empty if steps are exact.
        ahead: Buffers of trained parameters as predicted after the next update; empty without predictions.
        delay: The treatment of late gradients, for all parameter groups or for each.
    """

    previous: Mapping[str, int] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    delay: GroupDelays = "none"

    @property
    def keys(self) -> dict[str, Mapping[str, int]]:
        """Buffers of each kind of version, by the name of the kind."""
        found = {PREVIOUS: self.previous, AHEAD: self.ahead}
        return {key: numbers for key, numbers in found.items() if numbers}

    def only(self, trained: Collection[str]) -> WeightVersions:
        """Return the versions of some parameters."""
        previous, ahead = (
            {name: number for name, number in numbers.items() if name in trained}
            for numbers in (self.previous, self.ahead)
        )
        return WeightVersions(previous=previous, ahead=ahead, delay=self.delay)

    def branch(
        self, optimizer: int, trained: Sequence[str], *, behind: int = 0, options: tuple[Options, ...] = ()
    ) -> Branch:
        """Return the instruction that creates versions of an optimizer's parameters.

        Args:
            optimizer: The optimizer.
            trained: Its parameters.
            behind: If positive, the versions exist already.
            options: Options of each group, for predictions; the present ones if empty.
        """
        previous = tuple(self.previous[name] for name in trained)
        ahead = tuple(self.ahead[name] for name in trained) if self.ahead else ()
        return Branch(optimizer, previous, ahead, behind, options)

    def of(self, name: str) -> dict[int, str]:
        """Return the version buffers of a parameter, and the kind of each."""
        return {numbers[name]: f"{key}.{name}" for key, numbers in self.keys.items() if name in numbers}


def weight_versions(trained: Sequence[str], delay: GroupDelays, new: Callable[[], int]) -> WeightVersions:
    """Return the versions of parameters whose gradients are late.

    Args:
        trained: The parameters.
        delay: The treatment of late gradients.
        new: Returns an unused number.
    """
    return WeightVersions(
        previous={name: new() for name in trained},
        ahead={name: new() for name in trained} if predicts(delay) else {},
        delay=delay,
    )


def version_broadcasts(
    versions: WeightVersions,
    holdings: ShardingSpec,
    specs: Callable[[str], TensorSpec],
    group_of: Callable[[Members], int],
) -> Iterator[tuple[Members, Broadcast]]:
    """Yield the broadcasts of versions from owners to other holders, with the members of each.

    Args:
        versions: The versions.
        holdings: The sharding spec.
        specs: Returns the spec of a whole parameter.
        group_of: Maps workers that hold the same to their group.
    """
    for name, owners in holdings.owners.items():
        for members, owner in zip(holdings.replica_groups[name], owners, strict=True):
            spec = holdings.spec(owner, name, specs(name))
            for number in versions.of(name) if len(members) > 1 else ():
                yield members, Broadcast((number,), group_of(members), members.index(owner), (spec,))
