"""The journal: bounded plain lines without secrets, on disk and in memory."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.agent.journal import LINE_BYTES, LINES, Journal
from onebox.errors import UsageError
from onebox.pool.keys.keyring import fingerprint
from onebox.wire import new_keys

NAMES = st.one_of(st.sampled_from(["client", "reason", "time", "key", "x" * 40, "Ünï"]), st.text(max_size=8))
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text("\x1b\x9b\u2028😀", min_size=500)
)


def journal(path: Path | None = None, **more: int) -> Journal:
    return Journal(path, clock=lambda: 1_600_000_000.5, **more)


def test_a_line() -> None:
    book = journal()
    book.tell("leased", client="ann@lab", lease=3, memory=1.5, why=None)
    record = json.loads(book.last(1)[0])
    assert record.pop("host") == os.uname().nodename
    assert record == {
        "time": "2020-09-13T12:26:40.500Z",
        "event": "leased",
        "client": "ann@lab",
        "lease": 3,
        "memory": 1.5,
        "why": None,
    }
    assert book.counts == {"leased": 1}


@given(st.text(max_size=40), st.dictionaries(NAMES, VALUES, max_size=20))
def test_whatever_is_told_is_one_bounded_line_of_json(event: str, fields: dict[str, object]) -> None:
    book = journal()
    fields.pop("event", None)
    fields.pop("self", None)
    book.tell(event, **fields)  # type: ignore[arg-type]
    (line,) = book.last(10)
    assert len(line.encode()) < LINE_BYTES and line.isascii() and line.isprintable()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["time"] == "2020-09-13T12:26:40.500Z" and record["host"] == os.uname().nodename


@pytest.mark.parametrize("name", ["key", "client_key", "secret", "password", "pair_code", "code", "token", "data"])
def test_names_of_secrets_are_withheld(name: str) -> None:
    book = journal()
    book.tell("paired", **{name: "swordfish"})
    assert "swordfish" not in book.last(1)[0] and name in book.last(1)[0]
    assert json.loads(book.last(1)[0])[name] == "(withheld)"


def test_a_line_may_stand_for_several_events() -> None:
    book = journal()
    for times in (3, 0, None):
        book.tell("handshake-refused", times=times)
    assert book.counts == {"handshake-refused": 5} and len(book.last(9)) == 3


def test_an_exit_code_is_none() -> None:
    book = journal()
    book.tell("worker-ended", exit_code=3)
    assert json.loads(book.last(1)[0])["exit_code"] == 3


@pytest.mark.parametrize("around", ["{}", "the key '{}' came", "key={}", "a:{},", "x" * 65_500 + " {}", "y\n{}\n"])
def test_keys_in_text_are_withheld(around: str) -> None:
    for _ in range(20):
        keys = new_keys()
        for text in (keys.public, keys.secret):
            book = journal()
            book.tell("refused", reason=around.format(text))
            said = json.loads(book.last(1)[0])["reason"]
            assert text not in said and text[:30] not in said


@pytest.mark.parametrize("around", ["{}", "<object at {}>", "x" * 65_530 + "{}", "x" * 598 + "{}", "y\n{}\n"])
def test_addresses_of_memory_are_left_out(around: str) -> None:
    book = journal()
    book.tell("zygote-ended", reason=around.format("0x00007f0d5c7fa640"))
    (line,) = book.last(1)
    assert not re.search("[0-9a-f]{5,}", json.loads(line)["reason"]), "no part of one"


def test_a_fingerprint_and_an_address_are_not_taken_for_keys() -> None:
    book = journal()
    book.tell("refused", print=f"it is {fingerprint(new_keys().public)}.", peer="tcp://10.0.0.1:7171")
    assert "withheld" not in book.last(1)[0]


def test_what_is_not_plain_is_named_by_its_type() -> None:
    book = journal()
    book.tell("leased", x=b"bytes", y=[1], z=1 << 80)  # type: ignore[arg-type]
    record = json.loads(book.last(1)[0])
    assert (record["x"], record["y"], record["z"]) == ("(bytes)", "(list)", "(too large)")


@pytest.mark.feature("Agents: Keep a journal")
def test_the_file_is_its_owners_alone_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    path.write_text('{"event": "before"}\n{"event": "unfini')
    path.chmod(0o644)
    with journal(path) as book:
        book.tell("started")
        assert [json.loads(line)["event"] for line in (book.last(9)[0], book.last(9)[-1])] == ["before", "started"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "started"
    book.tell("after")
    assert book.lost == 0 and "after" not in path.read_text() and "after" in book.last(1)[0]


def test_a_file_that_is_full_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "agent.jsonl"
    with journal(path, file_bytes=2000) as book:
        for number in range(100):
            book.tell("leased", lease=number)
    aside = path.with_name("agent.jsonl.1")
    assert sorted(tmp_path.iterdir()) == [path, aside]
    assert max(path.stat().st_size, aside.stat().st_size) <= 2000
    assert aside.stat().st_mode & 0o777 == 0o600
    leases = [json.loads(line)["lease"] for file in (aside, path) for line in file.read_text().splitlines()]
    assert leases == list(range(leases[0], 100))
    assert len(book.last(1000)) == 100


@pytest.mark.parametrize("room_bytes", [0, 10], ids=["nothing is written", "a part of a line"])
def test_a_disk_that_is_full_loses_lines_but_not_the_agent(tmp_path: Path, room_bytes: int) -> None:
    path = tmp_path / "agent.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with journal(path) as book:
        book.tell("started")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room_bytes, hard))
        try:
            book.tell("leased")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert book.lost == 1 and book.counts["leased"] == 1 and "leased" in book.last(1)[0]
        book.tell("ended")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["started", "ended"]


def test_memory_is_bounded() -> None:
    book = journal()
    for number in range(LINES + 50):
        book.tell(f"event-{number}")
    assert len(book.last(10**6)) == LINES and len(book.counts) <= 129
    assert sum(book.counts.values()) == LINES + 50
    assert sum(map(len, book.last(1000, size_bytes=1000))) <= 1000
    assert book.last(3) == book.last(1000)[-3:] and book.last(0) == []


def test_what_cannot_be_opened_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "no" / "folder", tmp_path / "link"):
        with pytest.raises(UsageError, match="cannot be opened"):
            Journal(path)


def test_the_stream_gets_every_line_until_nobody_reads() -> None:
    stream = io.StringIO()
    book = Journal(None, stream)
    book.tell("one")
    assert stream.getvalue() == book.last(1)[0] + "\n"
    stream.close()
    book.tell("two")
    assert "two" in book.last(1)[0]


def test_many_threads(tmp_path: Path) -> None:
    with journal(tmp_path / "agent.jsonl", file_bytes=1 << 14) as book:
        threads = [
            threading.Thread(target=lambda: [book.tell("leased", lease=1) for _ in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert book.counts["leased"] == 400 and book.lost == 0
    for file in tmp_path.iterdir():
        assert all(json.loads(line)["event"] == "leased" for line in file.read_text().splitlines())
