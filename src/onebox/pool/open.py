"""Opening of a pool: from a specification to connected workers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points

from onebox.errors import UsageError
from onebox.pool.backends.agents.agent_socket import address_towards
from onebox.pool.backends.agents.agent_source import AgentSource, acquire_all, paired_agent
from onebox.pool.backends.base import LOOPBACK, LocalWorker, WorkerHandle, WorkerSource, end_all
from onebox.pool.client.loop import ClientLoop
from onebox.pool.core_usage import explain_overcommitment
from onebox.pool.devices import explain_links, welcome
from onebox.pool.discovery import LOCAL_HOST, requested_devices, require_local_workers
from onebox.pool.errors import raise_first
from onebox.pool.network.emulated import Link, LinkMap
from onebox.pool.pool import Pool
from onebox.pool.spec import AgentPart, RayPart, asked_parts, read_hosts
from onebox.sizes import Memory, parse_budgets
from onebox.trainer_options import is_number, require_bool, require_int
from onebox.wire import new_keys
from onebox.wire.protocol.instructions import Ask
from onebox.worker import Fault

_LOG = logging.getLogger("onebox")

_QUESTIONS = 3
"""Number of questions to all workers by which their round-trip time is measured."""


def open_pool(
    spec: str = "auto",
    *,
    threads: int | None = None,
    memory: Memory | None = None,
    links: LinkMap | None = None,
    faults: dict[int, Sequence[Fault]] | None = None,
    grace_s: float | None = None,
    wait: bool = True,
    plain_links: bool = False,
) -> Pool:
    """Open a pool without virtual devices; see :func:`onebox.open`, which describes the arguments.

    Raises:
        UsageError: The specification is wrong, or names a missing device or a host that this client was not paired
            with; or a link cannot be emulated.
        PoolError: A worker could not be started, or is of another version; an agent cannot be reached; or others hold
            the devices and ``wait`` is false.
        WorkerDied: A worker ended during its start.
    """
    require_int("threads", threads, least=1)
    for name, value in {"wait": wait, "plain_links": plain_links}.items():
        require_bool(name, value)
    if grace_s is not None and not (is_number(grace_s) and 0 < grace_s < math.inf):
        raise UsageError(f"grace_s={grace_s!r}: allowed are seconds above 0, and None for the usual ones")
    _require_maps(links, faults)
    sources = make_sources(spec, threads=threads, memory=memory, faults=faults, grace_s=grace_s)
    plain_links = plain_links or any(isinstance(source, AgentSource) and source.plain_links for source in sources)
    return connect_pool(sources, links=links, wait=wait, plain_links=plain_links)


def _require_maps(links: object, faults: object) -> None:
    """Check the types of links and faults.

    Raises:
        UsageError: They are of other types.
    """

    def is_way(key: object) -> bool:
        return isinstance(key, tuple) and len(key) == 2 and all(isinstance(end, int) for end in key)

    if links is not None and not (
        isinstance(links, Mapping) and all(is_way(way) and isinstance(link, Link) for way, link in links.items())
    ):
        raise UsageError(
            f"links={links!r}: allowed is a dict from pairs of devices to links, such as "
            "{(0, 1): onebox.Link(latency_s=1e-3)}"
        )
    if faults is not None and not (
        isinstance(faults, Mapping)
        and all(isinstance(worker, int) and isinstance(own, Sequence) for worker, own in faults.items())
        and all(isinstance(fault, Fault) for own in faults.values() for fault in own)
    ):
        raise UsageError(f"faults={faults!r}: allowed is a dict from devices to lists of faults, for tests")


def make_sources(
    spec: str,
    *,
    threads: int | None = None,
    memory: Memory | None = None,
    faults: Mapping[int, Sequence[Fault]] | None = None,
    grace_s: float | None = None,
) -> list[WorkerSource]:
    """Return the sources of a pool's devices, in the order of its numbering; nothing is started yet.

    Raises:
        UsageError: The specification is wrong, or names a missing device of this machine, or a host that this client
            was not paired with.
    """
    if not isinstance(spec, str):
        raise UsageError(
            f"spec={spec!r}: allowed is text such as 'auto', 'cpu*2', 'cuda:0,cuda:1' or 'lab1,lab2', or the path of a "
            "file of hosts"
        )
    parts = asked_parts(spec, os.environ, read_hosts)
    budgets = parse_budgets("memory", memory)
    if len(parts) > 1 and not budgets.alike:
        raise UsageError(
            f"memory={memory!r} for devices of several hosts: give one for all, or say that of each host in a file of "
            'hosts, as in memory = ["2GiB", "4GiB"]'
        )
    agents = [part for part in parts if isinstance(part, AgentPart)]
    for agent in agents:
        paired_agent(agent.address)
    mixed = 0 < len(agents) < len(parts)
    address = address_towards([agent.address for agent in agents]) if mixed else LOOPBACK
    found: list[WorkerSource] = []
    for part in parts:
        if isinstance(part, RayPart):
            if not budgets.alike:
                raise UsageError(f"memory={memory!r}: devices of a Ray cluster have the same, such as memory='40GiB'")
            found.append(_on_cluster(part, threads, budgets.every or None))
            continue
        limits = replace(part, threads=part.threads or threads, memory=part.memory or budgets)
        if isinstance(limits, AgentPart):
            found.append(AgentSource(limits, grace_s=grace_s))
        else:
            require_local_workers(limits.devices)
            from onebox.pool.backends.local import LocalSource  # Linux alone has what it starts workers with

            requests = requested_devices(limits.devices, limits.threads)
            quotas = (limits.memory or budgets).of(len(requests), LOCAL_HOST if len(parts) > 1 else "the pool")
            found.append(LocalSource(requests, quotas=quotas, faults=faults, address=address))
    return found


def _on_cluster(part: RayPart, threads: int | None, memory_bytes: int | None) -> WorkerSource:
    """Return devices of a Ray cluster. They are agents' devices, of a package above this one, and found by name."""
    [found] = entry_points(group="onebox.clusters", name="ray")
    made: WorkerSource = found.load()(part.spec, threads=threads, memory_bytes=memory_bytes)
    return made


