"""Agents in processes of this machine, each a host of its own for its client."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from onebox.pool.backends.agents.agent_source import connect_agent
from onebox.pool.keys.keyring import KnownAgent, identity, remember_agent
from onebox.wire import KeyPair, new_keys
from tests.kit import warm

NOTICED_S = 30.0
"""Whatever ends is noticed within this time."""

_REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass
class Host:
    """An agent in a process.

    Args:
        process: It.
        keys: The agent's.
        address: Where it listens.
    """

    process: subprocess.Popen[str]
    keys: KeyPair
    address: str = ""

    def held(self) -> int:
        """Return how many workers it has leased."""
        line = connect_agent(self.address)
        try:
            return sum(len(offer.holders) for offer in line.inspect().offers)
        finally:
            line.close()

    def kill(self) -> None:
        """Kill the agent."""
        self.process.kill()
        self.process.communicate()

    def start_again(self, code: Path | None = None) -> None:
        """Start it once more, with the same keys, where it was, from other code if given."""
        self.process = _process(self.address.rpartition(":")[2], code=code)
        self.hand_over()
        self.read_address()

    def hand_over(self) -> None:
        """Give it its keys."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.keys.public}\n{self.keys.secret}\n{identity('client').public}\n")
        self.process.stdin.flush()

    def read_address(self) -> None:
        """Wait until it listens."""
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip().removeprefix("tcp://")


def start(count: int) -> list[Host]:
    """Start agents, all at once, that the client of this test is paired with."""
    made = [Host(_process(), new_keys()) for _ in range(count)]
    try:
        for host in made:
            host.hand_over()
        for host in made:
            host.read_address()
            remember_agent(KnownAgent(host.address, host.keys.public, "host"))
    except BaseException:
        for host in made:
            host.kill()
        raise
    return made


def _process(*arguments: str, code: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.process.agent.serving", *arguments]
    pipe = subprocess.PIPE
    if code is not None:
        environment = {**warm.single(), "PYTHONPATH": str(code)}
        return subprocess.Popen(command, cwd=_REPOSITORY, env=environment, stdin=pipe, stdout=pipe, text=True)
    return warm.Popen(command, cwd=_REPOSITORY, env=warm.single(), stdin=pipe, stdout=pipe, text=True)
