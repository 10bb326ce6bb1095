"""The zygotes of an agent, with stand-ins for processes, for memory and for the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from onebox.agent import lease_processes as module
from onebox.agent.lease_processes import IMPORT_S, MOST_ZYGOTES, RETRY_S, USED_S, LeaseZygotes
from onebox.forking import ForkServerEnded, SpawnFailed


class FakeZygote:
    """Stands in for a zygote's process."""

    made: list[FakeZygote]

    def __init__(self, environment: Mapping[str, str], *, users: bool, stays: bool) -> None:
        assert users and stays
        self.environment = dict(environment)
        self.pid, self.channel = 5_000_000 + len(self.made), 700 + len(self.made)
        self.importing = True
        self.ready = self.ended = self.closed = self.stopped = False
        self.refuses = ""
        self.forks = 0
        self.made.append(self)

    def wait_ready(self, timeout_s: float) -> bool:
        assert timeout_s == 0.0, "nobody waits for it"
        if self.ended or self.closed:
            raise ForkServerEnded("it has ended; its last words:\nalas")
        self.ready = not self.importing
        return self.ready

    def fork_worker(self, stderr: object, account: object, *, within_s: float) -> object:
        assert self.ready and not self.closed
        if self.ended:
            raise ForkServerEnded("it has ended")
        if self.refuses:
            raise SpawnFailed(self.refuses)
        self.forks += 1
        return self

    def last_words(self) -> str:
        return "; its last words:\nalas"

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.closed = True


class House:
    """Zygotes, and the memory that they depend on."""

    def __init__(self) -> None:
        self.enough = True
        self.zygotes = LeaseZygotes(users=True, enough_memory=lambda: self.enough)

    def prepare(self, threads: int = 1, now_s: float = 0.0) -> bool:
        return self.zygotes.prepare({"OMP_NUM_THREADS": str(threads)}, now_s)

    def fork(self, threads: int = 1) -> object:
        nothing: Any = None
        return self.zygotes.spawn_worker({"OMP_NUM_THREADS": str(threads)}, nothing, None)

    def have_ready(self, threads: int = 1, now_s: float = 0.0) -> FakeZygote:
        """Return the zygote of a number of threads, which has imported."""
        self.prepare(threads, now_s)
        FakeZygote.made[-1].importing = False
        self.zygotes.attend(set(), now_s)
        assert self.prepare(threads, now_s)
        return FakeZygote.made[-1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeZygote]]:
    monkeypatch.setattr(FakeZygote, "made", [], raising=False)
    monkeypatch.setattr(module, "ZygoteProcess", FakeZygote)
    yield FakeZygote.made


@pytest.fixture
def house(fakes: list[FakeZygote]) -> House:
    return House()


def test_each_environment_has_one_which_is_kept(house: House, fakes: list[FakeZygote]) -> None:
    assert not house.prepare() and not house.prepare() and house.fork() is None, "it imports"
    first = house.have_ready()
    house.zygotes.attend(set(), 1e6)
    assert house.prepare() and house.fork() is first and [first] == fakes
    other = house.have_ready(2)
    assert house.fork(2) is other and house.fork() is first
    assert sorted(house.zygotes.descriptors()) == [700, 701]
    house.zygotes.close()
    assert all(fake.closed for fake in fakes) and not house.zygotes.news() and not list(house.zygotes.descriptors())


def test_the_one_that_was_used_least_lately_gives_way_and_is_kept_for_its_workers(
    house: House, fakes: list[FakeZygote]
) -> None:
    for threads in range(1, MOST_ZYGOTES + 1):
        house.have_ready(threads)
    house.prepare(1)
    assert not house.prepare(MOST_ZYGOTES + 1, now_s=USED_S)
    assert [fake.stopped for fake in fakes] == [number == 1 for number in range(MOST_ZYGOTES + 1)]
    assert house.zygotes.news() == [(5_000_001, "leases have other environments")] and not house.zygotes.news()
    assert house.fork(2) is None and not fakes[1].closed
    house.zygotes.attend(set(), USED_S)
    assert not fakes[1].closed
    fakes[1].ended = True
    house.zygotes.attend(set(), USED_S)
    assert fakes[1].closed and not house.zygotes.news()


