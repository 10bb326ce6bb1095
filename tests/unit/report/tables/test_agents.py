"""Tables of what agents offer: everything is there, and nothing of it steers a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from onebox.report import HostState, OfferRow, offer_table, status_lines, status_table
from onebox.report.tables.agents import load_text, span_text
from onebox.wire.protocol.agents import Holder, Offer, Stock

GPU = Offer("cuda:0", "Card 9000", 16 << 30, 4, 10 << 30, (Holder("ana@desk", 3, 6 << 30, 125.0),), 0.42)
CPU = Offer("cpu", "[red]Chip[/red]", 2 << 30, 8, 2 << 30, free_threads=5)


def shown(table: Table, width: int = 200) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_the_status_of_hosts() -> None:
    stock = Stock(1, (GPU, CPU), queue=("ben@lap", "cleo@lap"), load=0.5)
    found = rows(
        shown(
            status_table(
                [
                    HostState(address="lab:7171", host="lab", stock=stock),
                    HostState(address="10.0.0.2:7171", host="far", problem="it does not answer"),
                    HostState(address="new:7171"),
                    HostState(address="bare:7171", host="bare", stock=Stock(1, ())),
                ]
            )
        )
    )
    assert found == [
        [
            "lab:7171",
            "cuda:0",
            "Card 9000",
            "10.0 GiB of 16.0 GiB",
            "-",
            "ana@desk, 6.0 GiB, 2 min",
            "42 %",
            "ben@lap, cleo@lap",
        ],
        ["", "cpu", "[red]Chip[/red]", "2.0 GiB of 2.0 GiB", "5 of 8", "-", "-", ""],
        ["10.0.0.2:7171 (far)", "", "cannot be looked at", "", "", "", "", ""],
        ["new:7171", "", "not asked yet", "", "", "", "", ""],
        ["bare:7171", "", "offers nothing", "", "", "", "", "-"],
    ]


def test_what_is_said_below_the_table() -> None:
    """What is wrong, who waits, how much there is in all: it has room there however narrow the table is."""
    hosts = [
        HostState(address="lab:7171", host="lab", stock=Stock(1, (GPU, CPU), queue=("ben@lap", "cleo@lap"))),
        HostState(address="far:7171", host="far", problem="no answer from far:7171"),
    ]
    assert status_lines(hosts) == [
        "no answer from far:7171",
        "lab:7171: waiting, the first first: ben@lap, cleo@lap",
        "2 agents, 1 of them seen; 2 devices, 1 of them leased; 12.0 GiB of 18.0 GiB free",
    ]


def test_a_narrow_terminal_gets_the_same_hosts_devices_and_holders() -> None:
    crowd = Offer("cpu", "chip", 4 << 30, 4, 0, tuple(Holder("ana@desk", number, 1 << 30, 61.0) for number in (1, 2)))
    hosts = [
        HostState(address="192.168.100.10:7171", stock=Stock(1, (GPU, crowd), ("ben@lap",))),
        HostState(address="192.168.100.11:7171", problem="no answer"),
    ]
    lines = [line.split() for line in shown(status_table(hosts, narrow=True), width=80).splitlines()]
    assert lines[1][:4] == ["192.168.100.10:7171", "cuda:0", "10.0/16.0", "GiB"]
    assert lines[2] == ["cpu", "0.0/4.0", "GiB", "0/4", "ana@desk", "×", "2,", "1", "min", "-"]
    assert lines[3] == ["192.168.100.11:7171", "cannot", "be", "looked", "at"]
    drawn = shown(status_table(hosts, narrow=True), width=60)
    assert all(len(line) <= 60 for line in drawn.splitlines())
    row = OfferRow(number=0, address="lab", device="cpu", offer=crowd)
    assert shown(offer_table([row], narrow=True), width=60).splitlines()[1].split()[:3] == ["0", "lab", "cpu"]


def test_workers_of_one_client_are_counted() -> None:
    two = Offer("cpu", "chip", 4 << 30, 4, 0, tuple(Holder("ana@desk", 1, 1 << 30, since) for since in (5.0, 70.0)))
    assert "ana@desk × 2, 2.0 GiB, 1 min" in shown(status_table([HostState(address="a:1", stock=Stock(1, (two,)))]))


def test_a_holder_that_is_silent_is_shown_as_such() -> None:
    held = Offer("cpu", "chip", 4 << 30, 4, 0, (Holder("ana@desk", 1, 1 << 30, 70.0, 4, 12.0),))
    assert "ana@desk, 1.0 GiB, 1 min, silent for 12 s" in shown(
        status_table([HostState(address="a:1", stock=Stock(1, (held,)))])
    )


def test_long_lists_are_cut() -> None:
    crowd = tuple(Holder(f"c{number}", number, 1 << 20, 0.0) for number in range(9))
    offer = Offer("cpu", "chip", 1 << 30, 1, 0, crowd)
    text = shown(status_table([HostState(address="a:1", stock=Stock(1, (offer,), tuple("qwertyu")))]))
    assert "and 5 more" in text
    assert "q, w, e, r and 3 more" in text
    assert "c4" not in text


def test_the_devices_of_a_pool() -> None:
    text = shown(
        offer_table(
            [
                OfferRow(number=0, address="lab", device="cuda:0", offer=GPU),
                OfferRow(number=1, address="lab", device="cuda", offer=None),
            ]
        )
    )
    assert rows(text) == [
        ["0", "lab", "cuda:0", "Card 9000", "10.0 GiB of 16.0 GiB", "-", "ana@desk, 6.0 GiB, 2 min", "42 %"],
        ["1", "lab", "cuda", "any that is free", "", "", "", ""],
    ]


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_nothing_steers_a_terminal(text: str) -> None:
    holder = Holder(text, 1, 1, 1.0)
    stock = Stock(1, (Offer("cpu", text, 1, 1, 1, (holder,)),), (text,))
    state = HostState(address="a:1", host=text, stock=stock, problem=text)
    hosts = [state, HostState(address="b:1", problem=text)]
    drawn = shown(status_table(hosts), width=1000)
    assert all(line.isprintable() for line in [*drawn.splitlines(), *status_lines(hosts)])


@pytest.mark.parametrize(
    ("load", "text"), [(0.0, "0 %"), (1.0, "100 %"), (-1.0, "-"), (float("nan"), "-"), (float("inf"), "-")]
)
def test_loads(load: float, text: str) -> None:
    assert load_text(load) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (59, "59 s"), (60, "1 min"), (3_599, "59 min"), (172_799, "47 h"), (172_800, "2 days")],
)
def test_spans(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
