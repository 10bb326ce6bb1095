"""The line to an agent: what is asked and answered, and what is made of bad news and of silence."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
import zmq

from onebox.errors import PoolError, UsageError
from onebox.pool.backends.agents import agent_connection as lines
from onebox.pool.backends.agents import agent_socket as reaching
from onebox.pool.backends.agents.agent_connection import AgentConnection, Busy
from onebox.pool.backends.agents.agent_socket import own_address, reach, resolve, split
from onebox.pool.backends.agents.agent_source import AgentSource, acquire_all, connect_agent
from onebox.pool.backends.agents.remote_worker import RemoteWorker
from onebox.pool.backends.compatibility import own_versions
from onebox.pool.keys.keyring import KnownAgent, fingerprint, remember_agent
from onebox.pool.liveness import SILENCE_S
from onebox.pool.spec import AgentPart
from onebox.wire import configure, new_keys
from onebox.wire.protocol.agents import (
    AgentResponse,
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
    Renew,
    Renewed,
    Request,
    Started,
    Want,
    WorkerEnded,
)
from tests.kit.waiting import until
from tests.unit.pool.backends.agents.scripted import OFFERS, ScriptedAgent, scripted

CPU = Want("cpu", 1, 1000)
CLIENT = new_keys().public


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    with scripted() as made:
        yield made


PROBE = RemoteWorker.unreachable


@pytest.fixture(autouse=True)
def workers_that_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a scripted agent do not exist."""
    monkeypatch.setattr(RemoteWorker, "unreachable", lambda self, within_s: "")


@pytest.fixture
def line(agent: ScriptedAgent) -> Iterator[AgentConnection]:
    made = agent.line()
    yield made
    made.close()


def ends(member: RemoteWorker, within_s: float = 5.0) -> str:
    """Wait until a member's descriptor tells of its end, and return what is said of it."""
    readable, _, _ = select.select([member.descriptor], [], [], within_s)
    assert readable, "nothing was told"
    return str(member.death())


def test_a_lease_brings_members_and_is_released_with_the_line(agent: ScriptedAgent) -> None:
    line = agent.line()
    assert line.introduced.host == "h"
    assert line.inspect().offers == OFFERS
    members = line.lease([CPU, CPU], CLIENT, grace_s=9.0, wait=False)
    for number, member in enumerate(members, 4):
        member.number(number)
    assert [str(member.place) for member in members] == [
        f"worker {number} (cpu on {agent.address})" for number in (4, 5)
    ]
    assert members[0].address == "192.0.2.7"
    assert (members[0].ports().commands, members[0].ports().heartbeats, members[0].pid) == (
        "tcp://192.0.2.7:1",
        "tcp://192.0.2.7:2",
        7,
    )
    assert not select.select([member.descriptor for member in members], [], [], 0.0)[0]
    (asked,) = [request for request in agent.heard if isinstance(request, Lease)]
    assert (asked.wants, asked.key, asked.grace_s, asked.wait) == ((CPU, CPU), CLIENT, 9.0, False)
    for member in members:
        member.close(grace_s=1.0)
        member.close(grace_s=1.0)
    line.close()
    line.close()
    assert agent.kinds() == ["Introduce", "Inspect", "Lease", "Release"]
    assert agent.leases == []
    with pytest.raises(PoolError, match="is closed"):
        line.inspect()


def test_the_end_of_a_worker_is_told_of_that_worker(agent: ScriptedAgent, line: AgentConnection) -> None:
    first, second = line.lease([CPU, CPU], CLIENT)
    agent.send(WorkerEnded(first.lease, 5, 0, ""))
    agent.send(WorkerEnded(first.lease + 9, 0, 0, ""))
    agent.send(WorkerEnded(first.lease, 1, -signal.SIGKILL, "no memory\nfor this"))
    said = ends(second)
    assert f"(cpu on {agent.address}), process 7, was ended by signal 9, SIGKILL" in said
    assert "its last words:\nno memory\nfor this\n" in said
    assert (second.death().exit_status, second.death().last_words) == (-9, "no memory\nfor this")
    assert second.death().host == agent.address
    assert not select.select([first.descriptor], [], [], 0.0)[0]
    with pytest.raises(type(second.death())):
        second.ports()
    agent.send(WorkerEnded(first.lease, 0, 3, ""))
    assert "ended with exit status 3; it said nothing" in ends(first)


