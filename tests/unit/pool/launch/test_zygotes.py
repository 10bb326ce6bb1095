"""The zygotes of an agent, with stand-ins for processes, for memory and for the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from onebox.forking import ForkServerEnded
from onebox.pool.launch import zygotes as module
from onebox.pool.launch.zygotes import IMPORT_S, MOST, RETRY_S, USED_S, Zygotes


class FakeZygote:
    """Stands in for a zygote's process."""

    made: list[FakeZygote]

    def __init__(self, environment: Mapping[str, str], *, users: bool) -> None:
        self.environment, self.users = environment, users
        self.pid, self.channel = 5_000_000 + len(self.made), 700 + len(self.made)
        self.ready = self.ended = self.closed = False
        self.made.append(self)

    def wait_ready(self, timeout_s: float) -> bool:
        assert timeout_s == 0.0, "nobody waits for it"
        if self.ended or self.closed:
            raise ForkServerEnded("it has ended; its last words:\nalas")
        return self.ready

    def last_words(self) -> str:
        return "; its last words:\nalas"

    def close(self) -> None:
        self.closed = True


class House:
    """Zygotes, and the memory that they depend on."""

    def __init__(self) -> None:
        self.enough = True
        self.zygotes = Zygotes(users=True, enough_memory=lambda: self.enough)

    def find(self, threads: int = 1, now_s: float = 0.0) -> object:
        return self.zygotes.find({"OMP_NUM_THREADS": str(threads)}, now_s)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeZygote]]:
    monkeypatch.setattr(FakeZygote, "made", [], raising=False)
    monkeypatch.setattr(module, "ZygoteProcess", FakeZygote)
    yield FakeZygote.made


@pytest.fixture
def house(fakes: list[FakeZygote]) -> House:
    return House()


def test_each_environment_has_one_which_is_kept(house: House, fakes: list[FakeZygote]) -> None:
    first = house.find()
    assert house.find() is first is fakes[0] and fakes[0].users
    fakes[0].ready = True
    house.zygotes.attend(set(), 1.0)
    house.zygotes.attend(set(), 1e6)
    assert house.find(2) is fakes[1] and house.find() is first
    assert list(house.zygotes.descriptors()) == [701, 700]
    house.zygotes.close()
    assert all(fake.closed for fake in fakes) and not house.zygotes.news() and not list(house.zygotes.descriptors())


def test_the_one_that_was_used_least_lately_gives_way(house: House, fakes: list[FakeZygote]) -> None:
    for threads in range(1, MOST + 1):
        house.find(threads)
        fakes[-1].ready = True
    house.zygotes.attend(set(), 0.0)
    house.find(1)
    house.find(MOST + 1, now_s=USED_S)
    assert [fake.closed for fake in fakes] == [number == 1 for number in range(MOST + 1)]
    assert house.zygotes.news() == [(5_000_001, "leases have other environments")] and not house.zygotes.news()


def test_none_gives_way_that_imports_or_was_used_lately(house: House, fakes: list[FakeZygote]) -> None:
    for threads in range(1, MOST + 1):
        house.find(threads)
    assert house.find(MOST + 1, now_s=USED_S) is None, "all import"
    for fake in fakes:
        fake.ready = True
    house.zygotes.attend(set(), 0.0)
    for threads in range(1, MOST + 1):
        house.find(threads, now_s=float(threads))
    assert house.find(MOST + 1, now_s=USED_S + 0.9) is None, "all were used lately"
    assert len(fakes) == MOST and not any(fake.closed for fake in fakes) and not house.zygotes.news()
    assert house.find(MOST + 1, now_s=USED_S + 1.0) is fakes[MOST] and fakes[0].closed


def test_without_memory_none_starts_and_those_there_are_end(house: House, fakes: list[FakeZygote]) -> None:
    house.enough = False
    assert house.find() is None and not fakes
    house.enough = True
    house.find()
    house.zygotes.attend_memory()
    assert not fakes[0].closed
    house.enough = False
    house.zygotes.attend_memory()
    assert fakes[0].closed and house.zygotes.news() == [(5_000_000, "memory is short")]
    house.enough = True
    assert house.find() is fakes[1]


@pytest.mark.parametrize("how", ["ends", "late", "dropped"])
def test_after_one_that_fails_there_is_none_for_a_while(house: House, fakes: list[FakeZygote], how: str) -> None:
    house.find()
    now_s = IMPORT_S if how == "late" else 1.0
    house.zygotes.attend(set(), now_s - 0.1)
    assert not fakes[0].closed
    if how == "dropped":
        fakes[0].ready = True
        house.zygotes.attend(set(), now_s)
        house.zygotes.drop(fakes[0], "it did not fork")  # type: ignore[arg-type]
        assert house.find(now_s=now_s) is None and not fakes[0].closed
    fakes[0].ended = how == "ends"
    house.zygotes.attend(set(), now_s)
    ((process, why),) = house.zygotes.news()
    assert process == 5_000_000 and fakes[0].closed
    assert {"ends": "alas", "late": "not ready after 30 s", "dropped": "it did not fork"}[how] in why
    assert house.find(now_s=now_s + RETRY_S - 0.1) is None
    assert house.find(now_s=now_s + RETRY_S) is fakes[1]


def test_one_that_ends_later_is_replaced_at_once(house: House, fakes: list[FakeZygote]) -> None:
    house.find()
    fakes[0].ready = True
    house.zygotes.attend({700}, 1.0)
    assert not house.zygotes.news(), "it has said that it is ready"
    house.zygotes.attend({700}, 2.0)
    assert fakes[0].closed and house.zygotes.news() == [(5_000_000, "it has ended; its last words:\nalas")]
    assert house.find(now_s=2.0) is fakes[1]


def test_after_one_that_cannot_be_started_there_is_none_for_a_while(
    house: House, fakes: list[FakeZygote], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(module, "ZygoteProcess", refuse)
        assert house.find(now_s=1.0) is None
    assert house.zygotes.news() == [(0, "it could not be started: [Errno 24] Too many open files")]
    assert house.find(now_s=RETRY_S + 0.9) is None and not fakes
    assert house.find(now_s=RETRY_S + 1.0) is fakes[0] and not house.zygotes.news()
