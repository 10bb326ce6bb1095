"""Offers of agents as tables; terminal escapes in text from other machines are made visible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from onebox.sizes import size_text
from onebox.wire.clean_text import clean_text
from onebox.wire.protocol.agents import Holder, Offer, Stock

_NAMED = 4

_SILENT_S = 3.0
"""Silence of a holder that is shown: it has stopped, or cannot be reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostState:
    """The present state of an agent, as far as known.

    Args:
        address: Its address, as this client knows it.
        host: Its name of its host; empty where unknown.
        stock: Its offers; None where unknown.
        problem: The reason for which they are unknown.
    """

    address: str
    host: str = ""
    stock: Stock | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferRow:
    """A device of a pool over several hosts.

    Args:
        number: Its number in the pool.
        address: Address of its agent.
        device: The device to lease: ``cuda:K``, ``cuda`` for any, or ``cpu``.
        offer: The agent's offer of it; None where it is any of several.
    """

    number: int
    address: str
    device: str
    offer: Offer | None


def status_table(hosts: Sequence[HostState], *, narrow: bool = False) -> Table:
    """Make the table of agents' offers, one row a device; :func:`status_lines` returns further information.

    Args:
        hosts: The agents, in the order of the table.
        narrow: Whether to leave out less important columns.

    Returns:
        A table with the columns host, device, free memory, free cores, held by and load, and unless narrow name and
            waiting.
    """
    table = _table("host", "device", narrow=narrow)
    for state in hosts:
        host = state.address if narrow else _name(state)
        if state.stock is None:
            problem = "cannot be looked at" if state.problem else "not asked yet"
            _add(table, host, "", problem, "", "", problem if narrow else "", "", "", narrow=narrow)
            continue
        waiting = _waiting(state.stock.queue)
        for place, offer in enumerate(state.stock.offers):
            name, queue = (host, waiting) if place == 0 else ("", "")
            _add(table, name, offer.device, *_cells(offer, narrow=narrow), queue, narrow=narrow)
        if not state.stock.offers:
            _add(table, host, "", "offers nothing", "", "", "nothing" if narrow else "", "", waiting, narrow=narrow)
    return table


def status_lines(hosts: Sequence[HostState]) -> list[str]:
    """Return lines below the table: problems of agents, waiting clients, and totals.

    Args:
        hosts: The agents, in the order of the table.

    Example:
        >>> status_lines([HostState(address="lab1:7171", problem="no answer from lab1:7171")])
        ['no answer from lab1:7171', '1 agent, 0 of them seen; 0 devices']
    """
    lines = [clean_text(state.problem) for state in hosts if state.problem]
    stocks = [state.stock for state in hosts if state.stock is not None]
    for state in hosts:
        if state.stock is not None and state.stock.queue:
            lines.append(f"{state.address}: waiting, the first first: {clean_text(_waiting(state.stock.queue))}")
    offers = [offer for stock in stocks for offer in stock.offers]
    seen = "" if len(stocks) == len(hosts) else f", {len(stocks)} of them seen"
    total = f"{_count(len(hosts), 'agent')}{seen}; {_count(len(offers), 'device')}"
    if offers:
        held = sum(bool(offer.holders) for offer in offers)
        free = _of(sum(offer.free_bytes for offer in offers), sum(offer.memory_bytes for offer in offers))
        total += f", {held} of them leased; {free} free"
    return [*lines, total]


def offer_table(rows: Iterable[OfferRow], *, narrow: bool = False) -> Table:
    """Make the table of the devices of a pool over several hosts.

    Args:
        rows: The devices, in the order of their numbers.
        narrow: Whether to leave out less important columns.

    Returns:
        A table with the columns device, host, kind, free memory, free cores, held by and load, and unless narrow name.
    """
    table = _table("device", "host", "kind", narrow=narrow, waiting=False)
    for row in rows:
        offer = row.offer
        any_free = ("any that is free", "any free" if narrow else "", "", "", "")
        cells = any_free if offer is None else _cells(offer, narrow=narrow)
        _add(table, str(row.number), row.address, row.device, *cells, narrow=narrow)
    return table


