"""``onebox status``: agents' offers, leases and queues; as a live table, a table, or JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from onebox.cli.agent_watch import HostWatch, addresses_of, close_watches
from onebox.cli.console import OutputConsole
from onebox.cli.exit_status import FAILED, Exit
from onebox.cli.options.agents import StatusConfig
from onebox.report import HostState, status_lines, status_table

_LOOK_S = 20.0
"""Bound of the first query: longer than a connection and a query may take."""

_DRAW_S = 0.25


def show_status(config: StatusConfig) -> None:
    """Print agents' offers, once or until Ctrl-C.

    Raises:
        UsageError: There are no agents to query.
        Exit: No agent could be reached, when printing once.
    """
    addresses = addresses_of(config.pool)
    console = OutputConsole()
    once = config.once or config.json or not console.is_terminal
    watches = [HostWatch(address, config.interval) for address in addresses]
    try:
        if once:
            _print(_first(watches), console, json=config.json)
        else:
            _live(watches, console)
    finally:
        close_watches(watches)


def _first(watches: Sequence[HostWatch]) -> list[HostState]:
    """Return the state from a first query of each agent."""
    end_s = time.monotonic() + _LOOK_S
    for watch in watches:
        watch.looked.wait(max(0.0, end_s - time.monotonic()))
    return [watch.state for watch in watches]


def _print(states: list[HostState], console: OutputConsole, *, json: bool) -> None:
    if json:
        print(msgspec.json.encode([_plain(state) for state in states]).decode())
    else:
        table = _table(states, console)
        console.widen([table])
        console.print(table)
        for line in status_lines(states):
            console.write_line(line)
    lost = [state for state in states if state.stock is None]
    if len(lost) == len(states):
        raise Exit(FAILED, f"no agent could be looked at; {lost[0].problem or 'none answered in time'}")


def _live(watches: Sequence[HostWatch], console: OutputConsole) -> None:
    """Show a live table until Ctrl-C, its regular end."""
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            states = [watch.state for watch in watches]
            live.update(Group(_table(states, console), *map(Text, status_lines(states))), refresh=True)
            time.sleep(_DRAW_S)


def _table(states: Sequence[HostState], console: OutputConsole) -> Table:
    return console.fitting(lambda narrow: status_table(states, narrow=narrow))


def _plain(state: HostState) -> dict[str, object]:
    """Return an agent's state in its JSON form."""
    found: dict[str, object] = {"address": state.address, "host": state.host, "problem": state.problem}
    if state.stock is None:
        return found | {"devices": None}
    stock = state.stock
    return found | {
        "devices": [msgspec.structs.asdict(offer) | {"holders": _holders(offer.holders)} for offer in stock.offers],
        "queue": list(stock.queue),
        "load": stock.load,
        "uptime_s": stock.uptime_s,
    }


def _holders(holders: Sequence[msgspec.Struct]) -> list[dict[str, object]]:
    return [msgspec.structs.asdict(holder) for holder in holders]
