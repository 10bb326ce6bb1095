"""The workers of leases, with pipes in the place of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from onebox.agent import workers as module
from onebox.agent.admission import ClientLimits, Offered, Share
from onebox.agent.lease_processes import KEPT_S, LeaseIsolation, LeaseProcesses
from onebox.agent.lease_service import LeaseService
from onebox.agent.leases import Client, Leases
from onebox.agent.reporter import Reporter
from onebox.agent.workers import (
    LEAVE_S,
    STARTS,
    ForkServerReused,
    LeaseClosed,
    LeasedWorkerExited,
    LeaseEvent,
    LeaseNotStarted,
    LeaseReady,
    Workers,
)
from onebox.errors import PoolError, UsageError, WorkerDied
from onebox.pool.errors import WorkerLocation
from onebox.pool.launch.fork_server import worker_environment
from onebox.pool.launch.worker_user import WorkerUser
from onebox.wire import new_keys
from onebox.wire.protocol.agents import AgentResponse, Done, Lease, Leased, Release, Want
from onebox.worker import START_S, Ports, WorkerConfig

SHARE = Share(device="cpu", threads=1, memory_bytes=64)


class Fake:
    """Stands in for a worker's process."""

    made: list[Fake]
    ports_found: Ports | None = None
    ended = mute = False
    killed = 0
    status: int | None = -9
    most = 3
    part = False
    """Whether it says something, but not all."""

    def __init__(
        self, place: WorkerLocation, config: WorkerConfig, account: WorkerUser | None, fork_server: FakeForkServer
    ) -> None:
        assert fork_server.ready, "nobody waits for it"
        if len(self.made) >= self.most:
            raise OSError(11, "Resource temporarily unavailable")
        self.place, self.config, self.fork_server = place, config, fork_server
        self.pid = 1000 + len(self.made)
        self.descriptor, self.outlet = os.eventfd(0), os.eventfd(0)
        self.bad = False
        self.made.append(self)

    def read_ports(self) -> Ports | None:
        if self.bad:
            raise PoolError("it said nonsense")
        if self.part:
            return None
        return Ports(f"tcp://0.0.0.0:{self.pid}", f"tcp://[::]:{self.pid + 1}")

    def death(self) -> WorkerDied:
        return WorkerDied("it died", exit_status=self.status, last_words="alas")

    def kill(self) -> None:
        self.killed += 1

    def release(self) -> None:
        self.ended = True

    def close(self, *, grace_s: float) -> None:
        self.ended = True


class FakeForkServer:
    """Stands in for the fork server of a lease."""

    ready = True
    made: list[FakeForkServer]

    pid: int | None = None
    process_descriptor = -1
    idle = False
    account = None

    def __init__(self, shares: Sequence[Share], account: WorkerUser | None, *zygotes: object) -> None:
        self.descriptor = os.eventfd(0)
        self.closed = False
        self.pid = 5_000_000 + len(self.made) if self.idle else None
        self.channel = self.descriptor
        self.retired: list[str] = []
        self.made.append(self)

    def fits(self, shares: Sequence[Share]) -> bool:
        return True

    def descriptors(self) -> list[int]:
        return [] if self.ready else [self.descriptor]

    def attend(self) -> bool:
        return self.ready

    def retire_zygote(self, why: str) -> None:
        self.retired.append(why)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fake]]:
    monkeypatch.setattr(Fake, "made", [], raising=False)
    monkeypatch.setattr(Fake, "most", 3)
    monkeypatch.setattr(module, "LeasedWorker", Fake)
    monkeypatch.setattr(FakeForkServer, "made", [], raising=False)
    monkeypatch.setattr(FakeForkServer, "ready", True)
    monkeypatch.setattr(module, "LeaseForkServer", FakeForkServer)
    yield Fake.made
    for fork_server in FakeForkServer.made:
        os.close(fork_server.descriptor)
    for fake in Fake.made:
        os.close(fake.descriptor)
        os.close(fake.outlet)


