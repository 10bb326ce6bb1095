"""The workers of leases, with pipes in the place of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import pytest

from onebox.agent import workers as module
from onebox.agent.admission import ClientLimits, Offered, Share
from onebox.agent.lease_processes import LeaseIsolation, LeaseProcesses
from onebox.agent.lease_service import LeaseService
from onebox.agent.leases import Client, Leases
from onebox.agent.reporter import Reporter
from onebox.agent.workers import (
    LEAVE_S,
    STARTS,
    ClientImportsAlone,
    LeaseClosed,
    LeasedWorkerExited,
    LeaseEvent,
    LeaseNotStarted,
    LeaseReady,
    Workers,
)
from onebox.errors import PoolError, WorkerDied
from onebox.pool.errors import WorkerLocation
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
        self, place: WorkerLocation, config: WorkerConfig, processes: LeaseProcesses, zygotes: FakeZygotes | None
    ) -> None:
        assert zygotes is None or zygotes.ready, "nobody waits for it"
        if len(self.made) >= self.most:
            raise OSError(11, "Resource temporarily unavailable")
        self.place, self.config, self.forked = place, config, zygotes is not None
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


class FakeZygotes:
    """Stands in for the zygotes of an agent: of one environment, which is always the same."""

    def __init__(self) -> None:
        self.ready = True
        self.channel = os.eventfd(0)
        self.prepared: list[str] = []
        self.closed = False

    def prepare(self, environment: Mapping[str, str], now_s: float) -> bool:
        self.prepared.append(str(environment))
        return self.ready

    def descriptors(self) -> list[int]:
        return [self.channel]

    def attend(self, ready: Set[int], now_s: float) -> None:
        pass

    def attend_memory(self) -> None:
        pass

    def news(self) -> list[tuple[int, str]]:
        return []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fake]]:
    monkeypatch.setattr(Fake, "made", [], raising=False)
    monkeypatch.setattr(Fake, "most", 3)
    monkeypatch.setattr(module, "LeasedWorker", Fake)
    monkeypatch.setattr(LeaseIsolation, "zygotes", lambda self: None)
    yield Fake.made
    for fake in Fake.made:
        os.close(fake.descriptor)
        os.close(fake.outlet)


@pytest.fixture
def zygotes(fakes: list[Fake], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeZygotes]:
    """What forks the workers of agents."""
    made = FakeZygotes()
    monkeypatch.setattr(LeaseIsolation, "zygotes", lambda self: made)
    yield made
    os.close(made.channel)


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
@pytest.mark.usefixtures("zygotes")
def test_the_client_of_a_worker_that_crashed_imports_alone_and_no_other(fakes: list[Fake], when: str) -> None:
    for status in (-9, -15, 1, 0, None, -11, -6, -7, -4):
        workers = started(1)
        (worker,) = fakes
        worker.status = status
        if when != "starts":
            worker.ports_found = Ports("", "")
            workers.attend({worker.outlet}, 1.0)
        if when == "leaves":
            workers.end(1, 1.0, 1.5)
        news = workers.attend({worker.descriptor}, 2.0)
        signals = {-11: "SIGSEGV", -6: "SIGABRT", -7: "SIGBUS", -4: "SIGILL"}
        why = f"a worker ended by {signals[status]}" if status in signals else ""
        why = why or ("a forked worker ended as it started" if when == "starts" and status == 1 else "")
        assert [each.why for each in news if isinstance(each, ClientImportsAlone)] == ([why] if why else []), status
        assert workers.start(2, [SHARE], "ana", new_keys().public, 1.0, 3.0) is None
        assert workers.start(3, [SHARE], "bob", new_keys().public, 1.0, 3.0) is None
        assert [each.forked for each in fakes[1:]] == [not why, True]
        for each in fakes:
            os.close(each.descriptor)
            os.close(each.outlet)
        fakes.clear()


def test_an_agent_without_zygotes_says_nothing_of_them(fakes: list[Fake]) -> None:
    workers = started(1)
    fakes[0].status = -signal.SIGSEGV
    (news,) = workers.attend({fakes[0].descriptor}, 1.0)
    assert isinstance(news, LeaseNotStarted) and not fakes[0].forked and not workers.ended_zygotes()


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


def test_a_lease_that_ends_before_it_has_workers_is_over_at_once(fakes: list[Fake], zygotes: FakeZygotes) -> None:
    zygotes.ready = False
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


def test_workers_wait_for_their_zygote_which_knows_no_key(fakes: list[Fake], zygotes: FakeZygotes) -> None:
    zygotes.ready = False
    workers = started(2)
    assert not fakes and not workers.pressed
    assert list(workers.descriptors()) == [zygotes.channel]
    assert workers.attend(set(), 1.0) == [] and not fakes
    zygotes.ready = True
    assert workers.attend({zygotes.channel}, 2.0) == []
    assert [fake.forked for fake in fakes] == [True, True]
    assert not any(key in str(zygotes.prepared) for fake in fakes for key in (fake.config.secret, fake.config.client))
    workers.close()
    assert zygotes.closed


def test_a_lease_whose_zygote_is_never_ready_fails_in_time(fakes: list[Fake], zygotes: FakeZygotes) -> None:
    zygotes.ready = False
    workers = started(2)
    assert workers.attend(set(), START_S - 1) == []
    (news,) = workers.attend(set(), START_S + 1)
    assert isinstance(news, LeaseNotStarted) and "within 90 s" in news.why
    zygotes.ready = True
    assert workers.attend(set(), START_S + 2) == [] and not fakes
    workers.end(1, 0.0, START_S + 3)
    assert workers.attend(set(), START_S + 3) == [LeaseClosed(1)]


def test_a_worker_that_gets_the_descriptor_of_what_ends_is_not_taken_for_ended(
    fakes: list[Fake], zygotes: FakeZygotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "most", 10)
    workers = started(STARTS + 1)
    original, own = Fake.__init__, list[int]()

    def reusing(self: Fake, *arguments: Any) -> None:
        original(self, *arguments)
        own.append(self.descriptor)
        self.descriptor = zygotes.channel

    monkeypatch.setattr(Fake, "__init__", reusing)
    assert workers.attend({zygotes.channel}, 3.0) == []
    assert len(fakes) == STARTS + 1 and not any(fake.ended for fake in fakes)
    (fakes[-1].descriptor,) = own


@pytest.mark.parametrize("place", [0, 1])
def test_a_lease_whose_end_fails_holds_up_no_other(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    users = [WorkerUser(60_000, 60_000), WorkerUser(60_001, 60_001)]
    monkeypatch.setattr(LeaseIsolation, "isolate", lambda self, lease, shares: LeaseProcesses(users[lease - 1]))
    workers = started(1)
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, 0.0) is None
    workers.attend({fake.outlet for fake in fakes}, 1.0)
    workers.end(1, 0.0, 1.0)
    workers.end(2, 0.0, 1.0)

    def failing(self: LeaseProcesses) -> list[int]:
        if self.account is users[place]:
            raise OSError(24, "Too many open files")
        return []

    def ended(news: list[LeaseEvent]) -> list[int]:
        return [each.lease for each in news if isinstance(each, LeaseClosed)]

    with monkeypatch.context() as once:
        once.setattr(LeaseProcesses, "kill", failing)
        assert ended(workers.attend({fake.descriptor for fake in fakes}, 1.0)) == [2 - place]
        with pytest.raises(OSError, match="Too many"):
            workers.attend(set(), 1.0)
    monkeypatch.setattr(LeaseProcesses, "kill", lambda self: [])
    assert ended(workers.attend(set(), 1.0)) == [1 + place]


def test_a_failure_that_is_over_is_told_of_after_the_events_of_others(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = started(1)
    assert workers.start(2, [SHARE], "bob", new_keys().public, 1.0, 0.0) is None
    workers.attend({fake.outlet for fake in fakes}, 1.0)
    for lease in (1, 2):
        workers.end(lease, 0.0, 1.0)
    failures = [OSError(24, "Too many open files")]

    def failing_once(self: LeaseProcesses) -> list[int]:
        if failures:
            raise failures.pop()
        return []

    monkeypatch.setattr(LeaseProcesses, "kill", failing_once)
    assert len(workers.attend({fake.descriptor for fake in fakes}, 1.0)) == 1
    assert len(workers.attend(set(), 1.0)) == 1
    with pytest.raises(OSError, match="Too many"):
        workers.attend(set(), 1.0)
    assert workers.attend(set(), 1.0) == []


def test_a_lease_whose_processes_do_not_end_is_closed_in_time_and_they_are_told(
    fakes: list[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    account = WorkerUser(12345, 12345)
    released: list[WorkerUser] = []
    monkeypatch.setattr(LeaseIsolation, "isolate", lambda self, lease, shares: LeaseProcesses(account))
    monkeypatch.setattr(LeaseIsolation, "release", lambda self, user: released.append(user))
    monkeypatch.setattr(LeaseProcesses, "kill", lambda self: [77])
    workers = started(1)
    workers.end(1, 0.0, 1.0)
    assert workers.attend({fakes[0].descriptor}, 1.0) == [] == workers.attend(set(), 1.0) and not released
    assert workers.attend(set(), 1.0 + LEAVE_S) == [LeaseClosed(1, (77,))]
    assert released == [account], "a user that a process has is given to nobody: see LeaseUsers.take"


class FailingCgroups:
    """Stands in for cgroups that cannot be made."""

    def make(self, lease: int, shares: Sequence[Share]) -> Any:
        raise OSError(28, "No space left on device")


class RecordedUsers:
    """Stands in for users of leases."""

    ids = "60009-60009"

    def __init__(self) -> None:
        self.free = [WorkerUser(60_009, 60_009)]

    def take(self) -> WorkerUser | None:
        return self.free.pop() if self.free else None

    def give_back(self, account: WorkerUser) -> None:
        self.free.append(account)


def test_a_lease_that_cannot_be_kept_apart_is_refused_and_keeps_no_user() -> None:
    users: Any = RecordedUsers()
    cgroups: Any = FailingCgroups()
    workers = Workers(host="lab", bind="0.0.0.0", advertise="192.0.2.7", isolation=LeaseIsolation(users, cgroups))
    why = workers.start(1, [SHARE], "ana", new_keys().public, 1.0, 0.0)
    assert "lab: this lease cannot be kept apart from others" in str(why) and "No space" in str(why)
    assert len(users.free) == 1
    users.free.clear()
    assert "user ids of leases are taken: 60009-60009" in str(
        workers.start(1, [SHARE], "ana", new_keys().public, 1.0, 0.0)
    )


def test_closing_ends_all(fakes: list[Fake]) -> None:
    workers = started(2)
    workers.close()
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
