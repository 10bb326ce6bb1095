"""What one client does, by malice or by a mistake of the agent's, costs another one nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from onebox.agent.workers import Workers
from onebox.reaping import LEFT_BEHIND
from onebox.wire import SMALL_BYTES, new_keys
from onebox.wire.protocol.agents import (
    TOKEN_BYTES,
    Done,
    Inspect,
    LeaseEnded,
    LogLines,
    ReadLog,
    Refused,
    Release,
    Renew,
    Stock,
    Want,
    encode_agent,
)
from tests.kit import leaks
from tests.kit.waiting import until
from tests.process.agent.raw import House, Raw, gone, house

HALF = Want("cpu", 1, 1 << 20)
POISON = 666


def read_log(lines: int) -> Sequence[str]:
    if lines == POISON:
        raise KeyError("a mistake of ours")
    return ["{}"] * lines


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    with house(read_log=read_log) as made:
        yield made


@pytest.mark.feature("Security: Survive malicious messages")
def test_a_message_that_the_agent_fails_at_costs_its_session_and_nobody_elses(shared: House) -> None:
    ben, ana = shared.client("ben"), shared.client("ana")
    other = shared.client("ana", ana.keys)
    kept, lost = ben.lease(HALF, grace_s=60.0), ana.lease(HALF, grace_s=60.0)
    ana.send(ReadLog(ana.number(), POISON))
    assert ana.take(LeaseEnded).lease == lost.lease
    assert "journal" in ana.take(Refused).reason
    (told,) = shared.told("failed")
    assert (told["client"], told["part"]) == ("ana", "message")
    assert told["reason"].startswith("KeyError") and told["where"].startswith("test_harm.py:")
    assert gone([lost.workers[0].process])

    assert ben.renewed() == (kept.lease,) and other.renewed() == () == ana.renewed()
    ana.introduce()
    ana.send(ReadLog(ana.number(), 1))
    assert ana.take(LogLines).lines == ("{}",)
    ben.send(Release(ben.number(), kept.lease))
    assert gone([kept.workers[0].process])


def test_a_lease_that_the_agent_fails_to_begin_is_freed(shared: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Workers, *args: Any) -> None:
        raise RuntimeError("no such luck")

    client = shared.client("cleo")
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "start", fail)
        number = client.ask(HALF)
        refused = client.take(Refused)
    assert (refused.number, refused.kind) == (number, "failed") and "no such luck" in refused.reason
    until(lambda: not shared.agent.stock().offers[0].holders)


def test_a_list_of_clients_that_cannot_be_read_for_a_while_costs_nobody_a_lease(shared: House) -> None:
    client = shared.client("dora")
    leased = len(shared.told("leased"))
    number = client.ask(HALF, grace_s=60.0)
    shared.until("leased", leased + 1)
    before, known = len(shared.told("failed")), shared.known
    try:
        shared.known = None  # type: ignore[assignment]
        client.send(Renew(client.number()))
        shared.until("failed", before + 1)
    finally:
        shared.known = known
    client.send(Release(client.number(), request=number))
    client.take(Done)


def test_without_a_descriptor_left_leases_go_on_and_a_new_one_is_refused(shared: House) -> None:
    """As where a stranger opens connections faster than they time out."""
    client, other = shared.client("fay"), shared.client("gus")
    leased = client.lease(HALF, grace_s=3.0)
    with leaks.no_descriptors():
        for asking in (client, other):
            asking.ask(Want("cpu", 1, 1 << 20))
            refused = asking.take(Refused)
            assert refused.kind == "failed" and "Too many open files" in refused.reason
        end_s = time.monotonic() + 4.0
        while time.monotonic() < end_s:
            assert client.renewed() == (leased.lease,)
            time.sleep(0.2)
    client.send(Release(client.number(), leased.lease))
    client.take(Done)
    again = other.lease(Want("cpu", 1, 1 << 20))
    other.send(Release(other.number(), again.lease))
    other.take(Done)


def test_who_takes_the_name_of_anothers_connection_hears_nothing_of_his(shared: House) -> None:
    """By the name that a socket may give to its connections; those of this package give them none."""
    name = b"a name to be guessed"
    ana = shared.raw("ana", route=name)
    ana.introduce()
    thief = shared.raw("eve", route=name)
    thief.send(Inspect(thief.number()))
    for _ in range(3):
        ana.send(Inspect(ana.number()))
        ana.take(Stock)
    assert not thief.socket.poll(500)
    thief.disconnect()
    thief.connect()
    assert ana.introduce() and not thief.socket.poll(500)


def test_who_has_anothers_token_has_a_session_of_his_own(shared: House) -> None:
    ana, thief = shared.client("ana"), shared.raw("eve")
    thief.token = ana.token
    thief.introduce()
    leased = ana.lease(HALF, grace_s=60.0)
    assert thief.renewed() == () and ana.renewed() == (leased.lease,)
    thief.send(Release(thief.number(), leased.lease))
    assert thief.take(Refused).kind == "ended"
    thief.send(Release(thief.number(), request=leased.number))
    assert thief.take(Refused).kind == "ended"
    assert not any(getattr(message, "lease", 0) == leased.lease for message in thief.heard)
    ana.send(Release(ana.number(), leased.lease))
    assert gone([leased.workers[0].process])


@pytest.mark.parametrize("token", [b"", bytes(TOKEN_BYTES - 1), bytes(TOKEN_BYTES + 1), bytes(10_000)])
def test_a_message_with_another_token_than_agents_know_is_none(shared: House, token: bytes) -> None:
    client = shared.raw("finn")
    client.token = token
    client.send(Inspect(1))
    client.socket.send(encode_agent(Inspect(1)))
    assert not client.socket.poll(300)
    client.token = bytes(TOKEN_BYTES)
    client.introduce()


def test_of_a_flood_of_nonsense_a_few_lines_are_told(shared: House) -> None:
    before = len(shared.told("refused"))
    client = shared.client("greta")
    for _ in range(90):
        client.send(b"nonsense")
    client.send(Inspect(client.number()))
    client.take(Stock)
    assert len(shared.told("refused")) - before <= 2 * 6, "of two minutes at most"


def test_a_message_of_many_parts_is_cut_off_and_costs_the_agent_little_memory(folder: Path) -> None:
    keys, client = new_keys(), new_keys()
    serving = [sys.executable, "-m", "tests.process.agent.serving"]
    agent = subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write(f"{keys.public}\n{keys.secret}\n{client.public}\n")
    agent.stdin.flush()
    endpoint = agent.stdout.readline().strip()
    good, bad = Raw(endpoint, keys.public, client), Raw(endpoint, keys.public, client)
    try:
        good.introduce()
        bad.introduce()
        before = resident(agent.pid)
        bad.socket.send_multipart([bytes(60_000)] * 3500, copy=False)
        peak, end_s = before, time.monotonic() + 3.0
        while time.monotonic() < end_s:
            peak = max(peak, resident(agent.pid))
            time.sleep(0.005)
        assert peak - before < 48 << 20, f"{(peak - before) >> 20} MiB of 200 that were sent"
        good.send(Inspect(good.number()))
        good.take(Stock)
    finally:
        good.close()
        bad.close()
        agent.terminate()
        assert agent.wait(30) == 0
        agent.stdin.close()
        agent.stdout.close()


def resident(process: int) -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_connection_that_is_cut_off_is_in_the_journal(shared: House) -> None:
    client = shared.client("gil")
    client.socket.send_multipart([bytes(60_000)] * 200, copy=False)
    shared.until("cut-off")
    told = shared.told("cut-off")[0]
    assert told["address"] == "127.0.0.1" and told["unread_bytes"] > SMALL_BYTES


def test_a_process_that_is_left_behind_is_in_the_journal_and_so_is_its_end(shared: House) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        LEFT_BEHIND.add(process, "worker 0", os.pidfd_open(process.pid))
        shared.until("process-left")
        assert shared.told("process-left") == [{"process": process.pid, "what": "worker 0"}]
        assert not shared.told("process-reaped")
    finally:
        process.kill()
    shared.until("process-reaped")
    assert shared.told("process-reaped") == [{"process": process.pid, "what": "worker 0"}]
    assert process.returncode is not None


def test_of_connections_of_garbage_a_few_lines_are_told(shared: House) -> None:
    host, _, port = shared.agent.endpoint.removeprefix("tcp://").rpartition(":")
    client = shared.client("hugo")
    for _ in range(300):
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    shared.until("no-handshake")
    told = shared.told("no-handshake")
    assert told[0]["latest"] == "127.0.0.1" and len(told) <= 2 * 6
    client.send(Inspect(client.number()))
    client.take(Stock)
