"""Two people and a machine: an agent is paired with, looked at, trained on, watched, and ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from onebox.cli import main
from onebox.pool.keys.keyring import allow_client, fingerprint, identity
from tests.kit import warm
from tests.process.cli.commands import assert_gone, workers_of

PATIENCE_S = 60.0
TRAIN = ("train", "--data", "digits", "--model", "mlp", "--seed", "3", "--batch", "512")


@dataclass
class Serving:
    """An agent's process, with a person of its own, and one paired client."""

    owner: Path
    client: Path
    process: subprocess.Popen[str]
    address: str
    metrics: str
    lines: list[str] = field(default_factory=list)


def environment(person: Path) -> dict[str, str]:
    return warm.single() | {"ONEBOX_CONFIG": str(person)}


def start(arguments: list[str], person: Path, folder: Path, **streams: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "onebox", *arguments]
    return warm.Popen(line, cwd=folder, env=environment(person), text=True, **streams)


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Whatever happens, the process is gone afterwards."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_with(stream: Any, pattern: str) -> str:
    """Read lines up to one, and return the group of it that is asked for."""
    seen = []
    for line in stream:
        seen.append(line)
        match = re.search(pattern, line)
        if match:
            return match[1]
    raise AssertionError(f"the process ended before it said {pattern!r}: {seen}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Run a command in this process and return what it printed."""
    capsys.readouterr()
    assert main(arguments) == status
    found = capsys.readouterr()
    return found.err if status else found.out


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """An agent that offers all cores, and the client ``ana``, whose keys were exchanged by hand."""
    folder = tmp_path_factory.mktemp("serving")
    owner, client = folder / "owner", folder / "client"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEBOX_CONFIG", str(client))
        key = identity("client").public
        patch.setenv("ONEBOX_CONFIG", str(owner))
        allow_client("ana@desk", key)
        agent = identity("agent").public
    line = ["serve", "--allow-root", "--bind", "127.0.0.1", "--port", "0", "--devices", "cpu", "--metrics-port", "0"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ended(start([*line, "--journal", "agent.log"], owner, folder, **streams)) as process:
        metrics = line_with(process.stderr, r"metrics at (http://127.0.0.1:\d+/metrics)")
        address = line_with(process.stderr, r"agent at (127.0.0.1:\d+)")
        (client / "agents.json").write_text(json.dumps([{"address": address, "key": agent, "host": "lab"}]))
        found = Serving(owner, client, process, address, metrics)
        reader = threading.Thread(target=lambda: found.lines.extend(process.stdout or ()))
        reader.start()
        yield found
        process.kill()
        reader.join(PATIENCE_S)


@pytest.fixture
def as_client(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """This process is the client."""
    monkeypatch.setenv("ONEBOX_CONFIG", str(serving.client))
    monkeypatch.delenv("ONEBOX_POOL", raising=False)
    return serving


def test_pairing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    owner, client = tmp_path / "owner", tmp_path / "client"
    port = free_port()
    line = ["pair", "accept", "--bind", "127.0.0.1", "--pairing-port", str(port)]
    with ended(start(line, owner, tmp_path, stdout=subprocess.PIPE)) as accepting:
        print_of_agent = line_with(accepting.stdout, r"fingerprint of the agent .*:  (\S+)$")
        code = line_with(accepting.stdout, r"code.*:  (\S+)$")
        monkeypatch.setenv("ONEBOX_CONFIG", str(client))
        pairing = ("pair", "connect", "127.0.0.1:7300", "--pairing-port", str(port), "--name", "ana@desk")
        monkeypatch.setattr("sys.stdin", io.StringIO("AAAA-AAAA\n"))
        assert "slip" in said(capsys, *pairing, status=2)
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{code.lower()}\n"))
        shown = said(capsys, *pairing)
        assert print_of_agent in shown
        rest = accepting.communicate(timeout=PATIENCE_S)[0]
    assert accepting.returncode == 0
    print_of_client = fingerprint(identity("client").public)
    assert "ana@desk may lease" in rest
    assert print_of_client in rest
    assert print_of_client in shown
    assert f"127.0.0.1:7300  {os.uname().nodename}  {print_of_agent}" in said(capsys, "pair", "list")
    monkeypatch.setenv("ONEBOX_CONFIG", str(owner))
    assert f"ana@desk  {print_of_client}" in said(capsys, "pair", "list")
    assert "no longer" in said(capsys, "pair", "remove", "ana@desk")
    assert "ana@desk" not in said(capsys, "pair", "list")


@pytest.mark.feature("Agents: Read metrics by Prometheus")
@pytest.mark.feature("Agents: See devices, holders and logs from a client")
def test_devices_and_status_and_logs(as_client: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    address = as_client.address
    devices = json.loads(said(capsys, "devices", "--pool", f"{address}/cpu*2", "--json"))
    assert [(each["number"], each["host"], each["device"]) for each in devices] == [
        (0, address, "cpu"),
        (1, address, "cpu"),
    ]
    assert devices[0]["free_bytes"] == devices[0]["memory_bytes"] > 0
    assert devices[0]["holders"] == []  # to look is not to lease
    assert address in said(capsys, "devices", "--pool", address)
    (state,) = json.loads(said(capsys, "status", "--json"))
    assert (state["address"], state["problem"], state["queue"]) == (address, "", [])
    assert [offer["device"] for offer in state["devices"]] == ["cpu"]
    table = said(capsys, "status", "--pool", address, "--once")
    assert address in table
    assert re.search(r"free( memory)? .*held by .*load", table), "the narrow table where a load of 100 % makes it wide"
    events = [json.loads(line)["event"] for line in said(capsys, "logs", address, "--lines", "3").splitlines()]
    assert 1 <= len(events) <= 3
    assert "connected" in events
    with urllib.request.urlopen(as_client.metrics, timeout=PATIENCE_S) as answer:
        assert b"onebox_agent_queue_length 0" in answer.read()


def test_the_live_table_ends_with_ctrl_c(as_client: Serving, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(["status", "--interval", "0.2"], as_client.client, tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with ended(process), open(ours, errors="replace") as screen:
        line_with(screen, r"(1 agent)")
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how the other end of a terminal tells that it is gone
            screen.read()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.feature("Agents: Remove a client")
def test_who_is_let_in_no_longer(
    as_client: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = identity("client").public
    monkeypatch.setenv("ONEBOX_CONFIG", str(as_client.owner))
    said(capsys, "pair", "remove", "ana@desk")
    try:
        monkeypatch.setenv("ONEBOX_CONFIG", str(as_client.client))
        assert "pair" in said(capsys, "devices", "--pool", as_client.address, status=1)
        assert "pair" in said(capsys, "status", "--once", status=1)
    finally:
        monkeypatch.setenv("ONEBOX_CONFIG", str(as_client.owner))
        allow_client("ana@desk", key)
    monkeypatch.setenv("ONEBOX_CONFIG", str(as_client.client))
    said(capsys, "devices", "--pool", as_client.address)
    clients = as_client.owner / "clients.json"
    clients.chmod(0o666)  # now anybody could have put a key in it: nobody is let in, and the log says why
    assert "pair" in said(capsys, "devices", "--pool", as_client.address, status=1)
    clients.chmod(0o600)
    log = said(capsys, "logs", as_client.address)
    assert log.index("clients-unreadable") < log.index("chmod 600") < log.index("clients-readable")


def test_training_over_it_and_its_end(as_client: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last of this file: Ctrl-C ends the agent and its workers, and the client is told in words."""
    line = [*TRAIN, "--pool", f"{as_client.address}/cpu*2", "--epochs", "100000", "--every", "1", "--run", "run"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ended(start(line, as_client.client, tmp_path, **streams)) as training:
        line_with(training.stdout, r"(loss)")
        (state,) = json.loads(said(capsys, "status", "--json"))
        holders = state["devices"][0]["holders"]
        assert [holder["client"] for holder in holders] == ["ana@desk", "ana@desk"]
        workers = [each for each in workers_of(as_client.process) if each.status() != psutil.STATUS_ZOMBIE]
        assert len(workers) >= 2
        as_client.process.send_signal(signal.SIGINT)
        assert as_client.process.wait(PATIENCE_S) == 0
        assert_gone(workers)
        _, told = training.communicate(timeout=PATIENCE_S)
    assert training.returncode == 1
    assert as_client.address in told
    assert "Traceback" not in told
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["pool"] == f"{as_client.address}/cpu*2"
    events = [json.loads(each)["event"] for each in as_client.lines]
    assert events[0] == "started"
    assert "leased" in events
    assert events[-1] == "stopped"
