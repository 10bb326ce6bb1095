"""Workers on this machine, which end with this process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from onebox.errors import PoolError
from onebox.pool.backends.base import LOOPBACK, SpareRequest, WorkerHandle, end_all
from onebox.pool.discovery import LOCAL_HOST, DeviceRequest, gpu_count
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.cpu_affinity import CoreAllocator
from onebox.pool.launch.socket_folder import SocketFolder
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.zygotes import OWN
from onebox.sizes import size_text
from onebox.wire import new_keys
from onebox.worker import SHARING_KEY_BYTES, Fault, WorkerConfig


@dataclass(frozen=True)
class _LocalWorker:
    """A worker of this machine, however often it is started anew.

    Args:
        request: Its device.
        quota_bytes: The most bytes of its buffers; 0 for no limit.
        cores: The cores that are its own; empty for any.
        used_bytes: Bytes that it is going to need at least, where that is known.
    """

    request: DeviceRequest
    quota_bytes: int
    cores: tuple[int, ...] = ()
    used_bytes: int = 0


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
        self._workers: dict[int, _LocalWorker] = {}
        self._sharing_key = secrets.token_hex(SHARING_KEY_BYTES)
        self._core_allocator = CoreAllocator()

    def start(self, first: int, client_key: str) -> Sequence[tuple[WorkerHandle, str]]:
        """Start the workers; see :class:`~onebox.pool.backends.base.WorkerSource`.

        Raises:
            PoolError: No folder for their sockets can be created.
        """
        self._folders.append(SocketFolder())
        cores = self._core_allocator.allocate([each.threads if each.device == "cpu" else 0 for each in self._requests])
        made = map(_LocalWorker, self._requests, self._quotas, cores)
        self._workers = dict(enumerate(made, first))
        started: list[tuple[WorkerHandle, str]] = []
        try:
            for number in self._workers:
                faults = tuple(self._faults.get(number, ()))
                started.append(self._start(number, client_key, self._folders[0].path, faults))
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
        if number not in self._workers:
            return None
        self._folders.append(SocketFolder())
        return self._start(number, client_key, self._folders[-1].path, ())

    def spare(self, request: SpareRequest, client_key: str) -> tuple[WorkerHandle, str]:
        """Start a worker in the place of one of another host; see :class:`~onebox.pool.backends.base.SpareSource`.

        Raises:
            PoolError: There is no room for it.
        """
        device = "cpu" if request.kind == "cpu" else self._unused_gpu(request.kind)
        if device == "cpu":  # others of a host that is lost may not have filled theirs yet
            promised_bytes = sum(worker.used_bytes for worker in self._workers.values())
            free_bytes = psutil.virtual_memory().available - promised_bytes
            if free_bytes < request.used_bytes:
                free = size_text(max(0, free_bytes))
                raise PoolError(f"this machine has {free} of memory left, of {size_text(request.used_bytes)} needed")
        asked = DeviceRequest(device=device, threads=request.threads)
        self._workers[request.number] = _LocalWorker(asked, request.memory_bytes, used_bytes=request.used_bytes)
        self._folders.append(SocketFolder())
        return self._start(request.number, client_key, self._folders[-1].path, ())

    def _unused_gpu(self, kind: str) -> str:
        """Return a GPU of this machine that the pool does not use.

        Raises:
            PoolError: There is none.
        """
        used = {worker.request.device for worker in self._workers.values()}
        unused = [name for name in (f"cuda:{index}" for index in range(gpu_count())) if name not in used]
        if kind != "cuda" or not unused:
            raise PoolError(f"this machine has no {kind} device that the pool does not use")
        return unused[0]

    def _start(self, number: int, client_key: str, folder: str, faults: tuple[Fault, ...]) -> tuple[WorkerHandle, str]:
        worker, pair = self._workers[number], new_keys()
        request = worker.request
        config = WorkerConfig(
            request.device,
            request.threads,
            pair.public,
            pair.secret,
            client_key,
            folder,
            quota_bytes=worker.quota_bytes,
            faults=faults,
            speed=request.speed,
            sharing=request.sharing,
            owner=os.getpid(),
            cores=worker.cores,
            sharing_key=self._sharing_key,
        )
        place = WorkerLocation(worker=number, host=LOCAL_HOST, device=request.device)
        process = WorkerProcess(place, config, spawner=OWN)
        process.address = self._address
        return process, pair.public

    def connected(self) -> None:
        """Remove the folders of the sockets; existing connections stay."""
        while self._folders:
            self._folders.pop().close()

    def close(self) -> None:
        """Remove what is left, and free the cores. Idempotent."""
        self.connected()
        self._core_allocator.close()