def test_the_end_of_a_lease_is_told_of_all_its_workers(agent: ScriptedAgent, line: AgentConnection) -> None:
    members = [*line.lease([CPU, CPU], CLIENT), *line.lease([CPU], CLIENT)]
    agent.send(LeaseEnded(members[0].lease, "its time is over"))
    for member in members[:2]:
        assert "is gone, as your lease ended: its time is over" in ends(member)
    assert not select.select([members[2].descriptor], [], [], 0.0)[0]


def test_an_agent_that_was_started_anew_knows_of_no_lease(agent: ScriptedAgent, line: AgentConnection) -> None:
    (member,) = line.lease([CPU], CLIENT)
    agent.leases.clear()
    assert "does not know of it any more" in ends(member)


def test_a_silent_agent_is_gone_and_may_come_back(
    agent: ScriptedAgent, line: AgentConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebox.pool.backends.agents.keep_alive.CUT_S", 0.8)
    (member,) = line.lease([CPU], CLIENT, grace_s=9.0, cut_s=0.8)
    agent.mute = True
    assert f"cannot be reached: the agent at {agent.address} has been silent for" in ends(member)
    assert line.gone
    agent.mute = False
    until(lambda: not line.gone)
    assert line.inspect().offers == OFFERS


def test_while_an_agent_is_lost_each_request_fails_at_once(
    agent: ScriptedAgent, line: AgentConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may count as hung before its agent counts as lost: the requests of the recovery come in between."""
    monkeypatch.setattr("onebox.pool.backends.agents.keep_alive.CUT_S", 0.8)
    first, second = line.lease([CPU], CLIENT, cut_s=0.8), line.lease([CPU], CLIENT, cut_s=0.8)
    agent.mute = True
    assert line.end(first[0]), "posted before the loss, fails with it"
    line.release(first[0].lease)
    for request in (line.inspect, lambda: line.lease([CPU], CLIENT), lambda: line.lease([CPU], CLIENT, wait=False)):
        with pytest.raises(PoolError, match="has been silent for"):
            request()
    assert line.gone
    assert agent.kinds().count("Lease") == 2, "what would not be answered is not sent"
    agent.mute = False
    until(lambda: agent.leases == [second[0].lease])  # what was released meanwhile is given back
    assert line.inspect().offers == OFFERS
    (again,) = line.lease([CPU], CLIENT)
    assert not select.select([again.descriptor], [], [], 0.0)[0]


def test_a_client_that_was_removed_is_told_so_and_stays_out(agent: ScriptedAgent, line: AgentConnection) -> None:
    (member,) = line.lease([CPU], CLIENT)
    agent.send(Refused(0, "removed", "you are no longer let in"))
    assert "you are no longer let in" in ends(member)
    agent.mute = True
    with pytest.raises(PoolError, match="no longer let in"):
        line.inspect()


def test_ports_of_a_worker_that_cannot_be_reached_are_named_and_its_lease_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RemoteWorker, "unreachable", PROBE)
    monkeypatch.setattr("onebox.pool.backends.agents.agent_source.PORTS_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        busy_port, closed_port = busy.getsockname()[1], _closed_port()

        def answer(request: Request) -> Sequence[AgentResponse] | None:
            if isinstance(request, Introduce):
                return [Introduced(request.number, own_versions(), "h", "127.0.0.1")]
            if isinstance(request, Lease):
                made.leases.append(1)
                ports = [f"tcp://127.0.0.1:{port}" for port in (busy_port, closed_port)]
                return [Leased(request.number, 1, (Started("cpu", 7, CLIENT, *ports),))]
            return None

        with scripted(answer) as made:
            source = AgentSource(AgentPart(address=made.address, devices=("cpu",)), connect=lambda _: made.line())
            source.connect()
            with pytest.raises(PoolError, match=rf"127\.0\.0\.1, port {closed_port}: Connection refused") as caught:
                source.acquire(CLIENT, wait=False)
            assert {"--advertise", "firewall", "--worker-ports"} <= {
                word.strip(":,;") for word in str(caught.value).split()
            }
            assert made.leases == []
            source.close()


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_workers_that_were_given_up_are_given_back_when_their_agent_is_back(
    agent: ScriptedAgent, line: AgentConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebox.pool.backends.agents.keep_alive.CUT_S", 0.8)
    monkeypatch.setattr("onebox.pool.backends.agents.held_leases.LOST_S", 0.1)
    (lost,) = line.lease([CPU], CLIENT, cut_s=0.8)
    agent.mute = True
    ends(lost)
    agent.mute = False
    until(lambda: not line.gone)
    (kept,) = line.lease([CPU], CLIENT)
    until(lambda: agent.leases == [kept.lease])
    assert not line.gone and not select.select([kept.descriptor], [], [], 0.0)[0]


def test_a_connection_that_is_cut_comes_back_and_what_was_asked_is_asked_again(agent: ScriptedAgent) -> None:
    line = agent.line()
    (member,) = line.lease([CPU], CLIENT, cut_s=30.0)
    _, port = split(agent.address)
    agent.close()
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(line.inspect()))
    asking.start()
    again = ScriptedAgent(port=port)
    again.leases.append(member.lease)
    try:
        asking.join(30)
        assert found
        assert again.kinds().count("Inspect") >= 1
        assert not select.select([member.descriptor], [], [], 1.0)[0], "its lease goes on"
        line.close()
        assert "Introduce" in again.kinds() and again.leases == []
    finally:
        line.close()
        again.close()


def test_an_agent_that_comes_back_in_another_version_ends_all_with_its_reason(agent: ScriptedAgent) -> None:
    line = agent.line()
    (member,) = line.lease([CPU], CLIENT, cut_s=30.0)
    _, port = split(agent.address)
    agent.close()

    def refuse(request: Request) -> Sequence[AgentResponse]:
        if isinstance(request, Introduce):
            return [Refused(request.number, "versions", "this is 9 and that is 8")]
        return [Renewed(request.number, (member.lease,))] if isinstance(request, Renew) else []

    again = ScriptedAgent(refuse, port=port)
    try:
        assert "says: this is 9 and that is 8" in ends(member, 30.0)
        with pytest.raises(PoolError, match="this is 9 and that is 8"):
            line.inspect()
    finally:
        line.close()
        again.close()


def test_places_in_a_queue_are_told(agent: ScriptedAgent, line: AgentConnection) -> None:
    def answer(request: Request) -> Sequence[AgentResponse] | None:
        if not isinstance(request, Lease):
            return None
        return [Queued(request.number, 2, "bo", "cores"), Queued(request.number, 1, "bo", ""), agent.lease(request)]

    agent.answer = answer
    told: list[tuple[int, str, str]] = []
    (member,) = line.lease(
        [CPU], CLIENT, on_queued=lambda queued: told.append((queued.place, queued.behind, queued.lacking))
    )
    assert told == [(2, "bo", "cores"), (1, "bo", "")]
    assert member.key == agent.keys.public


def test_who_stops_waiting_leaves_the_queue(agent: ScriptedAgent, line: AgentConnection) -> None:
    agent.answer = lambda request: [Queued(request.number, 1, "bo", "")] if isinstance(request, Lease) else None

    def interrupt(queued: Queued) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        line.lease([CPU], CLIENT, on_queued=interrupt)
    line.inspect()
    (asked,) = [request for request in agent.heard if isinstance(request, Lease)]
    assert [request.request for request in agent.heard if isinstance(request, Release)] == [asked.number]


def test_closing_ends_every_wait(agent: ScriptedAgent) -> None:
    line = agent.line()
    queued, errors = threading.Event(), list[PoolError]()
    agent.answer = lambda request: [Queued(request.number, 1, "bo", "")] if isinstance(request, Lease) else None

    def wait() -> None:
        with pytest.raises(PoolError) as raised:
            line.lease([CPU], CLIENT, on_queued=lambda _: queued.set())
        errors.append(raised.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert queued.wait(30)
    line.close()
    waiting.join(30)
    assert "is closed" in str(errors[0])


@pytest.mark.parametrize(
    ("kind", "error"), [("usage", UsageError), ("busy", Busy), ("failed", PoolError), ("ended", PoolError)]
)
def test_refusals(agent: ScriptedAgent, line: AgentConnection, kind: str, error: type[Exception]) -> None:
    agent.answer = lambda request: (
        [Refused(request.number, kind, "too much")] if isinstance(request, Lease) else None  # type: ignore[arg-type]
    )
    with pytest.raises(error, match=r"the agent at 127\.0\.0\.1:\d+ refuses: too much"):
        line.lease([CPU], CLIENT)
    assert line.inspect().offers == OFFERS, "the line is whole"
    assert "Release" not in agent.kinds()


def test_a_message_that_the_agent_cannot_read(agent: ScriptedAgent, line: AgentConnection) -> None:
    agent.answer = lambda request: [Refused(0, "usage", "unreadable")] if isinstance(request, Lease) else None
    with pytest.raises(UsageError, match="refuses: unreadable"):
        line.lease([CPU], CLIENT)
    assert line.inspect().offers == OFFERS, "the line is whole"


def test_an_answer_that_cannot_be_read(agent: ScriptedAgent, line: AgentConnection) -> None:
    """It fails the request that it is for, and neither others nor workers."""
    (member,) = line.lease([CPU], CLIENT)
    queued, other = threading.Event(), list[RemoteWorker]()
    grants = threading.Event()

    def answer(request: Request) -> Sequence[AgentResponse | bytes] | None:
        if isinstance(request, Inspect | Lease) and not queued.is_set():
            return [Queued(request.number, 1, "bo", "")]
        return [unreadable(request)] if isinstance(request, Inspect) or grants.is_set() else None

    agent.answer = answer
    waiting = threading.Thread(target=lambda: other.extend(line.lease([CPU], CLIENT, on_queued=lambda _: queued.set())))
    waiting.start()
    assert queued.wait(30)
    with pytest.raises(PoolError, match=r"the agent at 127\.0\.0\.1:\d+ sent .*; only the request that it answers"):
        line.inspect()
    (asked,) = [request for request in agent.heard if isinstance(request, Lease) and request.wants][1:]
    agent.send(agent.lease(asked))
    waiting.join(30)
    assert len(other) == 1, "the other request waited on"
    assert not select.select([member.descriptor], [], [], 0)[0], "the worker is there"
    grants.set()
    with pytest.raises(PoolError, match="only the request that it answers has failed"):
        line.lease([CPU], CLIENT)
    until(lambda: any(isinstance(each, Release) and each.request for each in agent.heard))  # it is withdrawn


def unreadable(request: Request) -> bytes:
    """Return a response with the number of a request and nothing else."""
    return msgspec.msgpack.encode(("leased", request.number))


def test_an_answer_to_another_question(agent: ScriptedAgent, line: AgentConnection) -> None:
    agent.answer = lambda request: [Leased(request.number, 1, ())] if isinstance(request, Inspect) else None
    with pytest.raises(PoolError, match="said Leased, not Stock"):
        line.inspect()
    agent.answer = lambda request: None
    assert len(line.lease([CPU], CLIENT)) == 1, "the line is whole"


def test_the_log(agent: ScriptedAgent, line: AgentConnection) -> None:
    agent.answer = lambda request: [LogLines(request.number, ("{}",) * 2)] if isinstance(request, ReadLog) else None
    assert line.read_log(2) == ["{}", "{}"]


def test_a_lease_that_does_not_fit_the_request(agent: ScriptedAgent, line: AgentConnection) -> None:
    agent.answer = lambda request: (
        [agent.lease(msgspec.structs.replace(request, wants=()))] if isinstance(request, Lease) else None
    )
    with pytest.raises(PoolError, match="0 workers, not 1"):
        line.lease([CPU], CLIENT)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda request: [b"junk"], "sent an agent's message that is not of this protocol: .* given up as lost"),
        (lambda request: [LogLines(request.number, ())], "said LogLines, not Introduced"),
        (lambda request: [Refused(request.number, "versions", "too old")], "refuses: too old"),
        (
            lambda request: [
                Introduced(request.number, msgspec.structs.replace(own_versions(), torch="1.0", onebox="9"), "h", "a")
            ],
            r"versions that do not match: this client runs onebox .* runs onebox 9 .* with torch 1\.0",
        ),
    ],
)
def test_agents_that_one_cannot_talk_to(
    answer: Callable[[Request], Sequence[AgentResponse | bytes]], message: str
) -> None:
    threads = threading.active_count()
    with (
        scripted(lambda request: answer(request) if isinstance(request, Introduce) else None) as agent,
        pytest.raises(PoolError, match=message),
    ):
        agent.line()
    assert threading.active_count() == threads


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CONNECT_S", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(PoolError, match=f"nobody listens at {address}: run 'onebox serve'"):
        AgentConnection(address, new_keys().public, new_keys(), "ana")


def test_an_agent_with_another_key(agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """As loud as SSH: which key was expected, what may have happened, and what to do."""
    monkeypatch.setattr(lines, "CONNECT_S", 30.0)
    expected = new_keys().public
    with pytest.raises(PoolError, match="HAS NOT THE KEY") as caught:
        AgentConnection(agent.address, expected, new_keys(), "ana")
    assert fingerprint(expected) in str(caught.value)
    assert f"onebox pair connect {agent.address}" in str(caught.value)


def test_whether_anybody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        reach(address)
    monkeypatch.setattr(reaching, "_REFUSED_S", 0.0)
    with pytest.raises(PoolError, match=f"nobody listens at {address}: run 'onebox serve'"):
        reach(address)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full, contextlib.ExitStack() as waiting:
        for _ in range(2):  # that nobody accepts: the next gets no answer, as from a host that is down
            waiting.enter_context(socket.create_connection(full.getsockname()))
        monkeypatch.setattr(reaching, "WITHIN_S", 0.3)
        with pytest.raises(PoolError, match="the host may be down, or a firewall"):
            reach(f"127.0.0.1:{full.getsockname()[1]}")


def test_a_client_that_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CONNECT_S", 10.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door = context.socket(zmq.REP)
    door.bind("inproc://zeromq.zap.01")
    keys = new_keys()
    server = context.socket(zmq.ROUTER)
    configure(server, keys, server_key=None)
    port = server.bind_to_random_port("tcp://127.0.0.1")

    def refuse() -> None:
        request = door.recv_multipart()
        door.send_multipart([b"1.0", request[1], b"400", b"refused", b"", b""])

    refusing = threading.Thread(target=refuse, daemon=True)
    refusing.start()
    address = f"127.0.0.1:{port}"
    with pytest.raises(PoolError, match=f"does not let this client in; pair with it: onebox pair connect {address}"):
        AgentConnection(address, keys.public, new_keys(), "ana")
    refusing.join(30)
    context.destroy(linger=0)


def has_ipv6() -> bool:
    """Tell whether this machine can talk to itself by IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    agent = ScriptedAgent(host="[::1]")
    try:
        line = agent.line()
        assert line.inspect().offers == OFFERS
        assert agent.address.startswith("[::1]:")
        assert own_address(agent.address) == "::1"
        line.close()
    finally:
        agent.close()


def test_a_name_with_addresses_of_both_kinds_is_the_one_that_agents_listen_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(host: str, port: int, type: int) -> list[tuple[object, ...]]:
        assert host == "lab"
        return [
            (socket.AF_INET6, type, 0, "", ("2001:db8::1", port, 0, 0)),
            (socket.AF_INET, type, 0, "", ("192.0.2.1", port)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert resolve("lab")[4] == ("192.0.2.1", 7171)


def test_addresses() -> None:
    assert split("Lab") == ("lab", 7171)
    assert split("[::1]:80") == ("[::1]", 80)
    assert resolve("127.0.0.1:9")[4] == ("127.0.0.1", 9)
    assert own_address("127.0.0.1:9") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"the host of nowhere\.invalid has no address"):
        resolve("nowhere.invalid")


# ---- several agents


def source(agent: ScriptedAgent, *devices: str) -> AgentSource:
    return AgentSource(AgentPart(address=agent.address, devices=devices), connect=lambda address: agent.line())


def test_workers_of_several_agents_have_one_numbering(agent: ScriptedAgent) -> None:
    with scripted() as other:
        sources = [source(agent, "auto"), source(other, "cpu*2")]
        try:
            acquire_all(sources, CLIENT)
            first, second = sources[0].start(0, CLIENT), sources[1].start(4, CLIENT)
            places = [(member.place.worker, member.place.host) for member, _ in (*first, *second)]
            assert places == [(n, agent.address) for n in range(4)] + [(n, other.address) for n in (4, 5)]
            assert sources[0].replace(4, CLIENT) is None
            made = sources[1].replace(5, CLIENT)
            assert made is not None and made[0].place.worker == 5
            again = [request for request in other.heard if isinstance(request, Lease)][-1]
            assert (again.wants, again.wait) == ((Want("cpu", 2),), False)
        finally:
            for each in sources:
                each.close()
        assert agent.leases == [] and other.leases == []


def test_of_several_agents_all_are_leased_or_none_is_held_while_another_is_waited_for(agent: ScriptedAgent) -> None:
    with scripted() as other:
        refusals = [True]

        def answer(request: Request) -> Sequence[AgentResponse] | None:
            if isinstance(request, Lease) and refusals:
                refusals.clear()
                return [Refused(request.number, "busy", "bo has it")]
            return None

        other.answer = answer
        sources = [source(agent, "cpu"), source(other, "cpu")]
        try:
            acquire_all(sources, CLIENT)
            assert agent.kinds() == ["Introduce", "Inspect", "Lease", "Release", "Lease"]
            leases = [request for request in (*agent.heard, *other.heard) if isinstance(request, Lease)]
            assert [lease.wait for lease in leases] == [False, True, False, True]
            assert len(agent.leases) == len(other.leases) == 1
            refusals.append(True)
            sources += [source(agent, "cpu"), source(other, "cpu")]
            with pytest.raises(Busy, match="bo has it"):
                acquire_all(sources[2:], CLIENT, wait=False)
        finally:
            for each in sources:
                each.close()


def test_who_waits_for_several_agents_waits_in_the_order_of_their_keys() -> None:
    """In whatever order they stand in a specification: else two clients could wait for each other."""
    first, second = sorted((new_keys(), new_keys()), key=lambda keys: keys.public)
    waited: list[str] = []

    def busy(name: str) -> Callable[[Request], Sequence[AgentResponse] | None]:
        def answer(request: Request) -> Sequence[AgentResponse] | None:
            if isinstance(request, Lease) and request.wait:
                waited.append(name)
            return [Refused(request.number, "busy", "bo")] if isinstance(request, Lease) and not request.wait else None

        return answer

    with scripted(busy("first"), first) as one, scripted(busy("second"), second) as other:
        for agents in ([one, other], [other, one]):
            sources = [source(each, "cpu") for each in agents]
            try:
                acquire_all(sources, CLIENT)
            finally:
                for each in sources:
                    each.close()
    assert waited == ["first", "second"] * 2


def test_ctrl_c_ends_the_wait_for_agents(agent: ScriptedAgent) -> None:
    def answer(request: Request) -> Sequence[AgentResponse] | None:
        if not isinstance(request, Lease):
            return None
        os.kill(os.getpid(), signal.SIGINT)
        return [Queued(request.number, 1, "bo", "")]

    agent.answer = answer
    waiting = source(agent, "cpu")
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        acquire_all([waiting], CLIENT)
    waiting.close()
    assert threading.active_count() == threads
    (asked,) = [request for request in agent.heard if isinstance(request, Lease)]
    end_s = time.monotonic() + 30
    while agent.kinds()[-1] != "Release" and time.monotonic() < end_s:
        time.sleep(0.02)
    assert [request.request for request in agent.heard if isinstance(request, Release)] == [asked.number]


def test_workers_are_waited_for_as_long_as_their_host_may_be_cut_off() -> None:
    part = AgentPart(address="lab", devices=("cpu",))
    assert AgentSource(part).patience_s == SILENCE_S
    assert AgentSource(part, grace_s=1.0).patience_s == SILENCE_S
    assert AgentSource(part, grace_s=30.0).patience_s > 30.0


def test_one_agent_that_refuses_ends_what_the_others_are_asked(agent: ScriptedAgent) -> None:
    """The other one would let wait for ever."""
    with scripted() as other:
        agent.answer = lambda request: [] if isinstance(request, Lease) else None
        other.answer = lambda request: (
            [Refused(request.number, "usage", "never")] if isinstance(request, Lease) else None
        )
        sources = [source(agent, "cpu"), source(other, "cpu")]
        with pytest.raises(UsageError, match="refuses: never"):
            acquire_all(sources, CLIENT)
        assert agent.leases == []


def test_a_host_that_this_client_is_not_paired_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path_factory.mktemp("keys")))
    with pytest.raises(UsageError, match=r"not paired with an agent at 'lab-1': .* 'onebox pair connect lab-1' here"):
        connect_agent("lab-1")
    remember_agent(KnownAgent("lab-2", new_keys().public, "lab-2"))
    with pytest.raises(UsageError, match=r"'lab-2:7200'; it is paired with lab-2:7171: .* 'onebox serve' there$"):
        connect_agent("lab-2:7200")


def test_signs_of_life_are_given_only_when_let_in() -> None:
    with scripted() as agent:
        agent.mute = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lines, "CONNECT_S", 0.8)
            with pytest.raises(PoolError, match="has let this client in, but does not answer"):
                agent.line()
        assert not any(isinstance(request, Renew) for request in agent.heard)


def test_no_secret_is_said_to_an_agent(agent: ScriptedAgent) -> None:
    """So that it can let nobody else into workers of other agents, and pass for nobody."""
    own, client = new_keys(), new_keys()
    line = AgentConnection(agent.address, agent.keys.public, own, "ana@desk")
    try:
        line.inspect()
        line.lease([CPU], client.public)
    finally:
        line.close()
    said = str(agent.heard)
    assert client.public in said and own.secret not in said and client.secret not in said


def test_an_agent_that_never_completes_a_message_is_cut_off() -> None:
    keys, own = new_keys(), new_keys()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as agent:
        configure(agent, keys, server_key=None)
        port = agent.bind_to_random_port("tcp://127.0.0.1")
        socket = reaching.AgentSocket(f"127.0.0.1:{port}", keys.public, own)
        try:
            socket.send(b"hello")
            assert agent.poll(60_000)
            route = agent.recv_multipart()[0]
            parts = [bytes(60_000)] * (2 * reaching.UNREAD_BYTES // 60_000)
            agent.send_multipart([route, *parts], copy=False)

            def look() -> None:
                assert socket.receive() is None
                socket.watch()
                time.sleep(0.01)

            until(lambda: socket.cuts, turn=look)
        finally:
            socket.close()
