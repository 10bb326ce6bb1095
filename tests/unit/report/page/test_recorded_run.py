"""The page of a run's folder: written, being written, damaged, of a process that has ended without a word."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from onebox.errors import UsageError
from onebox.pool import DeviceInfo
from onebox.report import RunStatus, timeline_of
from onebox.report.page.recorded_run import GrowingFile, RecordedRun, newest_run
from tests.unit.report.steps import as_measured, foreseen, plan

DEVICES = tuple(
    DeviceInfo(number=n, host="localhost", device="cpu", name="a CPU", threads=1, memory_bytes=1 << 30)
    for n in range(3)
)
NAMES = {n: f"worker {n} (cpu)" for n in range(3)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has just begun."""
    folder = tmp_path / "runs" / "20260102T030405Z-cnn"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": "cnn", "data": "digits", "epochs": 2}))
    return folder


def append(run: Path, *records: dict[str, Any] | bytes) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        for record in records:
            file.write(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n")


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number, "epoch": 1, "loss": 1 / number, "samples": 8, "time": float(number)}


def status(**changes: Any) -> RunStatus:
    begun = RunStatus.of_this_process("cnn on digits", total_steps=20, epochs=2, devices=DEVICES)
    return msgspec.structs.replace(begun, **changes)


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json", "status.json", "summary.json", "timeline.json"])
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_no_special_file_holds_up_the_page(name: str, kind: str, run: Path) -> None:
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero")
    found = RecordedRun(run)
    assert found.state().head.name == "cnn on digits"
    assert found.trace() is None


@pytest.mark.parametrize("seed", range(40))
def test_no_odd_value_stops_the_page(seed: int, run: Path) -> None:
    chance = random.Random(seed)
    odd = [None, -1, 0, 1e308, 10**30, "\x1b[31m", [], {}, [[]], {"predicted": "x", "measured": [1]}, True, "9" * 400]

    def some(*names: str) -> dict[str, Any]:
        return {name: chance.choice(odd) for name in names if chance.random() < 0.8}

    row = some("devices", "stage", "seconds") | ({"seconds": {"F": chance.choice(odd)}} if seed % 3 else {})
    summary = some("devices", "delays", "comparison", "steps", "best")
    if seed % 2:
        summary["comparison"] = some("step_s", "bubble", "stages") | {"stages": [row]}
        summary["devices"] = [some("number", "peak_bytes", "host")]
    (run / "summary.json").write_text(json.dumps(summary))
    event = some("pid", "tid", "ts", "dur", "name", "args", "cat") | {"ph": chance.choice("XMB")}
    (run / "timeline.json").write_text(json.dumps({"traceEvents": [event]}))
    append(run, *(some("step", "loss", "event", "epoch", "time", "feed", "text", "samples", "test") for _ in range(5)))
    found = RecordedRun(run)
    for _ in range(2):
        state = found.state()
        assert all(msgspec.json.encode(getattr(state, name)) for name in state.__struct_fields__)


@pytest.mark.parametrize("name", ["plan.json", "summary.json", "timeline.json", "metrics.jsonl"])
def test_nothing_is_too_deep(name: str, run: Path) -> None:
    (run / name).write_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    assert RecordedRun(run).state().head.name == "cnn on digits"


def test_a_run_that_has_only_its_settings(run: Path) -> None:
    found = RecordedRun(run).state()
    assert (found.head.name, found.head.state) == ("cnn on digits", "unknown")
    assert found.run is not None and found.run.step == 0 and found.run.epochs == 2
    assert found.plan is None and found.schedule is None and found.hosts == ()


def test_a_folder_is_followed_while_it_is_written(run: Path) -> None:
    source = RecordedRun(run)
    append(run, step(1), b'{"event": "step", "st')
    first = source.state()
    assert first.run is not None and first.run.step == 1
    append(run, b'ep": 2, "epoch": 1, "loss": 0.25, "samples": 8, "time": 2.0}\nno JSON\n\xff\xfe\n[1]\n', step(3))
    second = source.state()
    assert second.run is not None and second.run.step == 3 and second.curves is not None
    assert second.curves.steps == (1, 2, 3)
    status(plan=foreseen(plan())[0]).write(run / "status.json")
    third = source.state()
    assert third.head.state == "running" and third.run is not None and third.run.total_steps == 20
    assert third.run.eta_s == pytest.approx(17.0)
    assert third.plan is not None and len(third.plan.stages) == 3
    assert [device.number for device in third.hosts[0].devices] == [0, 1, 2]
    assert third.run.predicted_s is not None


def test_a_resumed_run_that_drops_records_begins_anew(run: Path) -> None:
    source = RecordedRun(run)
    append(run, step(1), step(2), step(3))
    assert source.state().curves is not None
    (run / "metrics.jsonl").rename(run / "old")
    append(run, step(1), step(2))
    found = source.state()
    assert found.curves is not None and found.curves.steps == (1, 2)


