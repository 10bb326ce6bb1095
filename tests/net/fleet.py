"""Agents on the hosts of a test's network, run as users run them, and a client that was paired with them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from onebox.pool.backends.agents.agent_connection import AgentConnection
from onebox.pool.backends.agents.agent_source import connect_agent
from onebox.pool.keys.keyring import KnownAgent, allow_client, identity, remember_agent
from tests.kit.waiting import until
from tests.net.hosts import Network

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("red", "green", "blue")
PORT = 7171
START_S = 60.0
GRACE_S = 4.0
"""For how long a client or an agent is waited for here that cannot be heard."""


def _name(process: int) -> str:
    """Return the name that a process has given itself; empty where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


class Fleet:
    """Agents by their hosts, each with a folder of its own; a context manager.

    Args:
        network: With a host named client.
        folder: For keys, journals and what agents print.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._clients: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.send_signal(signal.SIGCONT)
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            try:
                agent.wait(30)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()

    def pair(self, name: str, client: str = "client", port: int = PORT) -> str:
        """Let a client and a host's agent know each other, and return the agent's address with its port.

        Args:
            name: The host.
            client: The folder of the client's keys.
            port: The agent's.
        """
        address = f"{self.network[name].address}:{port}"
        with self.keys_of(client):
            mine = identity("client").public
        with self.keys_of(name):
            public = identity("agent").public
            allow_client(f"{client}@client", mine)
        with self.keys_of(client):
            remember_agent(KnownAgent(address, public, name))
        return address

    def spec(self, *names: str) -> str:
        """Return what names a worker on each of some hosts; on all where none is named."""
        return ",".join(f"{self.network[name].address}/cpu" for name in names or MACHINES)

    def start(self, names: Sequence[str], *options: str) -> None:
        """Start the agents of some hosts, and wait until they serve: one core each, so that a lease has all."""
        for name in names:
            bind = () if "--bind" in options else ("--bind", self.network[name].address)
            journal = ("--journal", str(self.folder / f"{name}.jsonl"))
            self.agents[name] = self.command(name, "serve", "--allow-root", "--cores", "1", *bind, *journal, *options)
        for name in names:
            agent = self.agents[name]
            until(
                lambda name=name, agent=agent: (
                    agent.poll() is not None or '"started"' in self.printed(name).rpartition('"stopped"')[2]
                ),
                START_S,
            )
            assert agent.poll() is None, self.printed(name)

    def kill(self, name: str) -> None:
        """Kill a host's agent, and let what it printed be forgotten."""
        agent = self.agents[name]
        agent.kill()
        agent.wait(30)
        (self.folder / f"{name}.out").unlink()

    def command(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command of onebox on a host."""
        return self.python(name, name, "-m", "onebox", *arguments)

    def python(self, name: str, who: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start Python on a host, for somebody whose keys are in the folder of that name."""
        output = self.folder / f"{who}.out"
        started = self.network[name].start(sys.executable, *arguments, env=self.environment(who), output=output)
        if name == "client":
            self._clients.append(started)
        return started

    def end_clients(self) -> None:
        """Kill the processes on the client's host that a test has left."""
        while self._clients:
            client = self._clients.pop()
            client.kill()
            client.wait(30)

    def environment(self, who: str) -> dict[str, str]:
        """Return what sets somebody's processes apart."""
        return {"ONEBOX_CONFIG": str(self.folder / who), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    def printed(self, name: str) -> str:
        """Return what the commands on a host have printed."""
        return (self.folder / f"{name}.out").read_text()

    def told(self, name: str, since: int = 0) -> list[str]:
        """Return the events of an agent's journal, those apart that a test knows already."""
        lines = (self.folder / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines][since:]

    def workers(self, name: str) -> list[int]:
        """Return the processes on a host besides its agent and its zygotes."""
        others = [process for process in self.network[name].processes() if process != self.agents[name].pid]
        return [process for process in others if _name(process) != "onebox-zygote"]

    @contextlib.contextmanager
    def keys_of(self, name: str) -> Iterator[None]:
        """Let this process have the keys in the folder of that name."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ONEBOX_CONFIG", str(self.folder / name))
            yield

    @contextlib.contextmanager
    def client(self, name: str = "client") -> Iterator[None]:
        """Let this thread be on the client's host, with a client's keys."""
        with self.keys_of(name), self.network["client"].inside():
            yield

    def line(self, name: str, client: str = "client", port: int = PORT) -> AgentConnection:
        """Return a client's line to a host's agent."""
        with self.client(client):
            return connect_agent(f"{self.network[name].address}:{port}")
