"""From what is asked for to where the devices come from, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import onebox
from onebox import Link
from onebox.errors import PoolError, UsageError
from onebox.pool import open as opening
from onebox.pool.backends import local
from onebox.pool.backends.agents import agent_socket, agent_source
from onebox.pool.backends.agents.agent_source import AgentSource, client_name
from onebox.pool.backends.agents.remote_worker import RemoteWorker
from onebox.pool.backends.local import LocalSource
from onebox.pool.errors import WorkerLocation
from onebox.pool.keys.keyring import KnownAgent, remember_agent
from onebox.pool.open import make_sources, open_pool
from onebox.wire import new_keys
from onebox.wire.protocol.agents import Offer, Stock, Want
from onebox.worker import WorkerConfig


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A client that was paired with two agents."""
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path))
    monkeypatch.delenv("ONEBOX_POOL", raising=False)
    for address in ("lab-1:7171", "lab-2:7272"):
        remember_agent(KnownAgent(address, new_keys().public, "lab"))
    addresses = {"lab-1": "127.0.0.1", "lab-2:7272": "192.0.2.9"}
    monkeypatch.setattr(agent_socket, "own_address", addresses.__getitem__)
    yield


class Started:
    """Stands in for a worker of this machine."""

    def __init__(self, place: WorkerLocation, config: WorkerConfig, *, spawner: object) -> None:
        self.address = ""
        self.config = config


class Leasing:
    """Stands in for the connection to an agent, which offers two cores and leases nothing."""

    asked: Sequence[Want] = ()

    def inspect(self) -> Stock:
        return Stock(1, (Offer("cpu", "", 1 << 30, 2, 1 << 30),))

    def lease(self, wants: Sequence[Want], client_key: str, **options: object) -> list[RemoteWorker]:
        self.asked = wants
        raise PoolError("it leases nothing")

    def close(self) -> None:
        pass


