"""Fork servers that are kept for their clients' next leases, with stand-ins for processes and for the clock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from onebox.agent import lease_processes as module
from onebox.agent.admission import Share
from onebox.agent.lease_processes import KEPT_S, MOST_KEPT, SPARE_BYTES, KeptForkServers, LeaseIsolation
from onebox.pool.launch.worker_user import RunningProcess, WorkerUser

SHARES = [Share(device="cpu", threads=1, memory_bytes=64)]
OTHERS = [Share(device="cpu", threads=2, memory_bytes=64)]


class FakeForkServer:
    """Stands in for the fork server of a lease."""

    def __init__(self, number: int, shares: Sequence[Share] = SHARES) -> None:
        self.pid: int | None = 5_000_000 + number  # more than Linux gives
        self.channel = 700 + number
        self.account = WorkerUser(60_000 + number, 60_000 + number)
        self.shares = shares
        self.idle = True
        self.closed = False

    def fits(self, shares: Sequence[Share]) -> bool:
        return shares == self.shares

    def close(self) -> None:
        self.closed, self.pid = True, None


class FakeIsolation:
    """Stands in for the users of leases."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, account: WorkerUser) -> None:
        self.released.append(account.user)


class House:
    """A set of kept fork servers, and what it depends on."""

    def __init__(self) -> None:
        self.isolation = FakeIsolation()
        self.removed: set[str] = set()
        self.available_bytes = SPARE_BYTES
        isolation: Any = self.isolation
        self.kept = KeptForkServers(isolation, lambda key: key not in self.removed, lambda: self.available_bytes)

    def keep(self, client: str, number: int, now_s: float = 0.0, **given: Any) -> FakeForkServer:
        made = FakeForkServer(number, **given)
        stand_in: Any = made
        assert self.kept.wants(client, stand_in)
        self.kept.keep(client, stand_in, now_s)
        return made

    def take(self, client: str, shares: Sequence[Share] = SHARES, now_s: float = 1.0) -> Any:
        return self.kept.take(client, shares, now_s)


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> list[RunningProcess]:
    """The processes of this machine."""
    found: list[RunningProcess] = []
    monkeypatch.setattr(module, "running_processes", lambda: iter(found))
    monkeypatch.setattr(module, "_kill", lambda process: None)
    return found


@pytest.fixture
def house() -> House:
    return House()


def test_one_is_for_its_client_alone_and_once(house: House) -> None:
    made = house.keep("ana", 1)
    assert house.take("bob") is None
    assert house.take("ana") is made and not made.closed
    assert house.take("ana") is None
    house.kept.close()
    assert not made.closed and house.isolation.released == [], "it is the lease's now"


def test_one_of_another_environment_stays(house: House) -> None:
    made = house.keep("ana", 1)
    assert house.take("ana", OTHERS) is None and not made.closed
    assert house.take("ana") is made


def test_each_ends_after_its_time_and_its_user_is_free(house: House) -> None:
    one, two = house.keep("ana", 1), house.keep("bob", 2, 1.0)
    house.kept.attend(set(), KEPT_S - 0.1)
    assert list(house.kept.descriptors()) == [one.channel, two.channel]
    house.kept.attend(set(), KEPT_S)
    assert (one.closed, two.closed) == (True, False) and house.isolation.released == [60_001]
    assert house.kept.news() == [("ana", 5_000_001, "kept for 50 s")] and house.kept.news() == []
    assert house.take("bob", now_s=KEPT_S + 1.0) is None and two.closed


def test_a_client_has_one_at_most_and_all_have_a_few(house: House) -> None:
    first = house.keep("client 0", 0)
    made = [house.keep(f"client {number}", 10 + number) for number in range(MOST_KEPT)]
    assert first.closed and not any(each.closed for each in made)
    last = house.keep("client 9", 9)
    assert [each.closed for each in made] == [True] + [False] * (MOST_KEPT - 1) and not last.closed


def test_none_is_kept_while_memory_is_short(house: House) -> None:
    made = house.keep("ana", 1)
    house.available_bytes -= 1
    house.kept.attend(set(), 5.0)
    assert made.closed and house.kept.news()[0][2] == "memory is short"
    other: Any = FakeForkServer(2)
    assert not house.kept.wants("ana", other)


