"""What a host offers, and how busy it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from onebox.agent.host_devices import DeviceLoad, offered_devices
from onebox.errors import UsageError
from onebox.pool.discovery import cores
from tests.kit.modelled import install


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="a GPU", total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_gpus_the_cpu_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    (cpu,) = offered_devices()
    assert (cpu.device, cpu.threads, cpu.memory_bytes) == ("cpu", cores(), psutil.virtual_memory().total)
    assert cpu.name
    (cpu,) = offered_devices("cpu", threads=1, memory_bytes=1 << 20)
    assert (cpu.threads, cpu.memory_bytes) == (1, 1 << 20)


@pytest.mark.usefixtures("two_gpus")
def test_all_gpus_and_the_cpu_are_offered_or_what_is_named() -> None:
    assert [offer.device for offer in offered_devices()] == ["cuda:0", "cuda:1", "cpu"]
    assert [offer.device for offer in offered_devices("cuda:1,cpu")] == ["cuda:1", "cpu"]
    gpus = offered_devices("cuda", memory_bytes=1 << 30)
    assert [(gpu.device, gpu.memory_bytes, gpu.threads) for gpu in gpus] == [
        ("cuda:0", 1 << 30, max(1, cores() // 2)),
        ("cuda:1", 1 << 30, max(1, cores() // 2)),
    ]


def test_emulated_devices_are_offered_where_they_are_named() -> None:
    offers = offered_devices("sim*3,cpu", threads=2)
    assert [(offer.device, offer.threads) for offer in offers] == [("sim:0", 1), ("sim:1", 1), ("sim:2", 1), ("cpu", 2)]
    assert offered_devices("sim", memory_bytes=1 << 20)[0].memory_bytes == 1 << 20


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("spec", "caps", "what"),
    [
        ("cpu,cpu", {}, "name each device once"),
        ("cpu*2", {}, "name each device once"),
        ("model:3", {}, "'model:3' cannot be offered; allowed are cpu, cuda"),
        ("cuda,cuda:0", {}, "name each device once"),
        ("cpu@0.5", {}, "without @"),
        ("sim@2", {}, "without @"),
        ("cuda:2", {}, "this machine has 2 CUDA devices"),
        ("tpu", {}, "not understood"),
        ("cpu", {"threads": 10**6}, f"may use 1 to {cores()}"),
        ("cpu", {"threads": 0}, "0 cores"),
        ("cuda", {"memory_bytes": 1 << 50}, "it has 8589934592"),
        ("cpu", {"memory_bytes": 0}, "at least 1 is needed"),
    ],
)
def test_what_cannot_be_offered_is_refused(
    spec: str, caps: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    with pytest.raises(UsageError, match=what):
        offered_devices(spec, **caps)


def test_a_load_is_a_share_and_is_read_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 50.0, 130.0])
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: next(readings))
    load = DeviceLoad()
    assert [load.of("cpu", now_s) for now_s in (0.0, 0.5, 1.1)] == [0.5, 0.5, 1.0]
    assert load.average() >= 0


def test_the_load_of_a_gpu_without_its_library_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert DeviceLoad().of("cuda:0", 0.0) == -1.0
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 25)
    assert DeviceLoad().of("cuda:0", 0.0) == 0.25