def _round_trip_s(pool: Pool) -> float:
    """Return the fastest time of a round trip to all workers."""
    took_s: list[float] = []
    for _ in range(_QUESTIONS):
        begin_s = time.monotonic()
        raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in pool.present])
        took_s.append(time.monotonic() - begin_s)
    return min(took_s)


def connect_pool(
    sources: Sequence[WorkerSource],
    *,
    links: LinkMap | None = None,
    wait: bool = True,
    plain_links: bool = False,
) -> Pool:
    """Start the workers of some sources, in that order, and make a pool of them; see :func:`open_pool`.

    The sources are closed with the pool, or when there is none.
    """
    mine = new_keys()
    with contextlib.ExitStack() as undo:
        for source in sources:
            undo.callback(source.close)
        started: list[tuple[WorkerHandle, str]] = []
        undo.callback(lambda: end_all([handle for handle, _ in started], grace_s=0.0))
        agents = [source for source in sources if isinstance(source, AgentSource)]
        if agents:
            acquire_all(agents, mine.public, wait=wait)
        patience_s: dict[int, float] = {}
        for source in sources:
            made = source.start(len(started), mine.public)
            if isinstance(source, AgentSource):
                patience_s |= {handle.place.worker: source.patience_s for handle, _ in made}
            started += made
        handles = [handle for handle, _ in started]
        client_loop = ClientLoop(mine, len(handles), patience_s)
        undo.callback(client_loop.stop)
        client_loop.start()
        hellos = [client_loop.connect(handle, key) for handle, key in started]
        devices = [welcome(handle, hello) for handle, hello in zip(handles, hellos, strict=True)]
        for source in sources:
            source.connected()
        pool = Pool(handles, sources, client_loop, devices, links, plain_links)
        if not all(isinstance(handle, LocalWorker) for handle in handles):
            pool.round_trip_s = _round_trip_s(pool)
        undo.pop_all()
    crowded = explain_overcommitment(pool.cores)
    for line in (crowded, explain_links(devices, plain_links)):
        if line:
            _LOG.warning("%s", line)
    return pool
