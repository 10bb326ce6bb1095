"""The page on several machines: each command is one that the command line takes, each file one that a pool takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from onebox.agent.metrics import AgentMetrics
from onebox.cli.parser import parse
from onebox.pool.spec import parse_hosts, parse_spec
from onebox.wire.protocol.agents import Offer, Stock

PAGE = (Path(__file__).parents[3] / "docs" / "machines.md").read_text()
COMMANDS = re.findall(r"^\w+\$ onebox (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one(command: str) -> None:
    config = parse(shlex.split(command))
    pool = getattr(config, "pool", None)
    if pool:
        assert parse_spec(pool)


def test_all_commands_for_several_machines_are_there() -> None:
    assert {command.split()[0] for command in COMMANDS} == {
        "pair", "serve", "devices", "train", "run", "status", "logs"
    }  # fmt: skip


def test_the_file_of_hosts_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert [part.address for part in parse_hosts(text, "lab.toml")] == ["lab1", "lab2:7200"]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", re.findall(r"`(lab\d[^`]*|cuda:0,lab1)`", PAGE))
def test_a_list_of_hosts_is_one(text: str) -> None:
    assert parse_spec(text)


def test_the_metrics_are_those_of_an_agent() -> None:
    stock = Stock(0, (Offer("cpu", "a CPU", 1, 1, 1, (), 0.5),))
    names = set()
    for metric in AgentMetrics(lambda: stock, lambda: {}).collect():
        names.add(metric.name + ("_total" if metric.type == "counter" else ""))
    assert set(re.findall(r"onebox_agent_\w+", PAGE)) == names
