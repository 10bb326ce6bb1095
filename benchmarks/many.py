"""What does a pool of many devices cost: 16 agents in network namespaces, each with 16 emulated devices?

- How long agents take to start, and ``onebox status`` to show all devices; beside it the queries alone, of all agents
  and of a quarter of them.
- How many leases a minute clients take and give back, several at a time: with their workers started, which is bound by
  the processors, the first ones, those of clients that come again, and those of clients of which each comes once, with
  its connection; and given back before that, which is the agents' own work.
- How much processor, memory and journal an agent needs for a lease.
- How much of a core the page of all devices takes (``onebox watch``), and each agent for it, while nobody looks and
  while a browser would.
- How forming the groups of 64 ranks on the 16 hosts, a sum over them, and a step of training grow with the ranks
  (``many_groups.py``).

Everything runs on this machine; a worker of a lease is a process here, whichever host it belongs to. It takes root and
``ip``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from common import finish, show, spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from many_groups import measure_groups

from onebox.cli.agent_watch import HostWatch, close_watches
from onebox.pool.keys.keyring import KnownAgent, identity, known_agent
from onebox.wire import KeyPair
from onebox.wire.protocol.agents import Done, Leased, Release, Want
from tests.net.fleet import PORT, Fleet
from tests.net.hosts import Network, unavailable
from tests.process.agent.raw import Raw

PARTS = ("agents", "groups")
HELD_S = 600.0
SETTLE_S = 3.0
WITHIN_S = 120.0
"""Bound of a wait for an agent, on a machine that has other things to do."""

Answer = TypeVar("Answer", Leased, Done)

_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--devices", type=int, default=16, help="emulated devices of each agent")
    parser.add_argument("--held", type=int, default=2, help="agents all of whose devices are leased meanwhile")
    parser.add_argument("--clients", type=int, default=8, help="clients that take leases at the same time")
    parser.add_argument("--leases", type=int, default=32, help="leases whose workers are waited for, the first ones")
    parser.add_argument("--again", type=int, default=640, help="further leases of the same clients")
    parser.add_argument("--new", type=int, default=640, help="leases of clients that come once")
    parser.add_argument("--early", type=int, default=1600, help="leases that are given back before that")
    parser.add_argument("--rounds", type=int, default=3, help="of looking at the status, and of each sum")
    parser.add_argument("--page-s", type=float, default=8.0, help="seconds of the page, with and without a viewer")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16], help="of groups of many ranks, ascending")
    parser.add_argument("--ranks", type=int, default=4, help="of each of them")
    options = parser.parse_args()
    why = unavailable()
    if why:
        raise SystemExit(why)
    result: dict[str, Any] = {}
    if "agents" in options.parts:
        result = agents(options)
        show("A pool of many", ["figure", "value"], [[key, str(value)] for key, value in result.items()])
    if "groups" in options.parts:
        result |= measure_groups(options.hosts, options.ranks, rounds=options.rounds)
    finish(result, as_json=options.json)


def agents(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of agents with emulated devices."""
    names = [f"host{number:02}" for number in range(options.agents)]
    with (
        Network([*names, "client"]) as network,
        tempfile.TemporaryDirectory() as folder,
        Fleet(network, Path(folder)) as fleet,
    ):
        for name in names:
            fleet.pair(name)
        begin = time.perf_counter()
        fleet.start(names, "--devices", f"sim*{options.devices}")
        result: dict[str, Any] = {"start_s": round(time.perf_counter() - begin, 2)}
        with fleet.client():
            crowd = Crowd(fleet, names)
            try:
                result |= measure(crowd, options)
            finally:
                crowd.close()
    return result


