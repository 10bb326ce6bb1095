"""The interface of a pool that measurements use."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from onebox.pool.client.connection import WorkerReply
from onebox.pool.devices import DeviceInfo
from onebox.pool.network.emulated import LinkMap
from onebox.wire.protocol.requests import Instruction


class MeasuredPool(Protocol):
    """A pool as far as its devices and links are measured: the part of :class:`~onebox.pool.Pool` that this needs."""

    devices: tuple[DeviceInfo, ...]
    links: LinkMap

    def __len__(self) -> int: ...

    @property
    def order(self) -> AbstractContextManager[Any]:
        """Held while messages to several workers are posted that all must get in the same order."""

    @property
    def broken(self) -> bool:
        """True if nothing can be sent any more."""

    def near(self, worker: int) -> bool:
        """Tell whether a worker is on this host."""

    def new_number(self) -> int:
        """Return a number for a buffer, definition or group that nothing else in the pool has."""

    def post(
        self, worker: int, instructions: Sequence[Instruction], frames: Sequence[Any] = (), *, answer: bool = False
    ) -> Future[WorkerReply]:
        """Send instructions to a worker."""

    def form_group(self, workers: Sequence[int], via: Literal["workers", "client"]) -> int:
        """Form a group of workers and return its number."""

    def leave_group(self, group: int, workers: Sequence[int]) -> None:
        """Dissolve a group."""
