"""Commands that look at agents: which are meant, and what is shown of those that do not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from onebox.cli import agent_watch, main
from onebox.cli.agent_watch import HostWatch, addresses_of, agent_parts, connected
from onebox.errors import PoolError, UsageError
from onebox.pool.keys.keyring import KnownAgent, remember_agent
from onebox.wire import new_keys
from onebox.wire.protocol.agents import Introduced, Offer, SoftwareVersions, Stock

OFFERS = (Offer("cuda:0", "Card", 2 << 30, 2, 1 << 30), Offer("cuda:1", "Card", 2 << 30, 2, 2 << 30))


@dataclass
class Line:
    """Stands in for the connection to an agent."""

    address: str
    offers: tuple[Offer, ...] = OFFERS
    looks: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    introduced: Introduced = field(
        default_factory=lambda: Introduced(1, SoftwareVersions(1, 1, "0", "2", "3"), "lab", "10.0.0.1")
    )

    def inspect(self) -> Stock:
        self.looks += 1
        if self.address.startswith("fickle") and self.looks > 1:
            raise PoolError("the agent is gone")
        return Stock(1, self.offers)

    def read_log(self, lines: int) -> list[str]:
        return ['{"event": "started"}', '{"event": "\x1b[2J"}'][:lines]

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Line]]:
    """Agents at ``lab``, ``fickle`` and ``away``, of which the last does not answer; returns what was connected to."""
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    monkeypatch.delenv("ONEBOX_POOL", raising=False)
    for name in ("lab", "fickle", "away"):
        remember_agent(KnownAgent(name, new_keys().public, name))
    made: list[Line] = []

    def connect(address: str) -> Line:
        if address.startswith("away"):
            raise PoolError("no answer from an agent at away")
        made.append(Line(address))
        return made[-1]

    monkeypatch.setattr(agent_watch, "connect_agent", connect)
    monkeypatch.setattr("onebox.cli.commands.logs.connect_agent", connect)
    yield made
    assert all(line.closed.wait(30) for line in made)


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until something is so, for ten seconds at most."""
    pause = threading.Event()
    for _ in range(1000):
        if what():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to be")


def test_which_agents_are_meant(lines: list[Line], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert addresses_of("auto") == ("away:7171", "fickle:7171", "lab:7171")
    assert addresses_of("lab/cuda:0,cpu*2,fickle") == ("lab", "fickle")
    monkeypatch.setenv("ONEBOX_POOL", "lab:7171")
    assert addresses_of("auto") == ("lab:7171",)
    (tmp_path / "hosts.toml").write_text('[[hosts]]\naddress = "lab"\ndevices = ["cuda:1"]\n')
    assert addresses_of(str(tmp_path / "hosts.toml")) == ("lab",)
    parts = agent_parts(str(tmp_path / "hosts.toml"))
    assert parts is not None
    assert parts[0].devices == ("cuda:1",)
    assert agent_parts("lab,cpu") is None
    assert agent_parts("cpu*2") is None
    for wrong in ("stranger", "lab,stranger"):
        with pytest.raises(UsageError, match="not paired"):
            addresses_of(wrong)
        with pytest.raises(UsageError, match="not paired"):
            agent_parts(wrong)


def test_connections_are_closed_where_one_is_not_had(lines: list[Line]) -> None:
    with pytest.raises(PoolError, match="away"), connected(["lab", "away"]):
        raise AssertionError("not reached")
    assert [line.closed.is_set() for line in lines] == [True]


def test_a_watch_goes_on_when_an_agent_is_gone(lines: list[Line]) -> None:
    watch = HostWatch("fickle:7171", 0.01)
    wait_for(lambda: watch.state.address != "" and len(lines) >= 3)  # each is lost at its second look
    wait_for(lambda: watch.state.problem == "the agent is gone")
    assert watch.state.host == "lab"
    wait_for(lambda: watch.state.stock is not None)
    watch.close(within_s=60)


def test_a_watch_asks_only_while_its_state_is_read_and_ends_while_it_does_not_ask(lines: list[Line]) -> None:
    watch = HostWatch("lab:7171", 0.01, log_lines=1)
    wait_for(watch.looked.is_set)
    threading.Event().wait(0.2)
    assert lines[0].looks == 1 and watch.lines == ('{"event": "started"}',)
    wait_for(lambda: watch.state.stock is not None and lines[0].looks > 3)
    threading.Event().wait(0.1)
    watch.close(within_s=60)
    assert lines[0].closed.is_set()


def test_status_of_agents_some_of_which_do_not_answer(lines: list[Line], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    table = capsys.readouterr().out
    assert "no answer from an agent at away" in table
    assert "1.0 GiB of 2.0 GiB" in table
    assert main(["status", "--json", "--pool", "lab,away"]) == 0
    lab, away = json.loads(capsys.readouterr().out)
    assert [offer["device"] for offer in lab["devices"]] == ["cuda:0", "cuda:1"]
    assert (away["devices"], away["problem"]) == (None, "no answer from an agent at away")
    assert main(["status", "--pool", "away"]) == 1
    assert "no agent could be looked at" in capsys.readouterr().err


def test_devices_of_agents_are_numbered_as_in_their_pool(lines: list[Line], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json", "--pool", "lab,fickle/cuda:1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["number"], each["host"], each["device"]) for each in found] == [
        (0, "lab", "cuda:0"),
        (1, "lab", "cuda:1"),
        (2, "fickle", "cuda:1"),
    ]
    assert main(["devices", "--json", "--pool", "lab/cuda*2"]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {"number": 1, "host": "lab", "device": "cuda"}
    assert main(["devices", "--pool", "lab/cuda*2"]) == 0
    assert "any that is free" in capsys.readouterr().out
    assert main(["devices", "--pool", "lab/cpu"]) == 2
    assert "has no cpu" in capsys.readouterr().err
    assert main(["devices", "--pool", "lab,away"]) == 1
    assert "away" in capsys.readouterr().err


def test_a_log_does_not_steer_the_terminal(lines: list[Line], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "lab"]) == 0
    assert capsys.readouterr().out == '{"event": "started"}\n{"event": "\\u001b[2J"}\n'


def test_what_an_agent_says_in_an_error_does_not_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_address: str) -> Line:
        raise PoolError("the agent refuses: \x1b[2Jgone\n  second line")

    monkeypatch.setattr("onebox.cli.commands.logs.connect_agent", refuse)
    assert main(["logs", "lab"]) == 1
    assert capsys.readouterr().err == "onebox: the agent refuses: \\u001b[2Jgone\n  second line\n"