def started(count: int, **changes: Any) -> Workers:
    made = Workers(
        **{"host": "lab", "bind": "0.0.0.0", "advertise": "192.0.2.7", "isolation": LeaseIsolation(), **changes}
    )
    assert made.start(1, [SHARE] * count, "ana", new_keys().public, 1.0, 0.0) is None
    return made


def test_a_lease_is_ready_when_all_its_workers_are(fakes: list[Fake]) -> None:
    workers = started(2)
    one, two = fakes
    assert (one.config.address, one.config.quota_bytes, one.config.owner) == ("0.0.0.0", 64, os.getpid())
    assert one.config.secret not in repr(workers) and one.config.public != two.config.public
    assert set(workers.descriptors()) == {one.descriptor, one.outlet, two.descriptor, two.outlet}
    assert workers.attend({two.outlet}, 1.0) == []
    assert set(workers.descriptors()) == {one.descriptor, one.outlet, two.descriptor}
    (ready,) = workers.attend({one.outlet}, 2.0)
    assert isinstance(ready, LeaseReady)
    assert [(each.process, each.commands) for each in ready.workers] == [
        (1000, "tcp://192.0.2.7:1000"),
        (1001, "tcp://192.0.2.7:1001"),
    ]
    assert [each.key for each in ready.workers] == [one.config.public, two.config.public]
    assert workers.attend(set(), START_S + 1) == []


def test_an_address_of_ipv6_is_advertised_in_brackets(fakes: list[Fake]) -> None:
    workers = started(1, advertise="2001:db8::7")
    (ready,) = workers.attend({fakes[0].outlet}, 1.0)
    assert isinstance(ready, LeaseReady) and ready.workers[0].heartbeats == "tcp://[2001:db8::7]:1001"


def test_a_worker_that_ends_later_is_news_and_the_others_go_on(fakes: list[Fake]) -> None:
    workers = started(2)
    one, two = fakes
    workers.attend({one.outlet, two.outlet}, 1.0)
    assert workers.attend({two.descriptor}, 2.0) == [LeasedWorkerExited(1, 1, -9, "alas")]
    assert set(workers.descriptors()) == {one.descriptor}
    workers.end(1, 0.0, 3.0)
    assert (one.killed, two.killed) == (1, 0)
    assert workers.attend({one.descriptor}, 3.0) == [LeaseClosed(1)]


@pytest.mark.parametrize("when", ["starts", "works", "leaves"])
def test_after_a_crash_nothing_is_forked_from_where_the_worker_comes_from(fakes: list[Fake], when: str) -> None:
    for status in (-9, -15, 1, 0, None, -11, -6, -7, -4):
        workers = started(1)
        (worker,) = fakes
        worker.status = status
        if when != "starts":
            workers.attend({worker.outlet}, 1.0)
        if when == "leaves":
            workers.end(1, 1.0, 1.5)
        workers.attend({worker.descriptor}, 2.0)
        signals = {-11: "SIGSEGV", -6: "SIGABRT", -7: "SIGBUS", -4: "SIGILL"}
        told = [f"a worker that descends from it ended by {signals[status]}"] if status in signals else []
        assert worker.fork_server.retired == told, status
        os.close(worker.descriptor)
        os.close(worker.outlet)
        fakes.clear()


@pytest.mark.parametrize("how", ["dies", "nonsense", "late"])
def test_a_worker_that_does_not_start_is_news_once(fakes: list[Fake], how: str) -> None:
    workers = started(2)
    one, two = fakes
    one.bad = how == "nonsense"
    ready = {"dies": {one.descriptor, two.descriptor}, "nonsense": {one.outlet, two.outlet}, "late": {one.outlet}}[how]
    if how == "late":
        assert workers.attend(ready - {one.outlet}, START_S - 1) == []
    (news,) = workers.attend(ready, START_S + 1)
    assert isinstance(news, LeaseNotStarted)
    assert {"dies": "it died", "nonsense": "it said nonsense", "late": "within 90 s"}[how] in news.why
    assert workers.attend(ready, START_S + 2) == []
    workers.end(1, 0.0, START_S + 2)
    assert workers.attend({one.descriptor, two.descriptor}, START_S + 2) == [LeaseClosed(1)]