class Crowd:
    """The clients of all agents, one connection for each agent and client, and what the agents need.

    Args:
        fleet: The agents, which run.
        names: Their hosts.
    """

    def __init__(self, fleet: Fleet, names: Sequence[str]) -> None:
        self.fleet, self.names = fleet, names
        self._keys: KeyPair = identity("client")
        self._connections: dict[tuple[int, str], Raw] = {}

    def at(self, client: int, name: str) -> Raw:
        """Return a client's connection to an agent; each client has a thread of its own."""
        if (client, name) not in self._connections:
            agent = self._agent(name)
            made = self._connections[client, name] = Raw(f"tcp://{agent.address}", agent.key, self._keys)
            made.introduce()
        return self._connections[client, name]

    def each(self, clients: int, count: int, turn: Callable[[Raw], None]) -> float:
        """Let clients take so many turns together, spread over all agents; return the minutes."""

        def take(client: int) -> None:
            for number in range(client, count, clients):
                turn(self.at(client, self.names[number % len(self.names)]))

        return minutes_of(take, clients)

    def once(self, clients: int, count: int, turn: Callable[[Raw], None]) -> float:
        """Let so many clients that no agent has seen take one turn each, some at a time, spread over all agents; return
        the minutes."""
        homes = [self.names[number % len(self.names)] for number in range(count)]
        for number, name in enumerate(homes):
            self.fleet.pair(name, f"new{number}")
        known = {name: self._agent(name) for name in self.names}
        keys = []
        for number in range(count):
            with self.fleet.keys_of(f"new{number}"):
                keys.append(identity("client"))

        def take(client: int) -> None:
            for number in range(client, count, clients):
                agent = known[homes[number]]
                connection = Raw(f"tcp://{agent.address}", agent.key, keys[number])
                try:
                    connection.introduce()
                    turn(connection)
                finally:
                    connection.close()

        return minutes_of(take, clients)

    def addresses(self, count: int) -> list[str]:
        """Return the addresses of the first agents."""
        return [f"{self.fleet.network[name].address}:{PORT}" for name in self.names[:count]]

    def memory_mb(self) -> list[float]:
        """Return the resident memory of each agent."""
        lines = [self._file(name, "status").splitlines() for name in self.names]
        return [int(next(line for line in each if line.startswith("VmRSS")).split()[1]) / 1024 for each in lines]

    def processor_s(self) -> float:
        """Return the processor time of all agents themselves, without their workers."""
        return sum(processor_s(self.fleet.agents[name].pid) for name in self.names)

    def journal_bytes(self) -> int:
        """Return the size of all journals."""
        return sum(path.stat().st_size for path in self.fleet.folder.glob("host*.jsonl*"))

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()

    def _agent(self, name: str) -> KnownAgent:
        agent = known_agent(f"{self.fleet.network[name].address}:{PORT}")
        assert agent is not None
        return agent

    def _file(self, name: str, file: str) -> str:
        return Path(f"/proc/{self.fleet.agents[name].pid}/{file}").read_text()


