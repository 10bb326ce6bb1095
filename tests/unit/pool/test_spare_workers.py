"""Where a worker goes on whose host is gone: which agents are asked for what, and when this machine is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from onebox.errors import PoolError, UsageError
from onebox.pool import spare_workers
from onebox.pool.backends import local
from onebox.pool.backends.agents.agent_source import AgentSource
from onebox.pool.backends.local import LocalSource
from onebox.pool.devices import DeviceInfo
from onebox.pool.discovery import DeviceRequest
from onebox.pool.errors import WorkerLocation
from onebox.pool.spare_workers import SpareWorkers
from onebox.pool.spec import AgentPart
from onebox.wire.protocol.agents import Offer, Stock, Want
from onebox.worker import WorkerConfig

GPU = DeviceInfo(number=2, host="lab1", device="cuda:3", name="a GPU", threads=4, memory_bytes=8 << 30)
CPU = replace(GPU, device="cpu", name="a CPU")


class Started:
    """Stands in for a worker of this machine."""

    def __init__(self, place: WorkerLocation, config: WorkerConfig, *, spawner: object) -> None:
        self.place, self.config, self.address = place, config, ""


class Leased:
    """Stands in for a worker of an agent."""

    key, lease = "key", 1

    def __init__(self, device: str) -> None:
        self.place = WorkerLocation(worker=0, host="lab2", device=device)

    def number(self, worker: int) -> None:
        self.place = replace(self.place, worker=worker)

    def unreachable(self, within_s: float) -> str:
        return ""

    def close(self, *, grace_s: float) -> None:
        pass


class Connection:
    """Stands in for the connection to an agent, which leases one device, and then such of some kinds."""

    gone = False

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.opened = False
        self.asked: list[Want] = []
        self.ended: list[Any] = []

    def inspect(self) -> Stock:
        return Stock(1, (Offer("cpu", "", 1 << 30, 2, 1 << 30),))

    def lease(self, wants: Sequence[Want], client_key: str, *, wait: bool, **options: object) -> list[Any]:
        (want,) = wants
        assert not wait
        if not self.opened:
            self.opened = True
            return [Leased(want.device)]
        self.asked.append(want)
        if want.device not in self.kinds:
            raise PoolError(f"refuses: no {want.device}\n  more about it")
        return [Leased(want.device)]

    def end(self, handle: Any) -> bool:
        self.ended.append(handle)
        return False

    def close(self) -> None:
        pass


def agent(connection: Any) -> AgentSource:
    found = AgentSource(AgentPart(address="127.0.0.1:9", devices=("cpu",)), connect=lambda address: connection)
    found.connect()
    found.acquire("client", wait=False)
    return found


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs and a gigabyte of memory left."""
    monkeypatch.setattr(local, "WorkerProcess", Started)
    monkeypatch.setattr(local, "gpu_count", lambda: 2)
    monkeypatch.setattr(local.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))


def placed(spares: SpareWorkers, device: DeviceInfo, used_bytes: int = 0) -> tuple[str, str] | None:
    made = spares.start(device, used_bytes, "client")
    if made is None:
        return None
    place = made[0].place
    assert place.worker == device.number
    return place.host, place.device


def test_an_agent_is_asked_for_what_the_lost_worker_has_had() -> None:
    first, second = Connection(), Connection("cpu")
    sources = [agent(first), agent(second)]
    spares = SpareWorkers(list(sources))
    assert placed(spares, CPU) == ("lab2", "cpu")
    assert first.asked == second.asked == [Want("cpu", 4, 8 << 30)]
    assert spares.sources == {2: sources[1]}
    replaced = sources[1].replace(2, "client")
    assert replaced is not None
    assert second.asked == [Want("cpu", 4, 8 << 30)] * 2
    assert len(second.ended) == 1


def test_an_agent_that_is_gone_is_not_asked() -> None:
    gone = Connection("cpu")
    source = agent(gone)
    gone.gone = True
    assert placed(SpareWorkers([source]), CPU) == ("localhost", "cpu")
    assert not gone.asked


def test_a_gpu_anywhere_is_preferred_to_a_cpu() -> None:
    with_cpus = Connection("cpu")
    sources: list[Any] = [agent(with_cpus)]
    spares = SpareWorkers(sources)
    assert placed(spares, GPU) == ("localhost", "cuda:0")
    assert with_cpus.asked == [Want("cuda", 0, 8 << 30)]
    assert len(sources) == 2, "with workers of this machine, which the pool closes"
    assert placed(spares, replace(GPU, number=3)) == ("localhost", "cuda:1")
    assert placed(spares, replace(GPU, number=4)) == ("lab2", "cpu")
    assert placed(SpareWorkers([agent(Connection("cuda"))]), GPU) == ("lab2", "cuda")


def test_devices_that_the_pool_uses_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LocalSource([DeviceRequest(device="cuda:0", threads=1)], quotas=(1,))
    own.start(0, "client")
    spares = SpareWorkers([agent(Connection()), own])
    assert placed(spares, GPU) == ("localhost", "cuda:1")
    assert placed(spares, replace(GPU, number=3)) == ("localhost", "cpu")
    own.close()


def test_this_machine_takes_what_its_memory_has_room_for(caplog: pytest.LogCaptureFixture) -> None:
    sources: list[Any] = [agent(Connection())]
    spares = SpareWorkers(sources)
    assert placed(spares, CPU, 600 << 20) == ("localhost", "cpu")
    assert placed(spares, replace(CPU, number=3), 600 << 20) is None
    assert caplog.messages == [
        "device 3 (cpu on lab1) finds no other place: refuses: no cpu; this machine has 424 MiB of memory left, of "
        "600 MiB needed"
    ]
    sources[1].close()


def test_what_computes_nothing_and_pools_without_agents_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert placed(SpareWorkers([agent(Connection("sim", "cpu"))]), replace(GPU, device="sim")) is None
    assert placed(SpareWorkers([]), CPU) is None

    def no_workers(what: str, instead: str) -> None:
        raise UsageError(f"{what} on Linux alone; {instead}")

    monkeypatch.setattr(spare_workers, "require_linux", no_workers)
    assert placed(SpareWorkers([]), CPU) is None
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "there is no other host",
        "the pool has no agents",
        "workers run on Linux alone; another host of the pool with room for one more would do",
    ]
