"""The page of agents."""

from __future__ import annotations

import json

from onebox.report import HostState
from onebox.report.page.host_offers import HostOffers
from onebox.wire.protocol.agents import Holder, Offer, Stock

HOLDER = Holder("ana@desk", 3, 1 << 29, 125.0, threads=1, silent_s=4.0)
OFFERS = (
    Offer("cuda:0", "Card", 2 << 30, 2, 2 << 30),
    Offer("cpu", "a CPU", 1 << 30, 4, 1 << 29, (HOLDER,), 0.375, 3),
)
STATES = [
    HostState(address="lab1:7171", host="lab1", stock=Stock(1, OFFERS, ("bob@desk",), 0.5, 60.0)),
    HostState(address="lab2:7171", problem="no answer from lab2:7171"),
]


def line(event: str, **fields: object) -> str:
    return json.dumps({"time": "2026-11-22T03:04:05.678Z", "event": event, "host": "lab1", **fields})


def test_offers_holders_and_the_queue() -> None:
    found = HostOffers(lambda: STATES).state()
    assert (found.head.kind, found.head.state, found.head.name) == ("agents", "running", "lab1:7171, lab2:7171")
    assert found.head.text == "1 of 2 agents cannot be seen"
    one, other = found.hosts
    assert one.name == "lab1 (lab1:7171)" and one.waiting == ("bob@desk",) and one.load == 0.5
    assert other.problem == "no answer from lab2:7171" and other.devices == ()
    card, cpu = one.devices
    assert (card.state, card.used_bytes, card.busy, card.free_threads) == ("free", 0, None, None)
    assert (cpu.state, cpu.used_bytes, cpu.busy, cpu.free_threads) == ("leased", 1 << 29, 0.38, 3)
    (holder,) = cpu.holders
    assert (holder.client, holder.memory_bytes, holder.silent_s) == ("ana@desk", 1 << 29, 4)


def test_agents_of_which_none_answers() -> None:
    head = HostOffers(lambda: STATES[1:]).state().head
    assert (head.state, head.text) == ("failed", "no answer from lab2:7171")
    assert HostOffers(lambda: [HostState(address="lab3:7171")]).state().head.state == "waiting"


def test_lines_of_journals_are_events() -> None:
    lines = [
        line("leased", client="ana@desk", lease=3),
        "no JSON",
        '{"event": "x"}',
        "[]",
        line("worker-ended", code=9),
    ]
    events = HostOffers(lambda: STATES, lambda: lines).state().events
    assert [(event.kind, event.severity) for event in events] == [("leased", "good"), ("worker-ended", "failure")]
    assert "client ana@desk" in events[0].text and events[0].at_s is not None