def test_a_lease_that_ends_before_it_has_workers_is_over_at_once(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeForkServer, "ready", False)
    workers = started(1)
    assert not fakes and not workers.pressed
    workers.end(1, 1.0, 2.0)
    assert workers.pressed
    assert workers.attend(set(), 2.0) == [LeaseClosed(1)]
    assert not workers.pressed


@pytest.mark.parametrize("ready", [False, True])
def test_workers_of_a_lease_given_back_may_end_by_themselves_if_they_have_started(
    fakes: list[Fake], ready: bool
) -> None:
    offer = Offered(device="cpu", name="a CPU", memory_bytes=64, threads=1)
    workers = Workers(host="lab", bind="0.0.0.0", advertise="192.0.2.7", isolation=LeaseIsolation())
    sent: list[AgentResponse] = []
    service = LeaseService(
        Leases([offer], ClientLimits()),
        workers,
        lambda client, message, now_s: sent.append(message),
        Reporter(lambda event, **fields: None),
    )
    ana = Client("a" * 40, b"1", "ana")
    service.lease(ana, Lease(1, (Want("cpu"),), new_keys().public), 0.0)
    if ready:
        service.attend({fakes[0].outlet}, 0.5)
        assert isinstance(sent[0], Leased)
    service.release(ana, Release(2, request=1), 1.0)
    assert fakes[0].killed == (not ready)
    service.attend({fakes[0].descriptor}, 1.1)
    assert sent[-1] == Done(2)


def test_what_does_not_end_by_itself_is_killed_after_a_while(fakes: list[Fake]) -> None:
    workers = started(2)
    one, two = fakes
    workers.attend({one.outlet, two.outlet}, 1.0)
    workers.end(1, 1.0, 5.0)
    assert workers.attend({one.descriptor}, 5.5) == []
    assert (one.killed, two.killed) == (0, 0)
    assert workers.attend(set(), 6.0) == []
    assert (one.killed, two.killed) == (0, 1)
    assert workers.attend({two.descriptor}, 6.1) == [LeaseClosed(1)]
    assert list(workers.descriptors()) == []


def test_when_the_host_has_no_room_for_a_process_what_was_started_ends(fakes: list[Fake]) -> None:
    workers = Workers(host="lab", bind="127.0.0.1", advertise="127.0.0.1", isolation=LeaseIsolation())
    why = workers.start(1, [SHARE] * 4, "ana", new_keys().public, 1.0, 0.0)
    assert why == "cpu on lab: no worker could be started: Resource temporarily unavailable"
    workers.end(1, 0.0, 0.0)
    assert [fake.killed for fake in fakes] == [1, 1, 1]
    assert workers.attend({fake.descriptor for fake in fakes}, 0.1) == [LeaseClosed(1)]


def test_a_worker_that_says_a_part_of_its_ports_is_waited_for_by_nobody(fakes: list[Fake]) -> None:
    workers = started(1)
    (one,) = fakes
    one.part = True
    assert workers.attend({one.outlet}, 1.0) == [] == workers.attend({one.outlet}, 2.0)
    one.part = False
    (ready,) = workers.attend({one.outlet}, 3.0)
    assert isinstance(ready, LeaseReady)


