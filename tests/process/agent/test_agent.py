"""An agent with real sockets and real workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onebox.agent import ClientLimits, Offered
from onebox.agent.session_channel import REMOVED
from onebox.agent.sessions import CUT_S
from onebox.errors import UsageError
from onebox.pool.backends.agents.agent_source import connect_agent
from onebox.pool.backends.compatibility import own_versions
from onebox.pool.keys.keyring import KnownAgent, identity, remember_agent
from onebox.wire import new_keys
from onebox.wire.protocol.agents import (
    Done,
    Inspect,
    Introduce,
    Introduced,
    Lease,
    Leased,
    LeaseEnded,
    LogLines,
    Queued,
    ReadLog,
    Refused,
    Release,
    Stock,
    Want,
    WorkerEnded,
    encode_agent,
)
from tests.kit.waiting import until
from tests.process.agent.raw import House, Raw, gone, greeted, house

HALF = Want("cpu", 1, 1 << 20)
ALL = Want("cpu", 2, 1 << 20)


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    """An agent that every test leaves with nothing leased."""
    with house() as made:
        yield made


def release(client: Raw, lease: int) -> None:
    client.send(Release(client.number(), lease))
    client.take(Done)


@pytest.mark.feature("Agents: Lease devices as long as the client lives")
def test_a_lease_brings_workers_that_let_its_client_in_and_nobody_else(shared: House) -> None:
    client = shared.client("ana")
    leased = client.lease(HALF, HALF)
    first, second = leased.workers
    assert first.process != second.process and first.key != second.key
    assert greeted(first.commands, first.key, client.keys, 30)
    assert greeted(first.heartbeats, first.key, client.keys, 30)
    assert not greeted(second.heartbeats, second.key, new_keys(), 1)

    client.send(Inspect(client.number()))
    (offer,) = client.take(Stock).offers
    assert [holder.client for holder in offer.holders] == ["ana", "ana"]
    assert offer.free_bytes == offer.memory_bytes - 2 * (1 << 20)

    os.kill(second.process, signal.SIGKILL)
    ended = client.take(WorkerEnded)
    assert (ended.lease, ended.worker, ended.exit_status) == (leased.lease, 1, -signal.SIGKILL)
    release(client, leased.lease)
    assert gone([first.process])
    client.send(Release(client.number(), leased.lease))
    assert client.take(Refused).kind == "ended"
    assert shared.told("worker-ended")[-1]["exit_status"] == -9


@pytest.mark.feature("Agents: Offer emulated devices")
def test_emulated_devices_are_leased_by_their_numbers() -> None:
    offers = [Offered(device=f"sim:{number}", name="emulated", memory_bytes=1 << 30, threads=1) for number in range(3)]
    with house(*offers) as made:
        client = made.client("ana")
        leased = client.lease(Want("sim:1"), Want("sim"))
        assert [worker.device for worker in leased.workers] == ["sim:1", "sim:0"]
        assert all(greeted(worker.commands, worker.key, client.keys, 30) for worker in leased.workers)
        client.ask(Want("sim"), Want("sim"), wait=False)
        assert client.take(Refused).kind == "busy"
        release(client, leased.lease)


def test_one_worker_of_a_lease_can_be_given_back_even_if_it_hangs(shared: House) -> None:
    client, other = shared.client("ana"), shared.client("ben")
    leased = client.lease(HALF, HALF)
    first, second = leased.workers
    other.ask(HALF)
    assert other.take(Queued).place == 1
    os.kill(first.process, signal.SIGSTOP)
    client.send(Release(client.number(), leased.lease, worker=0))
    client.take(Done)
    assert gone([first.process], within_s=0.0)
    theirs = other.take(Leased)
    for worker in (0, 2, -1):  # it has gone; there is none such
        client.send(Release(client.number(), leased.lease, worker=worker))
        client.take(Done)
    other.send(Release(other.number(), leased.lease, worker=1))
    assert other.take(Refused).kind == "ended"
    assert greeted(second.commands, second.key, client.keys, 30)
    release(other, theirs.lease)
    release(client, leased.lease)


def test_of_two_clients_one_gets_a_device_and_the_other_waits_at_a_visible_place(shared: House) -> None:
    first, second, third = (shared.client(name) for name in ("ana", "ben", "cleo"))
    leased = first.lease(ALL)
    second.ask(ALL)
    assert second.take(Queued) == Queued(second.numbers, 1, "ana", "cores (0 of 2 free, 2 asked for)")
    third.ask(HALF)
    assert third.take(Queued) == Queued(third.numbers, 2, "ana, ben", "cores (0 of 2 free, 1 asked for)")
    third.ask(HALF, wait=False)
    assert third.take(Refused).kind == "busy"
    second.send(Release(second.number(), request=second.numbers - 1))
    second.take(Done)
    assert third.take(Queued).place == 1
    release(first, leased.lease)
    mine = third.take(Leased)
    assert gone([leased.workers[0].process], within_s=0.0)  # nothing is leased twice, not even for a moment
    release(third, mine.lease)


@pytest.mark.feature("Agents: Lease devices as long as the client lives")
def test_the_workers_of_a_silent_client_end_and_those_of_its_other_connection_do_not(shared: House) -> None:
    silent = shared.client("ana")
    alive = shared.client("ana", silent.keys)
    lost = silent.lease(HALF, grace_s=2.0)
    kept = alive.lease(HALF, grace_s=30.0)  # longer than any pause of this machine
    until(lambda: shared.told("expired"))
    assert gone([lost.workers[0].process])
    assert alive.renewed() == (kept.lease,)
    release(alive, kept.lease)


def test_a_worker_that_does_not_start_fails_the_lease_and_frees_what_it_had() -> None:
    missing = Offered(device="cuda:99", name="no such GPU", memory_bytes=1 << 30, threads=1)
    with house(missing) as made:
        client = made.client("ana")
        number = client.ask(Want("cuda"))
        refused = client.take(Refused)
        assert (refused.number, refused.kind) == (number, "failed")
        made.until("freed")
        client.send(Inspect(client.number()))
        (offer,) = client.take(Stock).offers
        assert offer.holders == ()


@contextlib.contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], Raw]]:
    """Run an agent in a process of its own, with one client."""
    keys, agent_keys = new_keys(), new_keys()
    script = Path(__file__).with_name("serving.py")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{agent_keys.public}\n{agent_keys.secret}\n{keys.public}\n")
            process.stdin.flush()
            client = Raw(process.stdout.readline().strip(), agent_keys.public, keys)
            client.introduce()
            yield process, client
            client.close()
        finally:
            process.kill()


def test_an_agent_that_is_told_to_end_ends_its_workers() -> None:
    with serving() as (process, client):
        leased = client.lease(HALF)
        process.send_signal(signal.SIGTERM)
        assert client.take(LeaseEnded).lease == leased.lease
        assert process.wait(20) == 0
        assert gone([leased.workers[0].process])


def test_an_agent_that_was_stopped_for_a_while_takes_nobody_for_silent() -> None:
    with serving() as (process, client):
        leased = client.lease(HALF, grace_s=2.0)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        client.heard.clear()
        assert client.renewed() == (leased.lease,)


@pytest.mark.feature("Agents: Limit what a client may have")
def test_limits_hold_for_all_connections_of_a_client() -> None:
    with house(limits=ClientLimits(devices=1, lease_s=3.0)) as made:
        first = made.client("ana")
        second = made.client("ana", first.keys)
        first.ask(HALF)
        made.until("leased")
        second.ask(HALF)
        assert "2 devices; allowed are 1" in second.take(Refused).reason
        assert "time is over" in first.take(LeaseEnded).why


@pytest.mark.feature("Security: Keep strangers out of workers and agents")
def test_whom_the_agent_does_not_know_gets_nothing(shared: House) -> None:
    stranger = shared.raw(None)
    stranger.send(Introduce(1, own_versions(), "ana"))
    shared.until("handshake-refused")
    assert not stranger.socket.poll(500)
    assert shared.told("handshake-refused")[0]["address"] == "127.0.0.1"
    stranger.close()


@pytest.mark.feature("Agents: Remove a client")
def test_who_is_no_longer_known_loses_what_it_has() -> None:
    with house() as made:
        client = made.client("ana")
        client.ask(HALF, grace_s=2.0)
        made.until("leased")
        del made.known[client.keys.public]
        client.heard.clear()
        client.send(Inspect(client.number()))
        assert client.take(Refused) == Refused(0, "removed", REMOVED)
        made.until("expired")
        made.until("freed")
        assert not any(isinstance(message, Stock) for message in client.heard)


def test_a_paired_client_is_not_reported_as_a_stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path))
    with house() as here:
        here.known[identity("client").public] = "ida"
        address = here.agent.endpoint.removeprefix("tcp://")
        remember_agent(KnownAgent(address, here.keys.public, "host"))
        for _ in range(2):
            with contextlib.closing(connect_agent(address)) as connection:
                connection.inspect()
    assert len(here.told("connected")) == 2
    assert not here.told("no-handshake")


def test_the_refusal_of_a_message_that_is_not_of_the_protocol_has_its_number() -> None:
    """So that a client does not give up its other requests, as a place in the queue."""
    with house() as made:
        client = made.client("ana")
        wrong: list[tuple[list[Any], int]] = [(["lease", 77, "cuda"], 77), (["lease", 78, [[[]]] * 9, 1], 78)]
        for beginning, number in (*wrong, (["lease"], 0), ([3, 4], 0)):
            client.send(msgspec.msgpack.encode(beginning))
            refused = client.take(Refused)
            assert (refused.number, refused.kind) == (number, "usage")
            assert "not of this protocol" in refused.reason


def test_other_versions_are_refused_and_both_named(shared: House) -> None:
    old = shared.raw("ben")
    old.send(Inspect(1))
    assert old.take(Refused) == Refused(1, "versions", "introduce yourself first: say your versions")
    mine = own_versions()
    old.send(Introduce(2, msgspec.structs.replace(mine, torch="1.0.0"), "ben"))
    refused = old.take(Refused)
    assert (refused.number, refused.kind) == (2, "versions")
    assert "torch 1.0.0" in refused.reason and f"torch {mine.torch}" in refused.reason
    old.send(Lease(3, (HALF,), old.keys.public))
    assert old.take(Refused).kind == "versions"
    old.send(Introduce(4, msgspec.structs.replace(mine, torch=mine.torch.split("+")[0] + "+other"), "ben"))
    assert old.take(Introduced).number == 4


def test_what_is_no_request_is_refused_and_the_agent_goes_on(shared: House) -> None:
    client = shared.client("ana")
    for frame, number in ((b"", 0), (b"\x93\x01", 0), (bytes(1000), 0), (encode_agent(Done(1)), 1)):
        client.send(frame)
        assert client.take(Refused).number == number
    client.socket.send_multipart([b"one", b"two"])  # no answer: it is not even a message
    for bad, why in (
        ({"key": '"' * 40}, "key"),
        ({"key": "~" * 40}, "key"),
        ({"key": ""}, "key"),
        ({"speed": 0.0}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"grace_s": 1e9}, "grace"),
        ({"wants": ()}, "0 devices"),
        ({"wants": (Want("cuda"),)}, "cuda is not offered; offered is cpu"),
    ):
        number = client.number()
        client.send(msgspec.structs.replace(Lease(number, (HALF,), client.keys.public), **bad))
        refused = client.take(Refused)
        assert (refused.number, refused.kind) == (number, "usage") and why in refused.reason
    assert client.introduce()


def test_a_cut_connection_keeps_its_lease_and_hears_what_it_missed(shared: House) -> None:
    client = shared.client("ana")
    leased = client.lease(HALF, grace_s=30.0)
    client.disconnect()
    os.kill(leased.workers[0].process, signal.SIGKILL)
    shared.until("worker-ended", len(shared.told("worker-ended")) + 1)
    time.sleep(CUT_S)
    client.connect()
    assert client.take(WorkerEnded).lease == leased.lease
    assert client.renewed() == (leased.lease,)
    release(client, leased.lease)


def test_who_waits_in_silence_loses_its_place_and_is_told_when_it_is_back(shared: House) -> None:
    first, second = shared.client("ana"), shared.client("ben")
    leased = len(shared.told("leased"))
    first.ask(ALL)
    shared.until("leased", leased + 1)
    number = second.ask(ALL, grace_s=2.0)
    second.take(Queued, renew=False)
    second.disconnect()
    shared.until("dropped")
    second.connect()
    refused = second.take(Refused)
    assert (refused.number, refused.kind) == (number, "ended")
    first.send(Release(first.number(), request=first.numbers - 1))  # its workers are starting still, or have just
    first.take(Done)
    assert shared.agent.stock().offers[0].holders == ()


@pytest.mark.feature("Agents: Listen at an address of IPv6")
def test_an_agent_listens_at_an_address_of_ipv6() -> None:
    try:
        made = House(bind="::1")
    except UsageError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    try:
        assert made.client("ana").introduce().address == "::1"
    finally:
        made.close()


def test_renewals_are_answered_while_workers_start(shared: House) -> None:
    client, other = shared.client("ana"), shared.client("ben")
    leased, started = len(shared.told("leased")), len(shared.told("worker-started"))
    client.ask(HALF)
    shared.until("leased", leased + 1)
    other.renewed()
    assert len(shared.told("worker-started")) == started  # it is still importing torch
    release(client, client.take(Leased).lease)


def test_workers_end_with_an_agent_that_is_killed() -> None:
    with serving() as (process, client):
        leased = client.lease(HALF)
        process.kill()
        assert gone([leased.workers[0].process])


def test_the_log_can_be_read_by_clients(shared: House) -> None:
    client = shared.client("ana")
    client.send(ReadLog(client.number(), 3))
    assert client.take(LogLines).lines == ('{"line": 0}', '{"line": 1}', '{"line": 2}')


@pytest.mark.feature("Agents: Take the ports of workers from a range")
def test_workers_bind_the_ports_that_they_are_given_and_no_others() -> None:
    with house(worker_ports=range(23417, 23419)) as made:  # below those that systems choose by themselves
        client = made.client("ana")
        (worker,) = client.lease(HALF, grace_s=60.0).workers
        ports = {int(endpoint.rpartition(":")[2]) for endpoint in (worker.commands, worker.heartbeats)}
        assert ports == {23417, 23418} and greeted(worker.heartbeats, worker.key, client.keys, 30)
        client.ask(HALF)
        assert "no port from 23417 to 23418 is free" in client.take(Refused).reason
