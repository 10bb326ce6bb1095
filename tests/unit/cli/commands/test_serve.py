"""What onebox serve decides before the agent runs, and how signals end it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from onebox.agent.journal import Journal
from onebox.cli.commands.serve import _advertised, _ended_by_signals, _limits, _names
from onebox.cli.options.agents import ServeConfig
from onebox.errors import UsageError
from onebox.pool.keys.keyring import AllowedClients, allow_client, clients_file
from onebox.wire import new_keys


def test_limits_come_from_the_flags() -> None:
    limits = _limits(
        ServeConfig(max_devices_per_client=2, max_memory_per_client="1GiB", max_cores_per_client=3, max_lease=60)
    )
    assert (limits.devices, limits.memory_bytes, limits.threads, limits.lease_s) == (2, 1 << 30, 3, 60)
    limits = _limits(ServeConfig())
    assert (limits.devices, limits.memory_bytes, limits.threads, limits.lease_s) == (0, 0, 0, 0)


@pytest.mark.parametrize("bind", ["127.0.0.1", "10.1.2.3", "::1"])
def test_where_it_listens_is_where_it_is_reached(bind: str) -> None:
    assert _advertised(bind) == bind


@pytest.mark.parametrize("bind", ["0.0.0.0", "::"])
def test_who_listens_everywhere_is_reached_by_its_way_out(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Probe:
        def __init__(self, family: int, kind: int) -> None:
            assert kind == socket.SOCK_DGRAM  # nothing is sent

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def connect(self, where: tuple[str, int]) -> None:
            asked.append(ip_address(where[0]).version)
            if len(asked) > 1:
                raise OSError("no way")

        def getsockname(self) -> tuple[str, int]:
            return "10.9.8.7", 1

    monkeypatch.setattr("socket.socket", Probe)
    assert _advertised(bind) == "10.9.8.7"
    assert asked == [ip_address(bind).version]
    with pytest.raises(UsageError, match="--advertise"):
        _advertised(bind)


@pytest.fixture
def in_a_terminal() -> Iterator[None]:
    """Heed the signals that nohup and the background of a shell ignore."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("in_a_terminal")
def test_signals_end_it_however_often_they_come() -> None:
    ended: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with _ended_by_signals(lambda: ended.append(1)):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert len(ended) == 4
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_ignores_the_end_of_the_terminal_goes_on() -> None:
    ended: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _ended_by_signals(lambda: ended.append(1)):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not ended


def test_a_list_of_clients_that_breaks_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    key = new_keys().public
    allow_client("ana", key)
    with Journal(None) as journal:
        name_of = _names(AllowedClients(), journal)
        assert name_of(key) == "ana"
        whole = clients_file().read_bytes()
        clients_file().write_text("{")
        assert [name_of(key), name_of(key)] == [None, None]
        clients_file().write_bytes(whole)
        assert name_of(key) == "ana"
        events = [json.loads(line) for line in journal.last(9)]
    assert [event["event"] for event in events] == ["clients-unreadable", "clients-readable"]
    assert "damaged" in events[0]["reason"]
    assert key not in str(events)
