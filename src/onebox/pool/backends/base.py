"""What a pool asks of a worker's process, wherever it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from onebox.errors import WorkerDied
from onebox.pool.errors import WorkerLocation
from onebox.worker import Ports


class WorkerHandle(Protocol):
    """A worker's process: a child of this process, or one that an agent or a cluster has started."""

    @property
    def place(self) -> WorkerLocation:
        """Where it is, for messages."""

    @property
    def address(self) -> str:
        """The address of its host that its peers connect to."""

    @property
    def descriptor(self) -> int:
        """A file descriptor that becomes readable when the process has ended, or nobody knows of it any more."""

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
        """End it: wait for its own end for a while, then kill it. Idempotent."""


@runtime_checkable
class HostedWorker(Protocol):
    """A member on whose host somebody else can be heard."""

    @property
    def heard_s(self) -> float:
        """When they were last heard, on the monotonic clock."""


class WorkerSource(Protocol):
    """Where some of a pool's workers come from: this machine, an agent, a cluster."""

    def start(self, first: int, client_key: str) -> Sequence[tuple[WorkerHandle, str]]:
        """Start the workers, or ask for them to be started.

        Args:
            first: Number of the first in the pool; the others follow.
            client_key: The public CURVE key that they are to let in.

        Returns:
            Each worker with its own public key; its sockets may not be bound yet.

        Raises:
            PoolError: They cannot be had; none is left running then.
            UsageError: There are none such; likewise.
        """

    def connected(self) -> None:
        """Take the news that all workers are connected to."""

    def close(self) -> None:
        """Give back what is no worker's own (connections, leases, folders), after the workers' end. Idempotent."""


@runtime_checkable
class RestartableSource(Protocol):
    """A source that can start a worker again that was lost."""

    def replace(self, number: int, client_key: str) -> tuple[WorkerHandle, str] | None:
        """Start a worker, or ask for it to be started, in the place of one that has ended.

        Args:
            number: Its number in the pool, which it keeps.
            client_key: The public CURVE key that it is to let in.

        Returns:
            The worker with its own public key, its sockets perhaps not bound yet; ``None`` where it is none of this
            source's, or there is no way to start it again.

        Raises:
            PoolError: It could not be started.
        """


def end_all(members: Sequence[WorkerHandle], *, grace_s: float) -> None:
    """End workers.

    Args:
        members: Them.
        grace_s: How long to wait for their own end, all of them together.
    """
    end_s = time.monotonic() + grace_s
    for member in members:
        member.close(grace_s=max(0.0, end_s - time.monotonic()))


__all__ = ["HostedWorker", "RestartableSource", "WorkerHandle", "WorkerSource", "end_all"]