def seen(spec: str, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """Return where the workers of a pool are asked for, and device, threads and memory of each."""
    connection = Leasing()
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(local, "WorkerProcess", Started)
        patch.setattr(agent_source, "AgentConnection", lambda *_: connection)
        for source in make_sources(spec, **limits):
            if isinstance(source, AgentSource):
                source.connect()
                with pytest.raises(PoolError, match="leases nothing"):
                    source.acquire("key", wait=False)
                asked = [(want.device, want.threads, want.memory_bytes) for want in connection.asked]
                found.append((source.address, asked))
            else:
                started: list[Any] = [handle for handle, _ in source.start(0, "key")]
                configs = [worker.config for worker in started]
                made = [(config.device, config.threads, config.quota_bytes) for config in configs]
                found.append((started[0].address, made))
            source.close()
    return found


def test_sources_stand_in_the_order_of_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen("cpu*2", monkeypatch, threads=1) == [("127.0.0.1", [("cpu", 1, 0)] * 2)]
    assert seen("lab-1/cpu*2,sim", monkeypatch, threads=3, memory=9) == [
        ("lab-1", [("cpu", 3, 9)] * 2),
        ("127.0.0.1", [("sim", 1, 9)]),
    ]
    assert [type(one) for one in make_sources("cpu,lab-1,lab-2:7272")] == [LocalSource, AgentSource, AgentSource]


@pytest.mark.parametrize("spec", ["cpu,lab-1,lab-2:7272", "lab-2:7272,cpu", "lab-1,lab-2:7272,cpu"])
def test_workers_of_this_machine_are_reached_where_it_reaches_the_outside(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (address,) = [where for where, _ in seen(spec, monkeypatch) if not where.startswith("lab")]
    assert address == "192.0.2.9"


def test_what_a_file_says_of_a_host_goes_before_what_is_said_of_all(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "lab.toml"
    file.write_text('[[hosts]]\naddress = "lab-1"\nmemory = "1k"\n[[hosts]]\naddress = "local"\ndevices = "sim"\n')
    expected = [("lab-1", [("cpu", 2, 1024)] * 2), ("127.0.0.1", [("sim", 1, 77)])]
    assert seen(str(file), monkeypatch, threads=2, memory=77) == expected
    monkeypatch.setenv("ONEBOX_POOL", str(file))
    assert seen("auto", monkeypatch, threads=2, memory=77) == expected


@pytest.mark.parametrize(
    ("memory", "quotas"),
    [("1k", (1024, 1024)), ("1k,2k", (1024, 2048)), ([1, "2k"], (1, 2048)), ({1: 7}, (0, 7)), ("0:1k,1:9", (1024, 9))],
)
def test_each_device_may_have_its_own_budget(
    memory: Any, quotas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = seen("cpu*2", monkeypatch, threads=1, memory=memory)
    assert asked == [("127.0.0.1", [("cpu", 1, quota) for quota in quotas])]


def test_budgets_of_several_hosts_are_those_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in ("1k,2k", {0: 5}):
        with pytest.raises(UsageError, match=r"for devices of several hosts: give one for all, or .* a file of hosts"):
            make_sources("cpu,lab-1/cpu", memory=memory)
    file = tmp_path / "lab.toml"
    file.write_text(
        '[[hosts]]\naddress = "lab-1"\nmemory = ["1k", 5]\n'
        '[[hosts]]\naddress = "local"\ndevices = "sim*2"\nmemory = [7, 8]\n'
    )
    quotas = [[quota for _, _, quota in devices] for _, devices in seen(str(file), monkeypatch)]
    assert quotas == [[1024, 5], [7, 8]]
    file.write_text('[[hosts]]\naddress = "local"\ndevices = "sim*2"\nmemory = [7, 8, 9]\n')
    with pytest.raises(UsageError, match="memory of 3 devices, but the pool has 2"):
        make_sources(str(file))


@pytest.mark.parametrize("open_", [make_sources, open_pool])
def test_a_host_that_is_not_known_is_said_before_anything_is_started(
    open_: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(LocalSource, "start", refuse)
    monkeypatch.setattr(agent_source, "AgentConnection", refuse)
    known = r"'lab-3' \(perhaps 'lab-1'\?\); it is paired with lab-1:7171, lab-2:7272"
    with pytest.raises(
        UsageError, match=rf"not paired with an agent at {known}: .*'onebox pair connect lab-3' here, .*; if no host"
    ):
        open_("cpu,lab-1,lab-3/cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"spec": 2}, "spec=2: allowed is text such as 'auto', 'cpu*2'"),
        ({"spec": ["cpu", "cpu"]}, "allowed is text such as"),
        ({"spec": None}, "spec=None"),
        ({"spec": "2"}, "not paired with an agent at '2'"),
        ({"threads": "two"}, "threads='two': allowed are 1 and more"),
        ({"threads": 0}, "threads=0"),
        ({"threads": 1.5}, "threads=1.5"),
        ({"memory": 1.5}, "memory 1.5: allowed are bytes or text such as 2GiB"),
        ({"memory": b"1GB"}, "memory b'1GB'"),
        ({"memory": "1 heap"}, "memory 1 heap: allowed are bytes"),
        ({"memory": [None]}, "memory None: allowed are whole bytes"),
        ({"links": [(0, 1)]}, "allowed is a dict from pairs of devices to links, such as {(0, 1): onebox.Link("),
        ({"links": {0: Link()}}, "allowed is a dict from pairs of devices"),
        ({"links": {(0, 1): 125e6}}, "allowed is a dict from pairs of devices"),
        ({"faults": [1]}, "faults=[1]: allowed is a dict from devices to lists of faults"),
        ({"faults": {0: "kill"}}, "allowed is a dict from devices"),
        ({"grace_s": "long"}, "grace_s='long': allowed are seconds above 0"),
        ({"grace_s": -1}, "grace_s=-1"),
        ({"wait": "no"}, "wait='no': allowed are True and False"),
        ({"plain_links": 1}, "plain_links=1: allowed are True and False"),
        ({"virtual_devices": None}, "virtual_devices=None: allowed are True and False"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_refused_before_anything_is_started(
    arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "connect_pool", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(UsageError) as error:
        onebox.open(**{"spec": "cpu*2"} | arguments)
    assert words in str(error.value)


@pytest.mark.parametrize("wrong", [{"latency_s": "1ms"}, {"bandwidth_bps": None}, {"latency_s": -1}])
def test_a_link_of_other_types_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a latency is 0 s or more"):
        Link(**wrong)


def test_how_others_see_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("platform.node", lambda: "desk")
    monkeypatch.setattr("getpass.getuser", lambda: "ana")
    assert client_name() == "ana@desk"
    monkeypatch.setattr("getpass.getuser", nobody)
    monkeypatch.setattr("os.getuid", lambda: 4711)
    assert client_name() == "4711@desk"
