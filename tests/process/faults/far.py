"""Pools whose workers listen on TCP ports, as those of another host do, behind a network that can be made bad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

import onebox
from onebox.pool.backends import local as local_module
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.pool.launch.zygotes import WorkerSpawner
from onebox.pool.liveness import SILENCE_S
from onebox.worker import Ports, WorkerConfig
from tests.process.faults.proxy import Network


@dataclass
class Far:
    """Workers behind a bad network.

    Args:
        network: The network.
        configs: What the workers were told.
    """

    network: Network
    configs: list[WorkerConfig] = field(default_factory=list)

    def start(
        self, place: WorkerLocation, config: WorkerConfig, *, spawner: WorkerSpawner | None = None
    ) -> WorkerProcess:
        """Start a worker that listens on TCP ports; stands in for the class of worker processes."""
        self.configs.append(msgspec.structs.replace(config, address="127.0.0.1"))
        return FarWorker(place, self.configs[-1], self.network, spawner)


class FarWorker(WorkerProcess):
    """A worker process that is connected to through a network."""

    def __init__(
        self, place: WorkerLocation, config: WorkerConfig, network: Network, spawner: WorkerSpawner | None
    ) -> None:
        super().__init__(place, config, spawner=spawner)
        self._network = network

    def ports(self) -> Ports:
        ports = super().ports()
        commands = self._network.door(ports.commands, wears=True)
        return Ports(commands, self._network.door(ports.heartbeats, wears=False))


@contextmanager
def behind(network: Network, spec: str, patience_s: float = SILENCE_S) -> Iterator[tuple[onebox.Pool, Far]]:
    """Open a pool of workers behind a network, which may be silent for so long."""
    far = Far(network)
    with ExitStack() as stack:
        stack.callback(network.close)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_module, "WorkerProcess", far.start)
            pool = onebox.open(spec, threads=1)
        pool._client_loop._liveness.patience_s = dict.fromkeys(pool.present, patience_s)
        yield stack.enter_context(pool), far
