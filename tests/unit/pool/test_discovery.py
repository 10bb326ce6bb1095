"""Which devices a pool is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.pool import discovery
from onebox.pool.discovery import MOST_CPU_WORKERS, DeviceRequest, requested_devices
from onebox.pool.spec import LocalPart, parse_spec
from tests.kit.modelled import install


@pytest.fixture(params=[0, 3], ids=["no accelerator", "three accelerators"])
def accelerators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr(discovery, "cores", lambda: 8)
    return count


def names(spec: str) -> list[str]:
    return [request.device for request in requested_devices(spec)]


def test_automatic_is_all_accelerators_or_some_cores(accelerators: int) -> None:
    found = requested_devices()
    if accelerators:
        assert [request.device for request in found] == ["cuda:0", "cuda:1", "cuda:2"]
    else:
        assert found == [DeviceRequest(device="cpu", threads=2)] * MOST_CPU_WORKERS
    assert requested_devices(" auto ") == found


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cpu", ["cpu"]),
        ("cpu*3", ["cpu"] * 3),
        ("cpu, cpu*2", ["cpu"] * 3),
        ("cuda:1", ["cuda:1"]),
        ("cuda,cpu", ["cuda:0", "cuda:1", "cuda:2", "cpu"]),
        ("cuda:2,cuda:0", ["cuda:2", "cuda:0"]),
        ("sim", ["sim"]),
        ("cpu,sim*2", ["cpu", "sim", "sim"]),
    ],
)
def test_lists(accelerators: int, spec: str, expected: list[str]) -> None:
    if accelerators or "cuda" not in spec:
        assert names(spec) == expected
    else:
        with pytest.raises(UsageError, match="this machine has 0 CUDA devices"):
            requested_devices(spec)


def test_accelerators_of_installed_packages(accelerators: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="not understood"):
        requested_devices("model:4*3")
    with pytest.raises(UsageError, match="not understood"):
        parse_spec("model:4*3")
    install(monkeypatch)
    assert names("model:4*3,cpu,model") == ["model:4", "model:5", "model:6", "cpu", "model:0"]
    assert [each.threads for each in requested_devices("model:4*3,sim")] == [2, 2, 2, 1]
    assert parse_spec("model:4*3,lab1:717") == (LocalPart(devices="model:4*3"), *parse_spec("lab1:717"))


def test_workers_that_share_a_gpu_know_it(accelerators: int) -> None:
    if accelerators:
        assert [each.sharing for each in requested_devices("cuda:0,cpu*2,cuda:1,cuda:0")] == [2, 1, 1, 1, 2]


@pytest.mark.parametrize("spec", ["cuda:3", "cuda:0,cuda:999"])
@pytest.mark.usefixtures("accelerators")
def test_devices_that_are_not_there(spec: str) -> None:
    with pytest.raises(UsageError, match="CUDA devices"):
        requested_devices(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        ",",
        "cpu,",
        "gpu",
        "cpu*0",
        "cpu*-1",
        "cpu*1000",
        "cpu*1.5",
        "cuda*2",
        "cuda:",
        "cuda:-1",
        "CPU",
        "auto,cpu",
        "mps",
        "cpu@",
        "cpu@-1",
        "cpu@half",
        "cpu@0.5*2",
        "cpu@1,5",
        "sim@inf",
        "sim@1e3",
        "sim:0",
        "sim*0",
        "cpu@0.5@0.5",
    ],
)
def test_what_is_not_understood(spec: str) -> None:
    with pytest.raises(UsageError, match=r"not understood.*allowed"):
        requested_devices(spec)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cpu@0.5", [("cpu", 0.5)]),
        ("cpu*2@0.25, cpu", [("cpu", 0.25)] * 2 + [("cpu", 1.0)]),
        ("cpu@1", [("cpu", 1.0)]),
        ("sim*4@0.5", [("sim", 0.5)] * 4),
        ("sim@2.5,sim", [("sim", 2.5), ("sim", 1.0)]),
    ],
)
@pytest.mark.usefixtures("accelerators")
def test_speeds(spec: str, expected: list[tuple[str, float]]) -> None:
    assert [(request.device, request.speed) for request in requested_devices(spec)] == expected


@pytest.mark.parametrize(
    "spec", ["cpu@0", "cpu@1.01", "cpu@2", "sim@0", "sim@0.0", "cuda@0.5", "cuda:0@1", "cpu,sim*2@0"]
)
@pytest.mark.usefixtures("accelerators")
def test_speeds_that_cannot_be(spec: str) -> None:
    with pytest.raises(UsageError, match=r"asks for speed .*; allowed: .*sim.*cpu.*cuda"):
        requested_devices(spec)


@given(st.text(max_size=8) | st.text("cpusimda0123456789.*@:,", max_size=12))
def test_any_text_gives_devices_or_a_usage_error(spec: str) -> None:
    try:
        found = requested_devices(spec)
    except UsageError as error:
        assert repr(spec) in str(error)
    else:
        assert 1 <= len(found) < 6000
        assert all(request.speed > 0 for request in found)
        assert all(request.speed <= 1 for request in found if request.device != "sim")


@pytest.mark.parametrize(
    ("spec", "threads", "expected"), [("cpu*2", None, 4), ("cpu*16", None, 1), ("cpu*2", 5, 5), ("sim*2", 5, 1)]
)
@pytest.mark.usefixtures("accelerators")
def test_threads_are_shared_out(spec: str, threads: int | None, expected: int) -> None:
    assert {request.threads for request in requested_devices(spec, threads)} == {expected}


@pytest.mark.usefixtures("accelerators")
def test_devices_that_compute_nothing_take_no_threads() -> None:
    assert [request.threads for request in requested_devices("cpu*2,sim*4")] == [4, 4, 1, 1, 1, 1]


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_that_are_none(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads={threads}"):
        requested_devices("cpu", threads)