def test_the_end_of_a_run_and_what_it_leaves(run: Path) -> None:
    which, simulation = foreseen(plan())
    source = RecordedRun(run)
    append(run, step(1))
    status(state="ended", text="the run has ended after step 1", plan=which).write(run / "status.json")
    timeline_of(as_measured(simulation, 0), NAMES).write(run / "timeline.json")
    pair = {"predicted": 0.5, "measured": 0.25, "error": 1.0}
    stages = [{"stage": 0, "devices": [0], "samples": 2, "seconds": {"F": pair}}]
    comparison = {"step_s": pair, "bubble": pair, "stages": stages}
    devices = [{"number": n, "host": "localhost", "peak_bytes": 1000 + n} for n in range(3)]
    summary = {"comparison": comparison, "devices": devices, "delays": {"1": 5}}
    (run / "summary.json").write_text(json.dumps(summary))
    found = source.state()
    assert (found.head.state, found.head.text) == ("ended", "the run has ended after step 1")
    assert found.head.trace and source.trace() == (run / "timeline.json").read_bytes()
    assert found.schedule is not None and found.schedule.step == 1
    assert found.run is not None and (found.run.predicted_s, found.run.step_s) == (0.5, 0.25)
    assert found.run.eta_s is None and "5 steps late by 1" in found.run.staleness
    assert found.plan is not None and found.plan.stages[0].times[0].measured_s == 0.25
    assert [device.peak_bytes for device in found.hosts[0].devices] == [1000, 1001, 1002]
    assert found.events[-1].kind == "end"
    assert source.state().events == found.events


def test_a_process_that_has_ended_without_a_word(run: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    status(process=done.pid).write(run / "status.json")
    found = RecordedRun(run).state()
    assert found.head.state == "failed" and "onebox train --resume" in found.head.text
    assert found.events[-1].severity == "failure"


def test_another_process_with_the_same_id_is_not_the_run(run: Path) -> None:
    status(process=os.getpid(), process_after_boot_s=-10.0).write(run / "status.json")
    assert RecordedRun(run).state().head.state == "failed"


def test_a_step_of_the_clock_does_not_end_a_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status().write(run / "status.json")
    boot_s = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot_s + 3600)
    assert RecordedRun(run).state().head.state == "running"


def test_a_host_that_does_not_know_its_boot_has_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> float:
        raise RuntimeError("line 'btime' not found in /proc/stat")

    monkeypatch.setattr(psutil._psplatform, "boot_time", unknown)
    status().write(run / "status.json")
    assert RecordedRun(run).state().head.state == "running"


def test_a_run_of_another_machine_is_as_it_was_written(run: Path) -> None:
    status(client="elsewhere", process=1).write(run / "status.json")
    found = RecordedRun(run).state()
    assert found.head.state == "running" and "elsewhere" in found.head.text


@pytest.mark.parametrize("name", ["status.json", "summary.json", "plan.json", "timeline.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", [b"", b"{", b"\x00\xff", b"[]", b'{"traceEvents": 3}'], ids=str)
def test_a_damaged_file_does_not_end_the_page(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    found = RecordedRun(run).state()
    assert found.head.name == "cnn on digits" and found.schedule is None


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        RecordedRun(tmp_path)
    with pytest.raises(UsageError, match="not a folder"):
        RecordedRun(tmp_path / "missing")


def test_the_newest_run(run: Path, tmp_path: Path) -> None:
    later = run.with_name("a-later-one")
    later.mkdir()
    (later / "config.json").write_text("{}")
    os.utime(run / "config.json", (1, 1))
    assert newest_run(tmp_path / "runs") == later
    with pytest.raises(UsageError, match="onebox watch HOST"):
        newest_run(tmp_path)


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebox.report.page.recorded_run._READ_BYTES", 64)
    file, found = GrowingFile(tmp_path / "metrics.jsonl"), []
    (tmp_path / "metrics.jsonl").write_bytes(b'{"a": "' + b"x" * 1000 + b'"}\n' + b'{"b": 1}\n')
    file.read(lambda: None, found.append)
    assert found == [{"b": 1}]


def test_a_folder_of_an_earlier_version_is_shown_with_what_it_has(run: Path) -> None:
    """Its records have no version and no account, its summary no shares, its timeline a clock for each host."""
    append(run, *map(step, range(1, 5)))
    feed = {"stages": {}, "skipped": 0, "first_skipped": [], "links": []}
    text = "bound by link lab1–lab2: 9.6 Mbit/s: batches are there in time"
    append(run, {"event": "feed", "step": 4, "epoch": 1, **feed, "text": text, "time": 4.1})
    append(run, {"event": "epoch", "step": 4, "epoch": 1, "train_loss": 0.5, "samples_per_s": 8.0, "time": 4.2})
    (run / "summary.json").write_text(json.dumps({"seconds": 4.5, "samples_per_s": 8.0, "devices": []}))
    spans = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "worker 0 (cpu)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "compute"}},
        {"ph": "X", "name": "f", "cat": "compute", "pid": 1, "tid": 2, "ts": 0.0, "dur": 2.0, "args": {"step": 4}},
    ]
    (run / "timeline.json").write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": spans}))
    found = RecordedRun(run).state()
    assert found.head.state == "ended" and found.schedule is not None and len(found.schedule.spans) == 1
    assert found.run is not None and found.run.step == 4
    assert (found.run.bound, found.run.account) == ("link lab1–lab2: 9.6 Mbit/s: batches are there in time", "")


def test_the_account_of_a_folder_is_what_bounds_the_run(run: Path) -> None:
    append(run, {"event": "begin", "version": 2, "step": 0}, step(1))
    shares = {"saving": 0.75, "computing": 0.25}
    told = {"bound": "saving (75 % of the time)", "text": "saving 75 %, computing 25 %"}
    append(run, {"event": "account", "step": 1, "epoch": 1, "seconds": 4.0, "shares": shares, **told})
    append(run, {"event": "feed", "step": 1, "epoch": 1, "text": "the feed keeps up: batches are there in time"})
    found = RecordedRun(run).state().run
    assert found is not None and (found.bound, found.account) == (told["bound"], told["text"])
