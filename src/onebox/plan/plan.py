"""The plan: which device computes what. So far one stage, with any number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from onebox.errors import UsageError
from onebox.plan.shares import apportion

Sync = Literal["workers", "client"]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A part of a batch that is computed at once.

    Args:
        index: Its number within the batch.
        start: Its first sample.
        size: How many samples.
    """

    index: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Data parallel over replicas of the whole model.

    Args:
        devices: The pool's number of each replica's device.
        shares: Each replica's share of the batch; they add up to 1.
        micro_batch: Samples of a micro-batch; ``None`` makes each replica's share of the batch one micro-batch.
        sync: Where gradients are averaged: worker to ``workers``, or at the ``client``.
    """

    devices: tuple[int, ...]
    shares: tuple[float, ...]
    micro_batch: int | None
    sync: Sync

    def __post_init__(self) -> None:
        if not self.devices or len(self.devices) != len(self.shares):
            raise UsageError(f"{len(self.shares)} shares for {len(self.devices)} devices: one for each is needed")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise UsageError(f"micro_batch={self.micro_batch}: a micro-batch has at least one sample")
        if self.sync not in ("workers", "client"):
            raise UsageError(f"sync={self.sync!r}: allowed are 'workers' and 'client'")
        apportion(1, self.shares)

    def micro_batches(self, batch: int) -> list[list[MicroBatch]]:
        """Cut a batch into micro-batches and share them out.

        Args:
            batch: Samples.

        Returns:
            The micro-batches of each replica; indices count over the whole batch, in the order of its samples. A
            replica may have none.
        """
        if self.micro_batch is None:
            sizes = apportion(batch, self.shares)
            counts = [int(size > 0) for size in sizes]
            sizes = [size for size in sizes if size]
        else:
            whole, rest = divmod(batch, self.micro_batch)
            sizes = [self.micro_batch] * whole + [rest] * (rest > 0)
            counts = apportion(len(sizes), self.shares)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        made = [
            MicroBatch(index=index, start=start, size=size)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        return _deal(made, counts)

    def describe(self) -> str:
        """Return one line for a person."""
        parts = ", ".join(f"{device}: {share:.0%}" for device, share in zip(self.devices, self.shares, strict=True))
        cut = "one micro-batch each" if self.micro_batch is None else f"micro-batches of {self.micro_batch}"
        if len(self.devices) == 1:
            return f"1 stage on device {self.devices[0]}, {cut}"
        where = "worker to worker" if self.sync == "workers" else "at the client"
        return f"1 stage, {len(self.devices)} replicas ({parts}), {cut}, gradients averaged {where}"


def _deal(items: Sequence[MicroBatch], counts: Sequence[int]) -> list[list[MicroBatch]]:
    dealt: list[list[MicroBatch]] = []
    start = 0
    for count in counts:
        dealt.append(list(items[start : start + count]))
        start += count
    return dealt
