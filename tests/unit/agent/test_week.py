"""A week of an agent: what it keeps of leases, sessions and events does not grow, and nor does its journal."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebox.agent.admission import ClientLimits, Offered
from onebox.agent.journal import Journal
from onebox.agent.leases import Client, Grant, Leases
from onebox.agent.reporter import Reporter
from onebox.agent.sessions import Sessions
from onebox.wire.protocol.agents import Done, Leased, Want

DAY_S = 86_400.0
EVERY_S = 60.0
FILE_BYTES = 1 << 18
CLIENTS = 40


class Days:
    """The state of an agent whose clients take a lease each minute, always over a new session.

    Args:
        journal: Its journal.
    """

    def __init__(self, journal: Journal) -> None:
        offers = [Offered(device=f"sim:{number}", name="emulated", memory_bytes=1, threads=1) for number in range(16)]
        self.leases, self.sessions = Leases(offers, ClientLimits()), Sessions()
        self.reporter = Reporter(journal.tell)
        self.count = 0

    def live(self, until_s: float) -> None:
        """Take leases and give them back, but for clients that are gone; others knock, each once."""
        while (now_s := self.count * EVERY_S) < until_s:
            number = self.count = self.count + 1
            client = Client(f"{number % CLIENTS:040}", number.to_bytes(8), f"client{number % CLIENTS}")
            session = self.sessions.find(client, now_s, self.leases.busy)
            assert session is not None
            session.heard(now_s)
            (grant,) = self.leases.ask(client, 1, [Want("sim")], grace_s=30.0, wait=True, now_s=now_s)
            assert isinstance(grant, Grant)
            self.reporter.dealing("leased", client.name, now_s, client=client.name, lease=grant.lease)
            session.sent(Leased(1, grant.lease, ()), now_s)
            self.reporter.refusal("handshake-refused", f"peer{number}", now_s, peer=f"peer{number}")
            if number % 7:
                self.leases.release(client, grant.lease)
            else:  # it is gone, which is noticed later
                now_s += 31.0
                self.leases.tick(now_s)
            assert self.leases.freed(grant.lease, now_s) == []
            session.sent(Done(1), now_s)
            self.reporter.dealing("freed", client.name, now_s, client=client.name, lease=grant.lease)
            self.sessions.forget(now_s, self.leases.busy)
            self.reporter.tick(now_s)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "agent.jsonl", file_bytes=FILE_BYTES) as made:
        yield made


@pytest.mark.soak
def test_a_week_leaves_no_more_than_two_days(journal: Journal, tmp_path: Path) -> None:
    days = Days(journal)
    tracemalloc.start()
    try:
        days.live(2 * DAY_S)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        days.live(7 * DAY_S)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 16, "7,200 leases, of which each would leave 9 bytes"
    assert journal.counts["leased"] == days.count == 7 * 1440
    written = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(written) == 2 and max(written) <= FILE_BYTES
    assert journal.counts["freed"] * 100 > 3 * FILE_BYTES, "it was put aside several times"
