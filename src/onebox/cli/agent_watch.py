"""Queries to agents without leases: the agents of a specification, and monitoring of their state."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from onebox.errors import OneboxError, UsageError
from onebox.pool.backends.agents.agent_connection import AgentConnection
from onebox.pool.backends.agents.agent_source import connect_agent, paired_agent
from onebox.pool.keys.keyring import known_agents
from onebox.pool.spec import AgentPart, Part, asked_parts, read_hosts
from onebox.report import HostState

_CLOSE_S = 1.0
"""Bound of the wait for connections to close; a hung one is closed by the end of the process."""


def parts_of(spec: str) -> tuple[Part, ...]:
    """Return the parts of a pool's specification; see :func:`~onebox.pool.spec.asked_parts`.

    Raises:
        UsageError: The specification is invalid.
    """
    return asked_parts(spec, os.environ, read_hosts)


def agent_parts(spec: str) -> tuple[AgentPart, ...] | None:
    """Return the hosts of a specification, if it consists of hosts with agents only.

    Raises:
        UsageError: The specification is invalid, or this client was not paired with one of them.
    """
    parts = parts_of(spec)
    agents = tuple(part for part in parts if isinstance(part, AgentPart))
    if len(agents) < len(parts):
        return None
    for part in agents:
        paired_agent(part.address)
    return agents


def addresses_of(spec: str) -> tuple[str, ...]:
    """Return the addresses of a pool's agents; those of all known agents for an ``auto`` without another meaning.

    Raises:
        UsageError: The specification is invalid, there are none, or this client was not paired with one.
    """
    agents = tuple(part for part in parts_of(spec) if isinstance(part, AgentPart))
    for part in agents:
        paired_agent(part.address)
    found = tuple(part.address for part in agents)
    if spec.strip() == "auto" and not found:
        found = tuple(agent.address for agent in known_agents())
    if not found:
        raise UsageError(
            f"--pool {spec}: there is no other machine in it; name some where onebox serve runs, and pair with them "
            "first: onebox pair connect HOST"
        )
    return found


@contextlib.contextmanager
def connected(addresses: Sequence[str]) -> Iterator[list[AgentConnection]]:
    """Connect to some agents at once, and close the connections afterwards.

    Raises:
        OneboxError: One cannot be reached.
    """
    with ThreadPoolExecutor(len(addresses)) as threads, contextlib.ExitStack() as stack:
        futures = [threads.submit(connect_agent, address) for address in addresses]
        for future in futures:
            if future.exception() is None:
                stack.callback(future.result().close)
        yield [future.result() for future in futures]


class HostWatch:
    """Queries one agent repeatedly while its state is read, in a thread that :meth:`close` ends.

    Args:
        address: Its address.
        every_s: Seconds between two queries.
        log_lines: Number of the newest lines of its log that are queried, too.
    """

    def __init__(self, address: str, every_s: float, *, log_lines: int = 0) -> None:
        self._state = HostState(address=address)
        self.lines: tuple[str, ...] = ()
        """The latest lines of its log."""
        self.looked = threading.Event()
        """Set after the first query."""
        self._log_lines = log_lines
        self._wanted = threading.Event()
        self._every_s = every_s
        self._ended = threading.Event()
        self._line: AgentConnection | None = None
        self._thread = threading.Thread(target=self._run, name=f"onebox-look-{address}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> HostState:
        """The latest state."""
        self._wanted.set()
        return self._state

    def close(self, *, within_s: float) -> None:
        """End the thread; a query in progress runs to its end, if this process lives as long.

        Args:
            within_s: Bound of the wait for that.
        """
        self._ended.set()
        self._wanted.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._state = self._look()
                self.looked.set()
                self._wanted.clear()
                if not self._ended.wait(self._every_s):
                    self._wanted.wait()
        finally:
            self._part()

    def _look(self) -> HostState:
        address = self._state.address
        try:
            if self._line is None:
                self._line = connect_agent(address)
            state = HostState(address=address, host=self._line.introduced.host, stock=self._line.inspect())
            if self._log_lines:
                self.lines = tuple(self._line.read_log(self._log_lines))
            return state
        except OneboxError as error:
            self._part()
            return HostState(address=address, host=self._state.host, problem=str(error))

    def _part(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def close_watches(watches: Sequence[HostWatch]) -> None:
    """End some queries at once."""
    end_s = time.monotonic() + _CLOSE_S
    for watch in watches:
        watch.close(within_s=0.0)
    for watch in watches:
        watch.close(within_s=max(0.0, end_s - time.monotonic()))
