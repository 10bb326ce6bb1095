"""The page of agents: what their hosts offer, who has leased it, and the newest lines of their journals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from onebox.report.page.state import DeviceView, EventView, Head, HolderView, HostView, PageState, Severity
from onebox.report.page.temperatures import device_temperatures
from onebox.report.tables.agents import HostState
from onebox.wire.protocol.agents import Offer

JOURNAL_LINES = 100
"""The most lines of journals that are shown."""

_TEXT = 600
_HOLDERS = 16
_WAITING = 16

_SEVERITIES: Mapping[str, Severity] = {
    "worker-ended": "failure",
    "failed": "failure",
    "expired": "warning",
    "held-up": "warning",
    "lease-refused": "warning",
    "handshake-refused": "warning",
    "refused": "warning",
    "clients-unreadable": "warning",
    "leased": "good",
    "started": "good",
}


class HostOffers:
    """Agents, for the page.

    Args:
        states: Returns the present state of each agent, at once.
        log: Returns the newest lines of the journals, as JSON objects, at once.
        here: Whether the agents are of this machine, whose temperatures can be read.
    """

    def __init__(
        self,
        states: Callable[[], Sequence[HostState]],
        log: Callable[[], Sequence[str]] = lambda: (),
        *,
        here: bool = False,
    ) -> None:
        self._states = states
        self._log = log
        self._here = here

    def state(self) -> PageState:
        """Return the present state."""
        states = self._states()
        problems = [state.problem for state in states if state.problem]
        seen = [state for state in states if state.stock is not None]
        head = Head(
            kind="agents",
            name=", ".join(state.address for state in states),
            state="running" if seen else "waiting" if not problems else "failed",
            text="; ".join(problems)[:_TEXT] if not seen else _missing(len(problems), len(states)),
        )
        return PageState(
            head=head,
            hosts=tuple(_host(state, here=self._here) for state in states),
            events=tuple(event for line in self._log()[-JOURNAL_LINES:] if (event := _event(line)) is not None),
        )

    def trace(self) -> bytes | None:
        """Return ``None``: agents have no steps."""
        return None

    def close(self) -> None:
        """Do nothing: the agents belong to others."""


def _missing(count: int, agents: int) -> str:
    return f"{count} of {agents} agents cannot be seen" if count else ""


def _host(state: HostState, *, here: bool) -> HostView:
    name = state.address if state.host in ("", state.address) else f"{state.host} ({state.address})"
    if state.stock is None:
        return HostView(name=name, problem=state.problem or "not asked yet")
    stock = state.stock
    temperatures = device_temperatures({offer.device for offer in stock.offers}) if here else {}
    return HostView(
        name=name,
        devices=tuple(_device(offer, temperatures.get(offer.device)) for offer in stock.offers),
        load=round(stock.load, 2),
        waiting=tuple(stock.queue[:_WAITING]),
    )


def _device(offer: Offer, temperature_c: float | None) -> DeviceView:
    return DeviceView(
        number=None,
        device=offer.device,
        name=offer.name,
        state="leased" if offer.holders else "free",
        threads=offer.threads,
        free_threads=offer.free_threads if offer.device == "cpu" else None,
        memory_bytes=offer.memory_bytes,
        budget_bytes=offer.memory_bytes,
        used_bytes=offer.memory_bytes - offer.free_bytes,
        busy=round(offer.load, 2) if offer.load >= 0 else None,
        temperature_c=temperature_c,
        holders=tuple(
            HolderView(
                client=each.client,
                memory_bytes=each.memory_bytes,
                since_s=round(each.since_s),
                silent_s=round(each.silent_s),
            )
            for each in offer.holders[:_HOLDERS]
        ),
    )


def _event(line: str) -> EventView | None:
    """Return a line of a journal as an event; ``None`` for one that is none."""
    try:
        fields: Any = json.loads(line)
        kind = str(fields.pop("event"))
        time = datetime.fromisoformat(str(fields.pop("time"))).timestamp()
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    text = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
    return EventView(at_s=time, step=None, kind=kind, severity=_SEVERITIES.get(kind, "info"), text=text[:_TEXT])
