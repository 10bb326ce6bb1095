"""Versions of weights, beside those that a worker's optimizer steps: buffers like any other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onebox.engine.partition.sharding_spec import Members, ShardingSpec
from onebox.engine.workload.delay_compensation import predicts
from onebox.wire import TensorSpec
from onebox.wire.protocol.instructions import Branch, Broadcast, GroupDelays, Options

PREVIOUS, AHEAD = "previous", "ahead"
"""What versions are called where they are kept beside the parameter itself, and what the optimizer remembers of it."""

KEYS = (PREVIOUS, AHEAD)


@dataclass(frozen=True, kw_only=True)
class WeightVersions:
    """The buffers of versions, the same numbers on every worker.

    Args:
        previous: Of trained parameters as they were before the newest update, by name; none where steps are exact.
        ahead: Of what they are expected to be after the next one; none where nothing is expected.
        delay: What is done about gradients that are late, in all parameter groups or in each.
    """

    previous: Mapping[str, int] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    delay: GroupDelays = "none"

    @property
    def keys(self) -> dict[str, Mapping[str, int]]:
        """The buffers of each kind of version that there is, by the name of the kind."""
        found = {PREVIOUS: self.previous, AHEAD: self.ahead}
        return {key: numbers for key, numbers in found.items() if numbers}

    def only(self, trained: Collection[str]) -> WeightVersions:
        """Return those of some parameters."""
        previous, ahead = (
            {name: number for name, number in numbers.items() if name in trained}
            for numbers in (self.previous, self.ahead)
        )
        return WeightVersions(previous=previous, ahead=ahead, delay=self.delay)

    def branch(
        self, optimizer: int, trained: Sequence[str], *, behind: int = 0, options: tuple[Options, ...] = ()
    ) -> Branch:
        """Return what lets an optimizer's parameters have versions.

        Args:
            optimizer: The optimizer.
            trained: Its parameters.
            behind: If positive, they are there already.
            options: Of each of its groups, by which is expected what becomes of a parameter; as they are if empty.
        """
        previous = tuple(self.previous[name] for name in trained)
        ahead = tuple(self.ahead[name] for name in trained) if self.ahead else ()
        return Branch(optimizer, previous, ahead, behind, options)

    def of(self, name: str) -> dict[int, str]:
        """Return the buffers that a parameter has beside its own, and what each is called."""
        return {numbers[name]: f"{key}.{name}" for key, numbers in self.keys.items() if name in numbers}


def weight_versions(trained: Sequence[str], delay: GroupDelays, new: Callable[[], int]) -> WeightVersions:
    """Return the versions of parameters whose gradients are late.

    Args:
        trained: The parameters.
        delay: What is done about it.
        new: Makes a number that nothing else has.
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
    """Yield what hands the versions of parameters from who steps one alone to its other holders, and these.

    Args:
        versions: The versions.
        holdings: Who holds and steps what.
        specs: From a parameter to what the whole of it is.
        group_of: From workers that hold the same to their group.
    """
    for name, owners in holdings.owners.items():
        for members, owner in zip(holdings.replica_groups[name], owners, strict=True):
            spec = holdings.spec(owner, name, specs(name))
            for number in versions.of(name) if len(members) > 1 else ():
                yield members, Broadcast((number,), group_of(members), members.index(owner), (spec,))
