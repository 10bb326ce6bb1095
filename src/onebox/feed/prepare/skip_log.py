"""The log of samples that were left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onebox.errors import DataError
from onebox.feed.prepare.preparation import SkippedSample

NAMED = 10
"""Samples that are recorded by name; further ones are only counted."""

SHOWN = 3
"""Number of names in one line."""


@dataclass
class SkipLog:
    """Samples that were left out of returned batches, or of batches that became empty.

    Args:
        limit: The most that an epoch may leave out; ``None`` for no limit.
        count: Number in all epochs.
        first: The first ones, each once.
        in_epoch: Number in the last epoch.
        of_epoch: The first ones of the last epoch.
    """

    limit: int | None
    count: int = 0
    first: list[SkippedSample] = field(default_factory=list)
    in_epoch: int = 0
    of_epoch: list[SkippedSample] = field(default_factory=list)

    def __len__(self) -> int:
        return self.count

    def begin(self) -> None:
        """Begin an epoch."""
        self.in_epoch = 0
        self.of_epoch = []

    def add(self, skipped: Sequence[SkippedSample]) -> None:
        """Record the samples left out of a batch.

        Raises:
            DataError: There are more than the limit allows.
        """
        for one in skipped:
            self.count += 1
            self.in_epoch += 1
            if one not in self.first and len(self.first) < NAMED:
                self.first.append(one)
            if len(self.of_epoch) < SHOWN:
                self.of_epoch.append(one)
            if self.limit is not None and self.in_epoch > self.limit:
                came = f"{self.in_epoch} samples of an epoch were left out, and max_skipped allows {self.limit}"
                raise DataError(f"{came}; the last: {one}", path=one.name, sample=one.index)

    def end(self, batches: int) -> None:
        """End an epoch.

        Args:
            batches: Number of its batches.

        Raises:
            DataError: There was none, because every sample was left out.
        """
        if self.in_epoch and not batches:
            one = self.of_epoch[0]
            raise DataError(f"all {self.in_epoch} samples were left out; the first: {one}", path=one.name)

    def __str__(self) -> str:
        if not self.in_epoch:
            return "no sample was left out"
        more = self.in_epoch - len(self.of_epoch)
        named = "; ".join(map(str, self.of_epoch)) + (f"; and {more} more" if more else "")
        return f"{self.in_epoch} left out: {named}"
