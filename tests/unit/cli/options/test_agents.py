"""The options of serve, pair, status and logs; what is wrong with them comes as one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from onebox.cli import main
from onebox.cli.options.agents import AGENT_PORT, LogsConfig, ServeConfig, StatusConfig
from onebox.cli.options.pairing import (
    PAIRING_PORT,
    PairAcceptConfig,
    PairConnectConfig,
    PairForgetConfig,
    PairListConfig,
    PairRemoveConfig,
)
from onebox.cli.parser import parse
from onebox.errors import UsageError
from onebox.pool.keys.keyring import fingerprint, identity
from onebox.pool.launch.worker_user import check_user_ids
from onebox.wire.protocol import agents


def test_the_commands() -> None:
    assert parse(["serve"]) == ServeConfig()
    assert parse(["pair", "accept"]) == PairAcceptConfig()
    assert parse(["pair", "connect", "lab:7", "--name", "ana"]) == PairConnectConfig(host="lab:7", name="ana")
    assert parse(["pair", "list"]) == PairListConfig()
    assert parse(["pair", "remove", "ana"]) == PairRemoveConfig(client="ana")
    assert parse(["pair", "forget", "lab"]) == PairForgetConfig(host="lab")
    assert parse(["status", "--pool", "a,b", "--interval", "2", "--once", "--json"]) == StatusConfig(
        pool="a,b", interval=2, once=True, json=True
    )
    assert parse(["logs", "lab", "--lines", "5"]) == LogsConfig(host="lab", lines=5)


def test_all_flags_of_serve() -> None:
    line = (
        "serve --devices cuda:0,cpu --memory 2GiB --cores 4 --bind 10.0.0.1 --port 0 --advertise lab.example "
        "--max-devices-per-client 2 --max-memory-per-client 1GiB --max-cores-per-client 3 --max-lease 60 "
        "--journal j.log --metrics-port 0 --metrics-address ::1 --user-ids 70000-70009"
    )
    config = parse(line.split())
    assert config == ServeConfig(
        devices="cuda:0,cpu",
        memory="2GiB",
        cores=4,
        bind="10.0.0.1",
        port=0,
        advertise="lab.example",
        max_devices_per_client=2,
        max_memory_per_client="1GiB",
        max_cores_per_client=3,
        max_lease=60.0,
        journal=Path("j.log"),
        metrics_port=0,
        metrics_address="::1",
        user_ids="70000-70009",
    )
    assert isinstance(config, ServeConfig)
    assert (config.memory_bytes, config.client_memory_bytes) == (2 << 30, 1 << 30)
    assert (ServeConfig().memory_bytes, ServeConfig().client_memory_bytes) == (None, 0)


def test_ports_are_those_of_the_wire() -> None:
    assert (AGENT_PORT, PAIRING_PORT) == (agents.AGENT_PORT, agents.PAIRING_PORT)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("serve --memory lots", ["--memory lots", "2GiB"]),
        ("serve --max-memory-per-client 0", ["--max-memory-per-client 0"]),
        ("serve --cores 0", ["--cores 0", "1 and more"]),
        ("serve --max-devices-per-client -1", ["--max-devices-per-client -1", "0 and more"]),
        ("serve --port 65536", ["--port 65536", "1 to 65535", "0 for any"]),
        ("serve --metrics-port -1", ["--metrics-port -1"]),
        ("serve --worker-ports 7200", ["--worker-ports 7200", "7200-7299"]),
        ("serve --worker-ports 7299-7200", ["--worker-ports 7299-7200", "7200-7299"]),
        ("serve --worker-ports 80-90", ["--worker-ports 80-90", "from 1024"]),
        ("serve --worker-ports 7200-70000", ["--worker-ports 7200-70000", "to 65535"]),
        ("serve --user-ids 5", ["--user-ids 5", "60800-61055"]),
        ("serve --allow-root --bind lab", ["--bind lab", "127.0.0.1"]),
        ("serve --metrics-address x", ["--metrics-address x"]),
        ("serve --max-lease 0", ["--max-lease 0"]),
        ("serve --max-lease nan", ["--max-lease nan"]),
        ("serve --prot 1", ["--prot", "--port"]),
        ("pair", ["onebox pair needs a command", "onebox pair accept", "onebox pair connect HOST"]),
        ("pair acept", ["no command 'acept' (perhaps accept?)"]),
        ("pair --list", ["no command '--list' (perhaps list?)"]),
        ("pair lab", ["no command 'lab'", "onebox pair connect HOST"]),
        ("pair connect", ["onebox pair connect needs HOST[:PORT]"]),
        ("pair remove", ["onebox pair remove needs NAME"]),
        ("pair accept --name ana", ["--name"]),
        ("pair accept --pairing-port 0", ["--pairing-port 0", "1 to 65535"]),
        ("pair connect lab --pairing-port 0", ["--pairing-port 0", "1 to 65535"]),
        ("pair accept --bind here", ["--bind here"]),
        ("pair accept ABCD-EFGH", ["ABCD-EFGH"]),
        ("status --interval 0", ["--interval 0"]),
        ("status lab", ["lab"]),
        ("logs", ["HOST"]),
        ("logs lab --lines 0", ["--lines 0", "1 to 1000"]),
        ("logs lab --lines many", ["many", "not a whole number"]),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(line: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    text = str(caught.value)
    assert "\n" not in text
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("serve --allow-root --bind 0.0.0.0 --port 0 --advertise 127.0.0.1", "nobody is paired"),
        ("serve --allow-root --bind 127.0.0.1 --port 0 --devices cpu*2", "cpu"),
        ("serve --allow-root --bind 127.0.0.1 --port 0 --devices gpu", "gpu"),
        ("serve --allow-root --bind 127.0.0.1 --port 0 --cores 100000", "100000"),
        ("serve --allow-root --bind 127.0.0.1 --port 0 --advertise 0.0.0.0", "0.0.0.0"),
        ("serve --allow-root --bind 192.0.2.1 --port 0 --devices cpu", "192.0.2.1"),
        ("serve --allow-root --bind 127.0.0.1 --port 0 --journal /nowhere/at/all", "/nowhere/at/all"),
        ("serve --allow-root --bind 127.0.0.1 --port 0 --metrics-port 0 --metrics-address 192.0.2.1", "192.0.2.1"),
        ("pair connect ::1", "HOST:PORT"),
        ("pair connect lab --name \x1b", "--name"),
        ("pair remove ana", "onebox pair remove ana: there is no such client"),
        ("pair forget lab", "onebox pair forget lab: there is no such agent"),
        ("pair accept --bind 192.0.2.1", "192.0.2.1"),
        ("status", "onebox pair"),
        ("status --pool cpu*2", "--pool cpu*2"),
        ("status --pool lab", "not paired with"),
        ("status --pool nothing.toml", "nothing.toml"),
        ("logs lab", "not paired with"),
        ("devices --pool lab,here/cpu", "not paired with"),
    ],
    ids=ascii,
)
def test_what_cannot_be_is_one_line_and_status_2(
    line: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    monkeypatch.delenv("ONEBOX_POOL", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(line.split(" ")) == 2
    said = capfd.readouterr()
    assert len(said.err.splitlines()) == 1, said.err
    assert part in said.err


def test_a_code_that_is_none_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = str(there.getsockname()[1])
        for typed in ("", "\n", "ABCD-EFGH\n"):
            (tmp_path / "typed").write_text(typed)
            with (tmp_path / "typed").open() as stdin:
                monkeypatch.setattr("sys.stdin", stdin)
                assert main(["pair", "connect", "127.0.0.1", "--pairing-port", port]) == 2
            said = capfd.readouterr()
            assert "code" in said.err
            assert "ABCD" not in said.err + said.out


def test_where_nobody_waits_for_a_pairing_no_code_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    monkeypatch.setattr("sys.stdin", None)  # whoever reads it fails
    assert main(["pair", "connect", "127.0.0.1", "--pairing-port", "1"]) == 1
    assert "nobody waits for a pairing at 127.0.0.1:1" in capfd.readouterr().err


def test_the_list_shows_own_fingerprints_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are what others compare; asking makes no keys."""
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    assert main(["pair", "list"]) == 0
    assert capfd.readouterr().out.count("none yet") == 2
    assert not (tmp_path / "keys").exists()
    key = identity("agent").public
    assert main(["pair", "list"]) == 0
    assert f"as agent   {fingerprint(key)}\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    "text", ["", "5", "60800", "70000-69999", "0-10", "a-b", "65000-66000", "100000-110000", "1-2-3"]
)
def test_ids_that_are_no_range_for_leases(text: str) -> None:
    with pytest.raises(UsageError, match="--user-ids"):
        ServeConfig(user_ids=text)


def test_the_ids_that_are_usual_are_nobodys() -> None:
    ids = ServeConfig().user_id_range
    assert len(ids) == 256 and 60706 <= ids.start < ids.stop <= 61184, "unused by systemd's overview"
    check_user_ids(ids)