def minutes_of(take: Callable[[int], None], clients: int) -> float:
    """Return how long so many threads take together, each with its number."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(take, range(clients)))
    return (time.perf_counter() - begin) / 60


def measure(crowd: Crowd, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures but the start of the agents."""
    held = [(crowd.at(-1, name), options.devices) for name in crowd.names[: options.held]]
    begin = time.perf_counter()
    for connection, count in held:  # all at once, each agent for itself
        connection.ask(*[Want("sim")] * count, grace_s=HELD_S)  # nothing is sent over it meanwhile
    leases = [connection.take(Leased, within_s=WITHIN_S) for connection, _ in held]
    result: dict[str, Any] = {
        "devices": options.agents * options.devices,
        "held": sum(len(lease.workers) for lease in leases),
        "held_start_s": round(time.perf_counter() - begin, 2),
    }
    result |= status(crowd, options.rounds) | page(crowd, options.page_s)
    for (connection, _), lease in zip(held, leases, strict=True):
        connection.send(Release(connection.number(), lease.lease))
        connection.take(Done, within_s=WITHIN_S)
    minutes = crowd.each(options.clients, options.leases, with_workers)
    result["leases_per_minute"] = round(options.leases / minutes, 1)
    minutes = crowd.each(options.clients, options.again, with_workers)
    result["again_leases_per_minute"] = round(options.again / minutes, 1)
    crowd.each(options.clients, options.early // 4, given_back_early)  # until everything has its size
    memory, processor_s, journal_bytes = crowd.memory_mb(), crowd.processor_s(), crowd.journal_bytes()
    minutes = crowd.each(options.clients, options.early, given_back_early)
    grown = [after - before for before, after in zip(memory, crowd.memory_mb(), strict=True)]
    result |= {
        "early_leases_per_minute": round(options.early / minutes, 1),
        "agent_ms_per_lease": round(1e3 * (crowd.processor_s() - processor_s) / options.early, 2),
        "agent_mb": round(max(crowd.memory_mb()), 1),
        "agent_mb_growth": round(max(grown), 2),
        "journal_bytes_per_lease": round((crowd.journal_bytes() - journal_bytes) / options.early, 1),
    }
    minutes = crowd.once(options.clients, options.new, with_workers)  # the other connections are silent meanwhile
    return result | {"new_leases_per_minute": round(options.new / minutes, 1)}


def with_workers(connection: Raw) -> None:
    """Take a lease of one device, wait until its worker can be connected to, and give back the worker and the lease.

    A client that has connected to its worker lets it end; this one does not connect, and would wait for a second.
    """
    lease = answer(connection, Leased, connection.ask(Want("sim")))
    for worker in (0, None):
        number = connection.number()
        connection.send(Release(number, lease.lease, worker=worker))
        answer(connection, Done, number)


def given_back_early(connection: Raw) -> None:
    """Take a lease of one device and give it back at once, while its worker starts."""
    asked = connection.ask(Want("sim"))
    number = connection.number()
    connection.send(Release(number, request=asked))
    answer(connection, Done, number)


def answer(connection: Raw, kind: type[Answer], number: int) -> Answer:
    """Return the answer to a request; earlier ones are sent again to a connection that was silent for a while."""
    while (found := connection.take(kind, within_s=WITHIN_S)).number != number:
        pass
    return found


def status(crowd: Crowd, rounds: int) -> dict[str, Any]:
    """Return how long the command takes, and its queries, of all agents and of a quarter of them."""
    count = len(crowd.names)
    counts = sorted({max(1, count // 4), count})
    queries: dict[int, list[float]] = {each: [] for each in counts}
    commands, processors, devices = [], [], 0
    arguments = (sys.executable, "-m", "onebox", "status", "--json", "--pool", ",".join(crowd.addresses(count)))
    for _ in range(rounds):
        for each in counts:
            queries[each].append(look_s(crowd.addresses(each)))
        begin, spent = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = crowd.fleet.network["client"].run(*arguments, env=crowd.fleet.environment("client"), timeout_s=WITHIN_S)
        commands.append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that have ended, which the agents have not
        processors.append(after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime)
        devices = done.stdout.count('"device":')
        assert done.returncode == 0, done.stderr
    rows = [["onebox status", spread(commands, 2)], ["its processor", spread(processors, 2)]]
    rows += [[f"queries of {each} agents", spread(queries[each])] for each in counts]
    show(f"Status of {devices} devices: median (least to most)", ["what", "seconds"], rows)
    few, many = (statistics.median(queries[each]) for each in (counts[0], counts[-1]))
    found = {
        "status_s": round(statistics.median(commands), 2),
        "status_processor_s": round(statistics.median(processors), 2),
        "status_query_s": round(many, 3),
    }
    if len(counts) > 1:
        found["status_query_exponent"] = round(math.log(many / few) / math.log(counts[-1] / counts[0]), 2)
    return found


def page(crowd: Crowd, lasts_s: float) -> dict[str, Any]:
    """Return the share of a core that the page takes, and each agent for it."""
    output = crowd.fleet.folder / "page.out"
    arguments = (sys.executable, "-m", "onebox", "watch", ",".join(crowd.addresses(len(crowd.names))))
    environment = crowd.fleet.environment("client")
    process = crowd.fleet.network["client"].start(*arguments, env=environment, output=output)
    try:
        end_s = time.monotonic() + WITHIN_S
        while "page at " not in output.read_text():
            assert process.poll() is None and time.monotonic() < end_s, output.read_text()
            time.sleep(0.05)
        url = output.read_text().split("page at ")[1].split()[0]
        result = {}
        for what, viewer in (("unseen", contextlib.nullcontext()), ("seen", viewing(f"{url}events"))):
            with viewer:
                time.sleep(SETTLE_S)
                before = processor_s(process.pid), crowd.processor_s()
                time.sleep(lasts_s)
                own_s, agents_s = processor_s(process.pid) - before[0], crowd.processor_s() - before[1]
            result[f"page_core_share_{what}"] = round(own_s / lasts_s, 4)
            result[f"agent_core_share_{what}"] = round(agents_s / lasts_s / len(crowd.names), 4)
        return result
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WITHIN_S)


@contextlib.contextmanager
def viewing(url: str) -> Iterator[None]:
    """Read the events of a page in a thread."""
    ended = threading.Event()

    def read() -> None:
        with contextlib.suppress(TimeoutError), urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
            while not ended.is_set() and answer.readline():
                pass

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(WITHIN_S)


def processor_s(process: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def look_s(addresses: Sequence[str]) -> float:
    """Return how long it takes until all agents have been looked at once, connections included."""
    begin = time.perf_counter()
    watches = [HostWatch(address, 60.0) for address in addresses]
    try:
        for watch in watches:
            assert watch.looked.wait(WITHIN_S)
            assert watch.state.stock is not None, watch.state.problem
        return time.perf_counter() - begin
    finally:
        close_watches(watches)


if __name__ == "__main__":
    main()