def test_many_workers_are_started_a_few_at_a_time(fakes: list[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "most", 10)
    workers = started(10)
    assert len(fakes) == STARTS and workers.pressed
    assert workers.attend({fake.outlet for fake in fakes}, 1.0) == []
    assert len(fakes) == 2 * STARTS and workers.pressed
    assert workers.attend({fake.outlet for fake in fakes}, 2.0) == []
    assert len(fakes) == 10 and not workers.pressed
    (ready,) = workers.attend({fake.outlet for fake in fakes}, 3.0)
    assert isinstance(ready, LeaseReady) and len(ready.workers) == 10
    assert [fake.place.worker for fake in fakes] == list(range(10))


def test_a_lease_that_ends_while_its_workers_are_started_starts_no_more(fakes: list[Fake]) -> None:
    Fake.most = 100
    workers = started(20)
    workers.end(1, 0.0, 1.0)
    assert not workers.pressed
    assert workers.attend({fake.descriptor for fake in fakes}, 1.0) == [LeaseClosed(1)] and len(fakes) == STARTS


def test_workers_wait_for_their_fork_server_which_ends_after_them(fakes: list[Fake]) -> None:
    FakeForkServer.ready = False
    workers = started(2)
    (fork_server,) = FakeForkServer.made
    assert not fakes and not workers.pressed
    assert list(workers.descriptors()) == [fork_server.descriptor]
    assert workers.attend(set(), 1.0) == []
    FakeForkServer.ready = True
    assert workers.pressed
    assert workers.attend({fork_server.descriptor}, 2.0) == []
    assert len(fakes) == 2 and fork_server.descriptor not in workers.descriptors()
    workers.end(1, 0.0, 3.0)
    assert not fork_server.closed
    assert workers.attend({fake.descriptor for fake in fakes}, 3.0) == [LeaseClosed(1)]
    assert fork_server.closed


def test_workers_of_two_leases_have_two_fork_servers_which_know_no_key(fakes: list[Fake]) -> None:
    workers = started(2)
    assert workers.start(2, [SHARE], "ana", new_keys().public, 1.0, 0.0) is None
    one, other = FakeForkServer.made
    assert [fake.fork_server for fake in fakes] == [one, one, other]
    given = str(worker_environment(SHARE.threads))  # all that it gets beside the shares and the user
    assert not any(key in given for fake in fakes for key in (fake.config.secret, fake.config.client))


def test_a_lease_whose_fork_server_is_never_ready_fails_in_time(fakes: list[Fake]) -> None:
    FakeForkServer.ready = False
    workers = started(2)
    assert workers.attend(set(), START_S - 1) == []
    (news,) = workers.attend(set(), START_S + 1)
    assert isinstance(news, LeaseNotStarted) and "within 90 s" in news.why
    assert not list(workers.descriptors()), "that it is ready later is no news"
    FakeForkServer.ready = True
    assert workers.attend(set(), START_S + 2) == [] and not fakes
    workers.end(1, 0.0, START_S + 3)
    assert workers.attend(set(), START_S + 3) == [LeaseClosed(1)]


@pytest.fixture
def keeping(fakes: list[Fake], monkeypatch: pytest.MonkeyPatch) -> list[FakeForkServer]:
    """Fork servers that may be kept, of workers that are confined."""
    monkeypatch.setattr(Fake, "most", 10)
    monkeypatch.setattr(FakeForkServer, "idle", True)
    monkeypatch.setattr(module, "is_confined", lambda process: True)
    monkeypatch.setattr("onebox.agent.lease_processes.SPARE_BYTES", 0)
    return FakeForkServer.made


def closed(workers: Workers, lease: int, fake: Fake, now_s: float) -> LeaseClosed:
    """End a lease of one worker that is ready, and return the news of it."""
    workers.attend({fake.outlet}, now_s)
    workers.end(lease, 0.0, now_s)
    (news,) = workers.attend({fake.descriptor}, now_s)
    assert isinstance(news, LeaseClosed)
    return news


def test_the_next_lease_of_a_client_has_its_fork_server_and_no_other_has(
    fakes: list[Fake], keeping: list[FakeForkServer]
) -> None:
    workers = started(1)
    (server,) = keeping
    assert closed(workers, 1, fakes[0], 1.0) == LeaseClosed(1, (), server.pid) and not server.closed
    assert server.descriptor in workers.descriptors(), "its end would be seen"
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, 2.0) is None
    assert workers.start(3, [SHARE], "ana", new_keys().public, 1.0, 2.0) is None
    assert [fake.fork_server for fake in fakes[1:]] == [keeping[1], server] and len(keeping) == 2
    assert workers.pressed
    assert workers.attend(set(), 2.0) == [ForkServerReused(3, server.pid)] and not workers.pressed
    assert workers.start(4, [SHARE], "ana", new_keys().public, 1.0, 2.0) is None
    assert len(keeping) == 3, "it is in use"
    workers.close()
    assert all(each.closed for each in keeping)


