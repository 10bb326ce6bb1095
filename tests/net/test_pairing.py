"""A client and an agent on different hosts are made known to each other by a code that a person carries."""

from __future__ import annotations

import re
import sys
import time

import pytest

from onebox.errors import UsageError
from onebox.pool.backends.agents.agent_source import connect_agent
from onebox.pool.keys.keyring import known_agent
from tests.net.fleet import Fleet
from tests.net.hosts import Network


@pytest.mark.feature("Agents: Pair client and agent by a code")
def test_a_code_makes_client_and_agent_known_to_each_other(fleet: Fleet, network: Network) -> None:
    red = network["red"].address
    with fleet.client("ana"), pytest.raises(UsageError, match="not paired"):
        connect_agent(red)
    accepting = fleet.python("red", "red", "-m", "onebox", "pair", "accept")
    try:
        code = ""
        while not code and accepting.poll() is None:
            code = "".join(re.findall(r"^code, .*:  (\S+)$", fleet.printed("red"), re.MULTILINE))
            time.sleep(0.05)
        command = (sys.executable, "-m", "onebox", "pair", "connect", red, "--name", "ana@desk")
        asked = network["client"].run(*command, env=fleet.environment("ana"), given=f"{code}\n")
        assert asked.returncode == 0, asked.stderr
        assert accepting.wait(20) == 0
    finally:
        accepting.kill()
        accepting.wait(30)
    with fleet.client("ana"):
        known = known_agent(red)
    assert known is not None and known.host == "red"
    assert "paired: ana@desk may lease" in fleet.printed("red")
    prints = re.findall(r"(?:\w{4}:){7}\w{4}", asked.stdout)
    assert len(prints) == 2 and set(prints) <= set(re.findall(r"(?:\w{4}:){7}\w{4}", fleet.printed("red")))
    line = fleet.line("red", "ana")  # the agent, which runs since before, lets it in
    try:
        assert line.inspect().offers
    finally:
        line.close()
