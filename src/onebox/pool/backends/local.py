"""Workers on this machine, which end with this process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from onebox.pool.backends.base import LOOPBACK, WorkerHandle, end_all
from onebox.pool.discovery import LOCAL_HOST, DeviceRequest
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.cpu_affinity import CoreAllocator
from onebox.pool.launch.socket_folder import SocketFolder
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.zygotes import OWN
from onebox.wire import new_keys
from onebox.worker import SHARING_KEY_BYTES, Fault, WorkerConfig


class LocalSource:
    """Workers that this process starts, by its zygote where possible; a
    :class:`~onebox.pool.backends.base.WorkerSource`.

    Their sockets are in a folder that only this user can enter, and that is removed once all are connected: no other
    process can connect, and nothing is left if this process is killed.

    Args:
        requests: The workers to start.
        quotas: Limits of the buffers of each in bytes, in the same order, 0 for no limit; empty for no limits.
        faults: Injected faults for tests, by worker number in the pool.
        address: The address of this machine that peers of other hosts connect to.
    """

    def __init__(
        self,
        requests: Sequence[DeviceRequest],
        *,
        quotas: Sequence[int] = (),
        faults: Mapping[int, Sequence[Fault]] | None = None,
        address: str = LOOPBACK,
    ) -> None:
        self._address = address
        self._requests = requests
        self._quotas = tuple(quotas) or (0,) * len(requests)
        self._faults = faults or {}
        self._folders: list[SocketFolder] = []
        self._first = 0
        self._sharing_key = secrets.token_hex(SHARING_KEY_BYTES)
        self._core_allocator = CoreAllocator()
        self._cores: tuple[tuple[int, ...], ...] = ()

    def start(self, first: int, client_key: str) -> Sequence[tuple[WorkerHandle, str]]:
        """Start the workers; see :class:`~onebox.pool.backends.base.WorkerSource`.

        Raises:
            PoolError: No folder for their sockets can be created.
        """
        self._first = first
        self._folders.append(SocketFolder())
        self._cores = self._core_allocator.allocate(
            [each.threads if each.device == "cpu" else 0 for each in self._requests]
        )
        started: list[tuple[WorkerHandle, str]] = []
        try:
            for number, request in enumerate(self._requests, first):
                faults = tuple(self._faults.get(number, ()))
                started.append(self._start(number, request, client_key, self._folders[0].path, faults))
        except BaseException:
            end_all([handle for handle, _ in started], grace_s=0.0)
            self.close()
            raise
        return started

    def replace(self, number: int, client_key: str) -> tuple[WorkerHandle, str] | None:
        """Restart a worker; see :class:`~onebox.pool.backends.base.RestartableSource`. No fault is injected into it.

        Several may be started before the first one is connected: each has a folder of its own.

        Raises:
            PoolError: No folder for its sockets can be created.
        """
        if not self._first <= number < self._first + len(self._requests):
            return None
        self._folders.append(SocketFolder())
        return self._start(number, self._requests[number - self._first], client_key, self._folders[-1].path, ())

    def _start(
        self, number: int, request: DeviceRequest, client_key: str, folder: str, faults: tuple[Fault, ...]
    ) -> tuple[WorkerHandle, str]:
        pair = new_keys()
        config = WorkerConfig(
            request.device,
            request.threads,
            pair.public,
            pair.secret,
            client_key,
            folder,
            quota_bytes=self._quotas[number - self._first],
            faults=faults,
            speed=request.speed,
            sharing=request.sharing,
            owner=os.getpid(),
            cores=self._cores[number - self._first],
            sharing_key=self._sharing_key,
        )
        place = WorkerLocation(worker=number, host=LOCAL_HOST, device=request.device)
        worker = WorkerProcess(place, config, spawner=OWN)
        worker.address = self._address
        return worker, pair.public

    def connected(self) -> None:
        """Remove the folders of the sockets; existing connections stay."""
        while self._folders:
            self._folders.pop().close()

    def close(self) -> None:
        """Remove what is left, and free the cores. Idempotent."""
        self.connected()
        self._core_allocator.close()