def test_a_kept_fork_server_ends_in_time_and_with_the_agent(fakes: list[Fake], keeping: list[FakeForkServer]) -> None:
    workers = started(1)
    closed(workers, 1, fakes[0], 1.0)
    assert workers.attend(set(), 1.0 + KEPT_S) == [] and keeping[0].closed
    assert [each.why for each in workers.ended_fork_servers()] == ["kept for 50 s"]
    workers.start(2, [SHARE], "ana", new_keys().public, 1.0, 90.0)
    closed(workers, 2, fakes[1], 91.0)
    assert not keeping[1].closed
    workers.close()
    assert keeping[1].closed


@pytest.mark.parametrize("why", ["unconfined", "failed", "crashed", "left", "removed", "busy", "immovable"])
def test_a_fork_server_is_kept_only_if_all_was_well(
    fakes: list[Fake], keeping: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "unconfined":
        monkeypatch.setattr(module, "is_confined", lambda process: False)
    if why == "busy":
        monkeypatch.setattr(FakeForkServer, "idle", False)
    if why == "immovable":
        monkeypatch.setattr(LeaseIsolation, "set_aside", lambda self, fork_server: False)
    found = iter([[77], []] if why == "left" else [[]])
    monkeypatch.setattr(LeaseProcesses, "kill", lambda self, fork_server: next(found))
    workers = started(1, **({"accepts": lambda client: False} if why == "removed" else {}))
    fakes[0].bad = why == "failed"
    fakes[0].status = -signal.SIGSEGV if why == "crashed" else 0
    workers.attend({fakes[0].outlet}, 1.0)
    workers.end(1, 0.0, 1.0)
    news = workers.attend({fakes[0].descriptor}, 1.0) or workers.attend(set(), 1.0)
    assert news == [LeaseClosed(1)] and keeping[0].closed


def test_a_kept_fork_server_gives_way_to_a_lease_that_lacks_a_user(
    fakes: list[Fake], keeping: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate = LeaseIsolation.isolate

    def few(self: LeaseIsolation, lease: int, shares: Sequence[Share], account: WorkerUser | None) -> LeaseProcesses:
        if lease > 1 and not keeping[0].closed:
            raise UsageError("all user ids of leases are taken")
        return isolate(self, lease, shares, account)

    monkeypatch.setattr(LeaseIsolation, "isolate", few)
    workers = started(1)
    closed(workers, 1, fakes[0], 1.0)
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, 2.0) is None
    assert keeping[0].closed
    keeping[0].closed = False
    assert "user ids" in str(workers.start(3, [SHARE], "bob", new_keys().public, 1.0, 2.0)), "none is kept any more"


def test_a_worker_that_gets_the_descriptor_of_a_fork_server_that_ends_is_not_taken_for_ended(
    fakes: list[Fake], keeping: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = started(1)
    closed(workers, 1, fakes[0], 1.0)
    channel = keeping[0].channel
    assert workers.start(2, [SHARE] * (STARTS + 1), "bob", new_keys().public, 1.0, 2.0) is None
    original, own = Fake.__init__, list[int]()

    def reusing(self: Fake, *arguments: Any) -> None:
        original(self, *arguments)
        own.append(self.descriptor)
        self.descriptor = channel

    monkeypatch.setattr(Fake, "__init__", reusing)
    assert workers.attend({channel}, 3.0) == [] and keeping[0].closed
    assert len(fakes) == STARTS + 2 and not any(fake.ended for fake in fakes[1:])
    (fakes[-1].descriptor,) = own


@pytest.mark.parametrize("place", [0, 1])
def test_a_lease_whose_end_fails_holds_up_no_other(
    fakes: list[Fake], keeping: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    workers = started(1)
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, 0.0) is None
    workers.attend({fake.outlet for fake in fakes}, 1.0)
    workers.end(1, 0.0, 1.0)
    workers.end(2, 0.0, 1.0)
    kill = LeaseProcesses.kill

    def failing(self: LeaseProcesses, fork_server: Any) -> list[int]:
        if fork_server is keeping[place]:
            raise OSError(24, "Too many open files")
        return kill(self, fork_server)

    def ended(news: list[LeaseEvent]) -> list[int]:
        return [each.lease for each in news if isinstance(each, LeaseClosed)]

    with monkeypatch.context() as once:
        once.setattr(LeaseProcesses, "kill", failing)
        assert ended(workers.attend({fake.descriptor for fake in fakes}, 1.0)) == [2 - place]
        with pytest.raises(OSError, match="Too many"):
            workers.attend(set(), 1.0)
    assert ended(workers.attend(set(), 1.0)) == [1 + place]


def test_a_failure_that_is_over_is_told_of_after_the_events_of_others(
    fakes: list[Fake], keeping: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = started(1)
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, 0.0) is None
    workers.attend({fake.outlet for fake in fakes}, 1.0)
    for lease in (1, 2):
        workers.end(lease, 0.0, 1.0)
    kill, failures = LeaseProcesses.kill, [OSError(24, "Too many open files")]

    def failing_once(self: LeaseProcesses, fork_server: Any) -> list[int]:
        if failures:
            raise failures.pop()
        return kill(self, fork_server)

    monkeypatch.setattr(LeaseProcesses, "kill", failing_once)
    assert len(workers.attend({fake.descriptor for fake in fakes}, 1.0)) == 1
    assert len(workers.attend(set(), 1.0)) == 1
    with pytest.raises(OSError, match="Too many"):
        workers.attend(set(), 1.0)
    assert workers.attend(set(), 1.0) == []


def test_a_lease_whose_processes_do_not_end_in_time_is_over(fakes: list[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user is given back, to be taken once no process has it."""
    account = WorkerUser(12345, 12345)
    released: list[WorkerUser] = []
    monkeypatch.setattr(LeaseIsolation, "isolate", lambda self, lease, shares, kept: LeaseProcesses(account))
    monkeypatch.setattr(LeaseIsolation, "release", lambda self, user: released.append(user))
    monkeypatch.setattr(LeaseProcesses, "kill", lambda self, fork_server: [77])
    workers = started(1)
    workers.end(1, 0.0, 1.0)
    assert workers.attend({fakes[0].descriptor}, 1.0) == [] == workers.attend(set(), 1.0)
    assert not released
    assert workers.attend(set(), 1.0 + LEAVE_S) == [LeaseClosed(1, (77,))] and released == [account]


def test_closing_ends_all(fakes: list[Fake]) -> None:
    workers = started(2)
    workers.close()
    assert all(fork_server.closed for fork_server in FakeForkServer.made)
    workers.close()
    assert all(fake.ended and fake.killed == 1 for fake in fakes)


def test_a_killed_worker_that_does_not_end_is_left_behind_and_its_lease_ends(fakes: list[Fake]) -> None:
    workers = started(2)
    one, two = fakes
    workers.end(1, 1.0, 10.0)
    assert workers.attend({one.descriptor}, 10.5) == [] and one.ended
    assert workers.attend(set(), 11.0) == [] and two.killed
    assert workers.attend(set(), 11.0 + LEAVE_S - 0.1) == [] and not two.ended
    assert workers.attend(set(), 11.0 + LEAVE_S) == [LeaseClosed(1)]
    assert two.ended and workers.attend(set(), 99.0) == []
