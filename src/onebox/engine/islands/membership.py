"""Membership of a run of islands: which take part, and the samples that each has made since its outer steps. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

ChangeKind = Literal["left", "joined", "late", "punctual", "redone"]


@dataclass(frozen=True, kw_only=True)
class IslandChange:
    """Record of an island that left a run or joined it again, that was late or punctual again, or of an outer step that
    was void and done again.

    Args:
        at_s: Time, in seconds since 1970.
        kind: ``left``, ``joined``, ``late``, ``punctual`` or ``redone``.
        island: Number of the island; ``None`` for an outer step.
        step: Number of steps whose batches were divided before.
        outer_steps: Number of outer steps, of any fragment, that were applied before.
        fragment: Part of the model whose outer step was done again; else ``None``.
        samples: Weight of the samples since the island's last outer steps that are lost or, of a punctual one, count
            in the next; the largest of any fragment.
        cause: One-line description of the loss; empty for an island that joined.
        lost: Numbers of its lost workers in the pool.
        seconds: Time for which the others waited.
    """

    at_s: float
    kind: ChangeKind
    island: int | None
    step: int
    outer_steps: int = 0
    fragment: int | None = None
    samples: float = 0.0
    cause: str = ""
    lost: tuple[int, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        after = f"after step {self.step}"
        if self.kind == "joined":
            return f"island {self.island} joined {after}, with the global parameters, in {self.seconds:.1f} s"
        if self.kind == "late":
            return f"island {self.island} is late {after}: the others go on without it after {self.seconds:.1f} s"
        if self.kind == "punctual":
            return (
                f"island {self.island} is back {after}, with {self.samples:g} samples since its last outer step, and "
                f"took the global parameters in {self.seconds:.1f} s"
            )
        if self.kind == "redone":
            return f"an outer step of fragment {self.fragment} {after} was void and is done again ({self.cause})"
        return (
            f"island {self.island} left {after}: {self.samples:g} samples since its last outer step are lost, the "
            f"others go on after {self.seconds:.1f} s ({self.cause})"
        )


class Membership:
    """The islands that take part in a run, and what each adds to the next outer steps.

    Args:
        islands: Number of islands.
        samples: For each fragment, the weight of each island's samples since the last outer step.
        due: For each fragment, the step after which sums that have begun are applied; 0 for none.
    """

    def __init__(self, islands: int, samples: Sequence[Sequence[float]], due: Sequence[int]) -> None:
        self._islands = islands
        self._present = set(range(islands))
        self._late: set[int] = set()
        self._samples = [list(own) for own in samples]
        self._due = list(due)
        self.outer_steps = 0
        """Number of outer steps, of any fragment, that have been applied."""
        self._travelling: dict[int, list[float]] = {}  # weights in the sums that have begun, by fragment

    @property
    def present(self) -> tuple[int, ...]:
        """The islands that take part, also those that are late."""
        return tuple(sorted(self._present))

    @property
    def punctual(self) -> tuple[int, ...]:
        """The islands that batches are divided among, and that make the outer steps."""
        return tuple(sorted(self._present - self._late))

    @property
    def late(self) -> tuple[int, ...]:
        """The islands that the others do not wait for: their samples count in the first outer step that they are back
        for."""
        return tuple(sorted(self._late))

    @property
    def absent(self) -> tuple[int, ...]:
        """The others."""
        return tuple(island for island in range(self._islands) if island not in self._present)

    @property
    def samples(self) -> tuple[tuple[float, ...], ...]:
        """For each fragment, the weight of each island's samples since the last outer step."""
        return tuple(map(tuple, self._samples))

    @property
    def due(self) -> tuple[int, ...]:
        """For each fragment, the step after which sums that have begun are applied; 0 for none."""
        return tuple(self._due)

    @property
    def travelling(self) -> tuple[int, ...]:
        """The fragments whose sums have begun and are not applied."""
        return tuple(fragment for fragment, due in enumerate(self._due) if due)

    def shares(self, shares: Sequence[float]) -> tuple[float, ...]:
        """Return the islands' shares of a batch, which those that are punctual have alone.

        Example:
            >>> membership = Membership(2, [[0.0, 0.0]], [0])
            >>> membership.leave(1)
            0.0
            >>> membership.shares([3, 1])
            (3, 0.0)
        """
        return tuple(share if island in self.punctual else 0.0 for island, share in enumerate(shares))

    def count(self, weights: Sequence[float]) -> None:
        """Add the weights of the samples of a step."""
        for own in self._samples:
            for island in self._present:
                own[island] += weights[island]

    def begin(self, fragment: int, due: int = 0) -> tuple[float, ...] | None:
        """Begin an outer step.

        Args:
            fragment: The part of the model.
            due: The step after which it is applied; 0 for at once.

        Returns:
            The weight of each punctual island, which add up to 1; ``None`` if they had no samples.
        """
        own = self._samples[fragment]
        begun = [weight if island in self.punctual else 0.0 for island, weight in enumerate(own)]
        if not any(begun):
            return None
        self._travelling[fragment] = begun
        self._samples[fragment] = [weight - taken for weight, taken in zip(own, begun, strict=True)]
        self._due[fragment] = due
        return tuple(begun[island] / sum(begun) for island in self.punctual)

    def void(self, fragment: int) -> None:
        """Undo the beginning of an outer step whose sums are void: the samples of those that are left count again."""
        self._due[fragment] = 0
        for island, weight in enumerate(self._travelling.pop(fragment, ())):
            if island in self._present:
                self._samples[fragment][island] += weight

    def applied(self, fragment: int) -> None:
        """Record that the sums of an outer step have been applied."""
        self.outer_steps += 1
        self._due[fragment] = 0
        self._travelling.pop(fragment, None)

    def leave(self, island: int) -> float:
        """Record that an island has been lost with its samples; return their weight, the largest of any fragment."""
        self._present.discard(island)
        self._late.discard(island)
        lost = max(own[island] for own in self._samples)
        for own in self._samples:
            own[island] = 0.0
        return lost

    def join(self, island: int) -> None:
        """Record that an island takes part again."""
        self._present.add(island)

    def fall_behind(self, island: int) -> None:
        """Record that the others do not wait for an island any more."""
        self._late.add(island)

    def catch_up(self, island: int) -> None:
        """Record that an island is punctual again."""
        self._late.discard(island)

    def losing(self, lost: Collection[int], devices: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the islands that take part and have lost workers.

        Args:
            lost: The lost workers.
            devices: The workers of each island.
        """
        return tuple(island for island in self.present if not set(devices[island]).isdisjoint(lost))