def _table(*first: str, narrow: bool, waiting: bool = True) -> Table:
    """Make a table without rows: columns of its own, then those that describe a device."""
    if narrow:
        table = Table(*first, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("free", justify="right")
        table.add_column("cores", justify="right")
        table.add_column("held by", overflow="fold")
        table.add_column("load", justify="right")
        return table
    table = Table(*first, "name")
    table.add_column("free memory", justify="right")
    table.add_column("free cores", justify="right")
    table.add_column("held by")
    table.add_column("load", justify="right")
    if waiting:
        table.add_column("waiting")
    return table


def _cells(offer: Offer, *, narrow: bool) -> tuple[str, str, str, Text, str]:
    """Return name, free memory, free cores, holders and load of a device; no cores are leased with a GPU."""
    free = _short_of(offer.free_bytes, offer.memory_bytes) if narrow else _of(offer.free_bytes, offer.memory_bytes)
    cores = f"{offer.free_threads}{'/' if narrow else ' of '}{offer.threads}" if offer.device == "cpu" else "-"
    return offer.name, free, cores, _held(offer.holders, narrow=narrow), load_text(offer.load)


def _add(table: Table, *cells: str | Text, narrow: bool) -> None:
    """Add a row; a narrow table lacks the name, which is before free memory, and the waiting clients."""
    kept = list(cells)
    if narrow:
        name = len(table.columns) - 4
        kept = [*kept[:name], *kept[name + 1 :]][: len(table.columns)]
    table.add_row(*(each if isinstance(each, Text) else _plain(each) for each in kept))


def _name(state: HostState) -> str:
    return state.address if state.host in ("", _machine(state.address)) else f"{state.address} ({state.host})"


def _of(free_bytes: int, size_bytes: int) -> str:
    return f"{size_text(free_bytes)} of {size_text(size_bytes)}"


def _short_of(free_bytes: int, size_bytes: int) -> str:
    """Format the number in the unit of the whole."""
    if size_bytes < 2**30:
        return f"{free_bytes / 2**20:.0f}/{size_bytes / 2**20:.0f} MiB"
    return f"{free_bytes / 2**30:.1f}/{size_bytes / 2**30:.1f} GiB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def load_text(load: float) -> str:
    """Format a load: a fraction of time, or ``-`` where unknown."""
    return f"{100 * load:.0f} %" if 0 <= load < 100 else "-"


def span_text(seconds: float) -> str:
    """Format a duration in the largest unit that it fills.

    Example:
        >>> [span_text(seconds) for seconds in (5, 125, 7300, 200_000)]
        ['5 s', '2 min', '2 h', '2 days']
    """
    for size, unit in ((172_800, "days"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // (86_400 if unit == 'days' else size):.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _machine(address: str) -> str:
    return address.rpartition(":")[0]


def _plain(text: str) -> Text:
    """Return a cell: rich would read a plain string's square brackets as markup."""
    return Text(clean_text(text))


def _held(holders: Sequence[Holder], *, narrow: bool) -> Text:
    """List the holders of a device; workers of one client are counted."""
    by_client: dict[str, list[Holder]] = {}
    for each in holders:
        by_client.setdefault(clean_text(each.client), []).append(each)
    lines = [_holding(client, held, narrow=narrow) for client, held in list(by_client.items())[:_NAMED]]
    if len(by_client) > _NAMED:
        lines.append(f"and {len(by_client) - _NAMED} more")
    return Text("\n".join(lines) or "-")


def _holding(client: str, held: Sequence[Holder], *, narrow: bool) -> str:
    times = f" × {len(held)}" if len(held) > 1 else ""
    since = span_text(max(each.since_s for each in held))
    memory = "" if narrow else f"{size_text(sum(each.memory_bytes for each in held))}, "
    silent_s = max(each.silent_s for each in held)
    silent = f", silent for {span_text(silent_s)}" if silent_s > _SILENT_S else ""
    return f"{client}{times}, {memory}{since}{silent}"


def _waiting(queue: Sequence[str]) -> str:
    more = f" and {len(queue) - _NAMED} more" if len(queue) > _NAMED else ""
    return (", ".join(queue[:_NAMED]) + more) or "-"
