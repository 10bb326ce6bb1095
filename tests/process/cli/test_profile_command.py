"""``onebox profile`` and ``pool.profile()`` with processes: what is emulated comes out, and is kept."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from onebox.cli import main
from onebox.cost import PoolProfile, Speeds
from onebox.errors import WorkerDied
from onebox.pool import Fault, Link, open_pool
from tests.process.cli.commands import command

SMALL = ("--pool", "sim*2", "--memory", "4MiB")
NEAR, FAR = Link(latency_s=0.002, bandwidth_bps=50e6), Link(latency_s=0.02, bandwidth_bps=5e6)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    return list((cache / "onebox" / "profiles").glob("*.json"))


def test_processors() -> None:
    with open_pool("cpu*2", threads=1) as pool:
        found = pool.profile(cache=False)
    for device in found.devices:
        assert (device.kind, device.host, device.emulated) == ("cpu", "localhost", False)
        speeds = {name: getattr(device.speeds, name) for name in Speeds.__struct_fields__}
        assert speeds["bf16_flops"] is None or speeds["bf16_flops"] > 0, "none without instructions for it"
        assert all(speeds[name] > 0 for name in speeds.keys() - {"bf16_flops"})
    assert {source: list(row) for source, row in found.latency_s.items()} == {0: [1], 1: [0]}
    assert found.groups == (((0, 1),),)
    assert found.emulated_links == ()


@pytest.mark.feature("Pools: Slow down devices and links for experiments")
def test_emulated_links_come_out_as_what_they_emulate() -> None:
    links = {(0, 1): NEAR, (0, 2): FAR, (1, 2): FAR}
    with open_pool("sim,sim@0.5,sim", links=links) as pool:
        found = pool.profile(cache=False)
    assert [(device.speed, device.emulated) for device in found.devices] == [(1.0, True), (0.5, True), (1.0, True)]
    assert all(device.speeds.matmul_flops is None and device.speeds.call_s > 0 for device in found.devices)
    for (source, target), link in links.items():
        for a, b in ((source, target), (target, source)):
            assert 0.9 * link.latency_s < found.latency_s[a][b] < 3 * link.latency_s
            assert 0.4 * link.bandwidth_bps < found.bandwidth_bps[a][b] < 1.2 * link.bandwidth_bps
    assert found.groups == (((0, 1), (2,)),)
    assert len(found.emulated_links) == 6


def test_devices_that_cannot_send_to_each_other_have_no_link() -> None:
    with open_pool("cpu,sim*2,cpu@0.5", threads=1, memory=4 << 20) as pool:
        found = pool.profile(cache=False)
    assert {source: set(row) for source, row in found.latency_s.items()} == {0: {3}, 1: {2}, 2: {1}, 3: {0}}
    assert found.groups == (((0, 3), (1, 2)),)


def test_a_worker_that_dies_is_named(cache: Path) -> None:
    with open_pool("sim*2", faults={1: [Fault("kill", "send", 2)]}) as pool:
        with pytest.raises(WorkerDied, match="worker 1"):
            pool.profile()
        with pytest.raises(WorkerDied, match="worker 1"):
            pool.profile()
    assert not kept(cache)


@pytest.mark.feature("Plans: Measure devices, links and models")
def test_tables_and_file_measured_once(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = command(["profile", *SMALL, "--report", "p.json", "--figure", "p.svg"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("sim*", "* emulated", "latency in µs", "bandwidth in GB/s", "localhost", "--fresh measures anew"):
        assert part in done.stdout
    assert "figure p.svg" in done.stdout
    assert "<svg" in (tmp_path / "p.svg").read_text()
    found = msgspec.json.decode((tmp_path / "p.json").read_bytes(), type=PoolProfile)
    assert len(found.devices) == 2
    (path,) = kept(cache)
    first = path.read_bytes()

    def again(*flags: str) -> PoolProfile:
        assert main(["profile", *SMALL, *flags, "--json"]) == 0
        text = capsys.readouterr().out
        assert json.loads(text)["latency_s"]["0"]["1"] > 0
        return msgspec.json.decode(text, type=PoolProfile)

    assert again() == found
    assert again("--no-cache") != found
    assert path.read_bytes() == first
    assert again("--fresh") != found
    assert path.read_bytes() != first
    assert kept(cache) == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool", "gpu"], "not paired with an agent at 'gpu'"),
        (["--pool", "sim", "--memory", "1KiB"], "has 1024 bytes of memory left"),
        (["--threads", "0"], "--threads 0: allowed are 1 and more"),
        (["--report", "nowhere/p.json"], "--report nowhere/p.json: a file in an existing folder"),
        (["--report", "."], "--report .: a file in an existing folder"),
        (["--figure", "p.jpg"], "allowed are .png, .svg, .pdf"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_message(
    arguments: list[str], message: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("onebox: ") and message in said
    assert "Traceback" not in said and len(said.splitlines()) == 1
    assert not kept(cache)


def test_a_wide_matrix_is_not_cut(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["profile", "--pool", "sim*4", "--memory", "4MiB"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if "│" not in line and " - " in f"{line} "]
    assert [row[0] for row in rows] == [str(number) for number in range(4)] * 2
    assert all(len(row) == 5 for row in rows)


@pytest.mark.feature("Plans: Measure devices, links and models")
def test_a_model_is_measured_by_its_segments_and_kept(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("profile", "--pool", "cpu", "--model", "mlp", "--micro-batches", "4,8", "--json")
    first = command(arguments, tmp_path)
    model = json.loads(first.stdout)["model"]
    names = [segment["name"] for segment in model["bytes"]["segments"]]
    assert len(names) == len(set(names)) > 1
    assert [times["size"] for times in model["times"]["cpu"]] == [4, 8]
    for times in model["times"]["cpu"]:
        assert len(times["seconds"]) == len(names)
        assert all(forward > 0 and weight > 0 for forward, _, weight in times["seconds"])
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["model"] == model