def test_none_is_kept_for_a_client_that_has_been_removed(house: House) -> None:
    ana, bob = house.keep("ana", 1), house.keep("bob", 2)
    house.removed.add("ana")
    house.kept.attend(set(), 5.0)
    assert ana.closed and not bob.closed
    other: Any = FakeForkServer(3)
    assert not house.kept.wants("ana", other) and house.kept.wants("bob", other)


def test_one_that_is_not_ready_or_speaks_is_not_kept(house: House) -> None:
    busy: Any = FakeForkServer(1)
    busy.idle = False
    assert not house.kept.wants("ana", busy)
    made = house.keep("ana", 2)
    house.kept.attend({made.channel}, 1.0)
    assert made.closed
    made = house.keep("ana", 3)
    made.idle = False
    assert house.take("ana") is None and made.closed


@pytest.mark.parametrize("how", ["its user", "its child"])
def test_one_that_is_not_alone_ends(house: House, running: list[RunningProcess], how: str) -> None:
    made = house.keep("ana", 1)
    assert made.pid is not None
    running.append(RunningProcess(made.pid, 1, 60_001))
    running.append(RunningProcess(77, 1, 60_001) if how == "its user" else RunningProcess(77, made.pid, 5))
    assert house.take("ana") is None
    assert made.closed and house.isolation.released == [60_001]


def test_without_a_descriptor_left_none_is_given_and_nothing_fails(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> Any:
        raise OSError(24, "Too many open files")

    made, other = house.keep("ana", 1), house.keep("bob", 2)
    with monkeypatch.context() as without:
        without.setattr(module, "running_processes", exhausted)
        without.setattr(module.psutil, "virtual_memory", exhausted)
        assert module._available_bytes() == 0
        assert house.take("ana") is None and made.closed
        assert house.kept.give_way("needed") and other.closed
        house.kept.attend(set(), 1.0)
    assert house.isolation.released == [60_001, 60_002]


def test_the_oldest_gives_way(house: House) -> None:
    one, two = house.keep("ana", 1), house.keep("bob", 2)
    assert house.kept.give_way("needed") and one.closed and not two.closed
    assert house.kept.give_way("needed") and two.closed
    assert not house.kept.give_way("needed")
    assert house.isolation.released == [60_001, 60_002]
    assert [why for _, _, why in house.kept.news()] == ["needed", "needed"]


def test_all_end_with_the_agent(house: House) -> None:
    made = [house.keep("ana", 1), house.keep("bob", 2)]
    house.kept.close()
    house.kept.close()
    assert all(each.closed for each in made) and house.isolation.released == [60_001, 60_002]


@pytest.mark.parametrize(
    ("status", "confined"),
    [
        ({"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "3"}, True),
        ({"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "1"}, False),  # that of the agent itself
        ({"NoNewPrivs": "0", "Seccomp": "2", "Seccomp_filters": "3"}, False),
        ({"NoNewPrivs": "1", "Seccomp": "0", "Seccomp_filters": "3"}, False),
        ({}, False),
    ],
)
def test_a_process_is_confined_by_a_filter_of_its_own(
    monkeypatch: pytest.MonkeyPatch, status: dict[str, str], confined: bool
) -> None:
    agent = {"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "1"}
    monkeypatch.setattr(module, "_status", lambda process: status if process == 7 else agent)
    assert module.is_confined(7) == confined


def test_this_process_has_no_filter_that_it_has_not() -> None:
    assert not module.is_confined(os.getpid())
    assert not module.is_confined(5_000_000), "there is none"


class FailingCgroups:
    """Stands in for cgroups that cannot be made."""

    def make(self, lease: int, shares: Sequence[Share]) -> Any:
        raise OSError(28, "No space left on device")


class RecordedUsers:
    """Stands in for users of leases."""

    def __init__(self) -> None:
        self.returned: list[int] = []

    def take(self) -> WorkerUser:
        return WorkerUser(60_009, 60_009)

    def give_back(self, account: WorkerUser) -> None:
        self.returned.append(account.user)


def test_the_user_of_a_kept_fork_server_is_not_given_back_while_that_runs() -> None:
    users: Any = RecordedUsers()
    cgroups: Any = FailingCgroups()
    isolation = LeaseIsolation(users, cgroups)
    with pytest.raises(OSError, match="No space"):
        isolation.isolate(1, SHARES, WorkerUser(60_001, 60_001))
    assert users.returned == []
    with pytest.raises(OSError, match="No space"):
        isolation.isolate(1, SHARES)
    assert users.returned == [60_009]
