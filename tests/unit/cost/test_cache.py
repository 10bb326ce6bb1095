"""The cache on disk: what is kept comes back, and nothing that is damaged, foreign or somebody else's does."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from onebox.cost import cache, key_of, load, store


class Thing(Struct, frozen=True, forbid_unknown_fields=True):
    """Something to keep."""

    name: str
    values: dict[int, float]


THING = Thing("a", {0: 1.5, 3: 2e-6})
KEY = key_of("thing", 1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def path_of(key: str) -> Path:
    return cache.cache_folder() / f"{key}.json"


def test_what_is_stored_comes_back() -> None:
    assert load(KEY, Thing) is None
    assert store(KEY, THING)
    assert load(KEY, Thing) == THING
    assert store(KEY, Thing("b", {}))
    assert load(KEY, Thing) == Thing("b", {})
    assert load(key_of("thing", 2), Thing) is None


def test_it_is_for_this_user_only(home: Path) -> None:
    store(KEY, THING)
    folder = home / "onebox" / "profiles"
    assert cache.cache_folder() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(KEY).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.json"]


def test_an_open_folder_is_closed_before_it_is_trusted() -> None:
    store(KEY, THING)
    cache.cache_folder().chmod(0o777)
    assert load(KEY, Thing) == THING
    assert stat.S_IMODE(cache.cache_folder().stat().st_mode) == 0o700


def test_a_folder_that_is_a_link_is_not_used(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (home / "onebox").mkdir(parents=True)
    (home / "onebox" / "profiles").symlink_to(elsewhere)
    assert not store(KEY, THING)
    assert load(KEY, Thing) is None
    assert not list(elsewhere.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_not_used(home: Path) -> None:
    store(KEY, THING)
    os.chown(cache.cache_folder(), 12345, 12345)
    assert load(KEY, Thing) is None
    assert not store(KEY, THING)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b'{"format": 1}',
        b"[" * 100_000,
        msgspec.json.encode({"format": 1, "key": KEY, "value": {"name": "a"}}),
        msgspec.json.encode({"format": 1, "key": KEY, "value": {"name": "a", "values": {}, "more": 1}}),
        msgspec.json.encode({"format": 1, "key": KEY, "value": {"name": 1, "values": {}}}),
        msgspec.json.encode({"format": 1, "key": key_of("other"), "value": {"name": "a", "values": {}}}),
        msgspec.json.encode({"format": 2, "key": KEY, "value": {"name": "a", "values": {}}}),
        msgspec.json.encode({"format": 1, "key": KEY, "value": {"name": "a", "values": {}}, "more": 1}),
    ],
    ids=lambda content: repr(content[:50]),
)
def test_what_is_damaged_or_foreign_is_not_there_and_is_replaced(content: bytes) -> None:
    store(KEY, THING)
    path_of(KEY).write_bytes(content)
    assert load(KEY, Thing) is None
    assert store(KEY, THING)
    assert load(KEY, Thing) == THING


@given(place=st.integers(min_value=0), length=st.integers(min_value=0, max_value=20), inserted=st.binary(max_size=20))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_gives_nothing_or_something_of_the_type(place: int, length: int, inserted: bytes) -> None:
    store(KEY, THING)
    whole = path_of(KEY).read_bytes()
    place %= len(whole)
    path_of(KEY).write_bytes(whole[:place] + inserted + whole[place + length :])
    found = load(KEY, Thing)
    assert found is None or isinstance(found, Thing)


def test_too_much_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store(KEY, THING)
    monkeypatch.setattr(cache, "MOST_BYTES", path_of(KEY).stat().st_size - 1)
    assert load(KEY, Thing) is None
    assert not store(KEY, THING)


def test_the_oldest_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    keys = [key_of(number) for number in range(6)]
    for number, key in enumerate(keys):
        store(key, THING)
        os.utime(path_of(key), (1000 + number, 1000 + number))
    store(keys[0], THING)
    assert [load(key, Thing) is not None for key in keys] == [True, False, False, False, True, True]


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays() -> None:
    store(KEY, THING)
    old, new = (cache.cache_folder() / f".{name}.json.x.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"{")
    os.utime(old, (1000, 1000))
    store(KEY, THING)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("place", ["file", "missing"])
def test_where_nothing_can_be_kept_nothing_is_raised(place: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "file":
        home.write_text("in the way")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert not store(KEY, THING)
    assert load(KEY, Thing) is None


def test_a_write_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store(KEY, THING)

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store(KEY, Thing("b", {}))
    assert load(KEY, Thing) == THING
    assert [path.name for path in cache.cache_folder().iterdir()] == [f"{KEY}.json"]


def test_a_relative_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "onebox" / "profiles"


def test_many_writers_and_readers_at_once() -> None:
    things = [Thing(str(number) * 2000, {number: 0.5}) for number in range(8)]

    def work(number: int) -> list[Thing | None]:
        seen = []
        for _ in range(5):
            assert store(KEY, things[number])
            seen.append(load(KEY, Thing))
        return seen

    with ThreadPoolExecutor(8) as threads:
        found = [thing for seen in threads.map(work, range(8)) for thing in seen]
    assert all(thing in things for thing in found)
    assert [path.name for path in cache.cache_folder().iterdir()] == [f"{KEY}.json"]


def test_keys_tell_parts_apart() -> None:
    keys = {key_of(*parts) for parts in ((1, 2), (1, "2"), ("12",), (1, (2,)), ((1, 2),), (1,), ())}
    assert len(keys) == 7
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert all(len(key) == 32 for key in keys)
