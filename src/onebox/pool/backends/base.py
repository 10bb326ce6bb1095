"""Interfaces of workers and of their sources, wherever workers run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from onebox.errors import WorkerDied
from onebox.pool.errors import WorkerLocation
from onebox.worker import Ports

LOOPBACK = "127.0.0.1"
"""The address of this machine at which the peers of its workers find them, where all are on it."""


class WorkerHandle(Protocol):
    """Handle of a worker's process: a child of this process, or one that an agent or a cluster has started."""

    @property
    def place(self) -> WorkerLocation:
        """Its location, for messages."""

    @property
    def address(self) -> str:
        """The address of its host that its peers connect to."""

    @property
    def descriptor(self) -> int:
        """A file descriptor that becomes readable when the process has ended or is lost."""

    @property
    def pid(self) -> int:
        """Its process id on its host."""

    def ports(self) -> Ports:
        """Wait until it has bound its sockets.

        Raises:
            PoolError: It took too long, or could not be started.
            WorkerDied: It ended instead.
        """

    def death(self) -> WorkerDied:
        """Return the error that tells of its end."""

    def close(self, *, grace_s: float) -> None:
        """End it: wait a while for it to end by itself, then kill it. Idempotent."""


@runtime_checkable
class HostedWorker(Protocol):
    """A worker on whose host an agent can be heard."""

    @property
    def heard_s(self) -> float:
        """Time at which the agent was last heard, on the monotonic clock."""


@runtime_checkable
class LocalWorker(Protocol):
    """A worker whose process runs on this machine."""

    def disk_reads(self) -> tuple[int, bool]:
        """Return the number of pages that it has read from disks, and whether it waits for a disk now."""


class WorkerSource(Protocol):
    """A source of a pool's workers: this machine, an agent, a cluster."""

    def start(self, first: int, client_key: str) -> Sequence[tuple[WorkerHandle, str]]:
        """Start the workers, or request their start.

        Args:
            first: Number of the first in the pool; the others follow in order.
            client_key: The public CURVE key that they accept.

        Returns:
            Each worker with its own public key; its sockets may not be bound yet.

        Raises:
            PoolError: They cannot be started; none is left running then.
            UsageError: There are no such devices; likewise.
        """

    def connected(self) -> None:
        """Called when all workers are connected."""

    def close(self) -> None:
        """Release shared resources (connections, leases, folders), after the workers' end. Idempotent."""


@runtime_checkable
class RestartableSource(Protocol):
    """A source that can restart a lost worker."""

    def replace(self, number: int, client_key: str) -> tuple[WorkerHandle, str] | None:
        """Start a worker, or request its start, in the place of one that has ended.

        Args:
            number: Its number in the pool, which it keeps.
            client_key: The public CURVE key that it accepts.

        Returns:
            The worker with its own public key, its sockets perhaps not bound yet; ``None`` where it does not belong to
                this source, or cannot be restarted.

        Raises:
            PoolError: It could not be started.
        """


@dataclass(frozen=True, kw_only=True)
class SpareRequest:
    """A worker in the place of one whose own device has none any more.

    Args:
        number: Its number in the pool.
        kind: The kind of its device: ``cpu``, ``cuda`` or another one.
        threads: Threads that its CPU operators may use.
        memory_bytes: The most bytes of its buffers.
        used_bytes: Bytes that the buffers of the lost one have taken.
    """

    number: int
    kind: str
    threads: int
    memory_bytes: int
    used_bytes: int


class SpareSource(WorkerSource, Protocol):
    """A source that can start workers in the place of those of other hosts, within what it may use."""

    def spare(self, request: SpareRequest, client_key: str) -> tuple[WorkerHandle, str]:
        """Start a worker, or request its start; from then on the source replaces it, too.

        Args:
            request: The worker.
            client_key: The public CURVE key that it accepts.

        Returns:
            The worker with its own public key, its sockets perhaps not bound yet.

        Raises:
            OneboxError: There is no room for it, or it could not be started.
        """


def end_all(handles: Sequence[WorkerHandle], *, grace_s: float) -> None:
    """End workers.

    Args:
        handles: The workers.
        grace_s: How long to wait for all of them together to end by themselves.
    """
    end_s = time.monotonic() + grace_s

    def close(handle: WorkerHandle) -> None:
        handle.close(grace_s=max(0.0, end_s - time.monotonic()))

    with contextlib.ExitStack() as closing:  # all of them, whichever fails
        for handle in reversed(handles):
            closing.callback(close, handle)


__all__ = [
    "LOOPBACK",
    "HostedWorker",
    "LocalWorker",
    "RestartableSource",
    "SpareRequest",
    "SpareSource",
    "WorkerHandle",
    "WorkerSource",
    "end_all",
]