def test_none_gives_way_that_imports_or_was_used_lately(house: House, fakes: list[FakeZygote]) -> None:
    for threads in range(1, MOST_ZYGOTES + 1):
        house.prepare(threads)
    assert house.prepare(MOST_ZYGOTES + 1, now_s=USED_S) and house.fork(MOST_ZYGOTES + 1) is None, "all import"
    for fake in fakes:
        fake.importing = False
    house.zygotes.attend(set(), 0.0)
    for threads in range(1, MOST_ZYGOTES + 1):
        house.prepare(threads, now_s=float(threads))
    assert house.prepare(MOST_ZYGOTES + 1, now_s=USED_S + 0.9), "all were used lately"
    assert len(fakes) == MOST_ZYGOTES and not any(fake.stopped for fake in fakes) and not house.zygotes.news()
    assert not house.prepare(MOST_ZYGOTES + 1, now_s=USED_S + 1.0) and fakes[0].stopped


def test_without_memory_none_starts_and_those_there_are_fork_no_more(house: House, fakes: list[FakeZygote]) -> None:
    house.enough = False
    assert house.prepare() and house.fork() is None and not fakes
    house.enough = True
    house.have_ready()
    house.zygotes.attend_memory()
    assert not fakes[0].stopped
    house.enough = False
    house.zygotes.attend_memory()
    assert fakes[0].stopped and house.zygotes.news() == [(5_000_000, "memory is short")]
    house.enough = True
    assert not house.prepare() and len(fakes) == 2
    house.zygotes.close()
    assert all(fake.closed for fake in fakes)


@pytest.mark.parametrize("how", ["ends", "late", "refuses"])
def test_after_one_that_fails_there_is_none_for_a_while(house: House, fakes: list[FakeZygote], how: str) -> None:
    house.prepare()
    now_s = IMPORT_S if how == "late" else 1.0
    house.zygotes.attend(set(), now_s - 0.1)
    assert not fakes[0].closed
    if how == "refuses":
        house.have_ready()
        fakes[0].refuses = "it did not fork"
        assert house.fork() is None and not fakes[0].closed
        fakes[0].refuses = ""
        assert house.prepare(now_s=now_s) and house.fork() is None
    fakes[0].ended = how == "ends"
    house.zygotes.attend(set(), now_s)
    ((process, why),) = house.zygotes.news()
    assert process == 5_000_000 and fakes[0].closed
    assert {"ends": "alas", "late": "not ready after 30 s", "refuses": "it did not fork"}[how] in why
    assert house.prepare(now_s=now_s + RETRY_S - 0.1) and len(fakes) == 1
    assert not house.prepare(now_s=now_s + RETRY_S) and len(fakes) == 2


def test_one_that_ends_later_is_replaced_at_once(house: House, fakes: list[FakeZygote]) -> None:
    house.prepare()
    fakes[0].importing = False
    house.zygotes.attend({700}, 1.0)
    assert not house.zygotes.news(), "it has said that it is ready"
    fakes[0].ended = True
    assert house.fork() is None and house.prepare(), "it is done without"
    house.zygotes.attend({700}, 2.0)
    assert fakes[0].closed and house.zygotes.news() == [(5_000_000, "it has ended; its last words:\nalas")]
    assert not house.prepare(now_s=2.0) and len(fakes) == 2


def test_after_one_that_cannot_be_started_there_is_none_for_a_while(
    house: House, fakes: list[FakeZygote], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(module, "ZygoteProcess", refuse)
        assert house.prepare(now_s=1.0)
    assert house.zygotes.news() == [(0, "it could not be started: [Errno 24] Too many open files")]
    assert house.prepare(now_s=RETRY_S + 0.9) and not fakes
    assert not house.prepare(now_s=RETRY_S + 1.0) and len(fakes) == 1 and not house.zygotes.news()
