"""What agents offer, as tables; what other machines say is shown without what steers a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from onebox.report.tables import memory_text
from onebox.wire.agents import Holder, Offer, Stock

_NAMED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HostState:
    """What is known of an agent at the moment.

    Args:
        address: Its address, as this client knows it.
        host: What it calls its host; empty where it has not said so.
        stock: What it offers; None where that is not known.
        problem: Why not, for a person.
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
        device: What would be leased: ``cuda:K``, ``cuda`` for any, or ``cpu``.
        offer: What the agent says of it; None where any of several would do.
    """

    number: int
    address: str
    device: str
    offer: Offer | None


def status_table(hosts: Sequence[HostState]) -> Table:
    """Make the table of what agents offer, one row a device.

    Args:
        hosts: The agents, in the order of the table.

    Returns:
        A table with the columns host, device, name, free memory, held by, load and queue.
    """
    table = Table("host", "device", "name")
    table.add_column("free memory", justify="right")
    table.add_column("held by")
    table.add_column("load", justify="right")
    table.add_column("waiting")
    for state in hosts:
        name = state.address if state.host in ("", _machine(state.address)) else f"{state.address} ({state.host})"
        if state.stock is None:
            table.add_row(_plain(name), "", _plain(state.problem or "not asked yet"), "", "", "", "")
            continue
        for place, offer in enumerate(state.stock.offers):
            first = place == 0
            table.add_row(
                _plain(name if first else ""),
                _plain(offer.device),
                _plain(_named(offer)),
                f"{memory_text(offer.free_bytes)} of {memory_text(offer.memory_bytes)}",
                _held(offer.holders),
                load_text(offer.load),
                _plain(_waiting(state.stock.queue) if first else ""),
            )
        if not state.stock.offers:
            table.add_row(_plain(name), "", "offers nothing", "", "", "", _plain(_waiting(state.stock.queue)))
    return table


def offer_table(rows: Iterable[OfferRow]) -> Table:
    """Make the table of the devices of a pool over several hosts.

    Args:
        rows: The devices, in the order of their numbers.

    Returns:
        A table with the columns device, host, kind, name, free memory, held by and load.
    """
    table = Table("device", "host", "kind", "name")
    table.add_column("free memory", justify="right")
    table.add_column("held by")
    table.add_column("load", justify="right")
    for row in rows:
        offer = row.offer
        cells = [_plain(text) for text in (str(row.number), row.address, row.device)]
        if offer is None:
            table.add_row(*cells, "any that is free", "", "", "")
            continue
        memory = f"{memory_text(offer.free_bytes)} of {memory_text(offer.memory_bytes)}"
        table.add_row(*cells, _plain(_named(offer)), memory, _held(offer.holders), load_text(offer.load))
    return table


def printable(text: str) -> str:
    r"""Return a text that others wrote with what could steer a terminal written out.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\u001b[2Jb'
    """
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in text)


def load_text(load: float) -> str:
    """Format a load: a share of the time, or ``-`` where it is not known."""
    return f"{100 * load:.0f} %" if 0 <= load < 100 else "-"


def span_text(seconds: float) -> str:
    """Format how long something has lasted, in the largest unit that it fills.

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
    """Return a cell: a plain string's square brackets would be read as markup."""
    return Text(printable(text))


def _named(offer: Offer) -> str:
    return f"{offer.name}, {offer.threads} cores" if offer.device == "cpu" else offer.name


def _held(holders: Sequence[Holder]) -> Text:
    lines = [f"{each.client}, {memory_text(each.memory_bytes)}, {span_text(each.since_s)}" for each in holders[:_NAMED]]
    if len(holders) > _NAMED:
        lines.append(f"and {len(holders) - _NAMED} more")
    return Text("\n".join(map(printable, lines)) or "-")


def _waiting(queue: Sequence[str]) -> str:
    more = f" and {len(queue) - _NAMED} more" if len(queue) > _NAMED else ""
    return (", ".join(queue[:_NAMED]) + more) or "-"
