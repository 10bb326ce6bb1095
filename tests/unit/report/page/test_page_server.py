"""The server of the page: who gets what, and what changes."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from onebox import bounded_http
from onebox.errors import UsageError
from onebox.report.page import page_server
from onebox.report.page.page_server import PageServer, serve_page, static_files
from onebox.report.page.state import EventView, Head, PageState, RunNumbers
from tests.kit.waiting import until

PATIENCE_S = 60.0
LARGEST_BYTES = 300_000


@dataclass
class Counting:
    """A source whose step is the number of times that it was asked."""

    asked: int = 0
    closed: bool = False
    step: int | None = None
    content: bytes | None = b'{"traceEvents":[]}'
    fails: bool = False
    text: str = "the same"
    changed: threading.Event = field(default_factory=threading.Event)

    def state(self) -> PageState:
        self.asked += 1
        self.changed.set()
        if self.fails:
            raise RuntimeError("the source has failed")
        head = Head(kind="run", name="<b>cnn</b> on digits", state="running", folder="runs/a")
        event = EventView(
            at_s=None, step=1, kind="note", severity="info", text=self.text + str(self.asked) * (len(self.text) > 8)
        )
        return PageState(head=head, run=RunNumbers(step=self.step or self.asked), events=(event,))

    def trace(self) -> bytes | None:
        if self.fails:
            raise RuntimeError("the trace has failed")
        return self.content

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(page_server, "EVERY_S", 0.02)
    monkeypatch.setattr(page_server, "POLL_S", 0.02)


@pytest.fixture
def source() -> Counting:
    return Counting()


@pytest.fixture
def page(quick: None, source: Counting) -> Iterator[PageServer]:
    with serve_page(source) as server:
        yield server


def place_of(page: PageServer) -> tuple[int, str]:
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{32}/)", page.url)
    assert found is not None
    return int(found[1]), found[2]


def ask(page: PageServer, path: str | None = None, *, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    port, own = place_of(page)
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request(method, own if path is None else path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


class Stream:
    """The events of a page, as a browser gets them."""

    def __init__(self, page: PageServer) -> None:
        port, own = place_of(page)
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.connection.request("GET", f"{own}events")
        self.answer = self.connection.getresponse()

    def event(self) -> dict[str, str]:
        """Return the next event that is no mere instruction."""
        while True:
            fields = {}
            while line := self.answer.readline().decode().rstrip("\n"):
                name, _, value = line.partition(": ")
                fields[name] = value
            if fields.keys() - {"retry"}:
                return fields
            assert self.answer.fp is not None and fields, "the stream has ended"

    def sections(self) -> dict[str, Any]:
        """Return the next changed sections."""
        while not (found := self.event()).get("data"):
            assert found.get("event") != "end"
        return json.loads(found["data"])

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def settle(source: Counting) -> int:
    """Wait until the server has noticed that nobody looks any more; return how often the source was asked."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        before = source.asked
        time.sleep(0.3)
        if source.asked == before:
            return before
    raise AssertionError("the source is asked while nobody looks")


def test_the_page_is_served_with_headers_that_allow_nothing_from_elsewhere(page: PageServer) -> None:
    status, headers, body = ask(page)
    assert status == 200 and body.startswith(b"<!doctype html>")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Server"] == "onebox"
    assert "Access-Control-Allow-Origin" not in headers


def test_every_file_of_the_page_is_served(page: PageServer) -> None:
    own = place_of(page)[1]
    assert {"index.html", "page.css", "page.js", "icon.svg"} <= static_files().keys()
    for name, (kind, content) in static_files().items():
        status, headers, body = ask(page, own + name)
        assert (status, headers["Content-Type"], body) == (200, kind, content)


def test_the_page_is_small_and_asks_nothing_of_other_machines() -> None:
    files = static_files()
    assert sum(len(content) for _, content in files.values()) < LARGEST_BYTES
    for name, (_, content) in files.items():
        text = content.decode()
        assert not re.search(
            r"(?:https?:)?//(?!www\.w3\.org/)[a-z]", re.sub(r"^\s*//.*|\s// .*", "", text, flags=re.M)
        ), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text), name
    html = files["index.html"][1].decode()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|<style", html)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/index.html",
        "/events",
        "/TOKEN",
        "/TOKEN/../TOKEN/",
        "/TOKEN/nothing",
        "/TOKEN/a/b",
        "/é/",
        "//",
        "/TOKENx/",
    ],
)
def test_another_address_gets_nothing(page: PageServer, path: str) -> None:
    port, own = place_of(page)
    with closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) as connection:
        asked = path.replace("TOKEN", own.strip("/")) if path != "/TOKENx/" else f"{own[:-1]}x/"
        connection.sendall(f"GET {asked} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.0 404")
    assert b"<!doctype html>" not in answer and own.strip("/").encode() not in answer


@pytest.mark.parametrize("host", ["example.org", "example.org:80", "127.0.0.1.example.org", "", "[::2]:80", "0.0.0.0"])
def test_a_foreign_name_of_this_machine_is_refused(page: PageServer, host: str) -> None:
    assert ask(page, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "[::1]:1"])
def test_a_tunnel_may_have_another_port(page: PageServer, host: str) -> None:
    assert ask(page, Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_the_page_is_read_only(page: PageServer, method: str) -> None:
    status, headers, _ = ask(page, method=method)
    assert status == 405 and headers["Allow"] == "GET"


def test_only_what_has_changed_is_sent_after_the_first_state(page: PageServer) -> None:
    with closing(Stream(page)) as stream:
        assert stream.answer.headers["Content-Type"] == "text/event-stream"
        first = stream.sections()
        assert first.keys() == set(PageState.__struct_fields__)
        assert first["head"]["name"] == "<b>cnn</b> on digits"
        later = stream.sections()
        assert later.keys() == {"run"} and later["run"]["step"] > first["run"]["step"]


def test_a_state_that_does_not_change_is_a_heartbeat(page: PageServer, source: Counting) -> None:
    source.step = 5
    with closing(Stream(page)) as stream:
        assert stream.sections()["run"]["step"] == 5
        assert stream.event() == {"event": "beat", "data": ""} or stream.event()["event"] == "beat"


def test_the_source_is_not_asked_while_nobody_looks(page: PageServer, source: Counting) -> None:
    assert source.asked == 0
    with closing(Stream(page)) as stream:
        stream.sections()
    settle(source)


def test_one_who_comes_back_gets_everything_and_the_newest(page: PageServer, source: Counting) -> None:
    for _ in range(2):
        before = settle(source)
        with closing(Stream(page)) as stream:
            found = stream.sections()
            assert found.keys() == set(PageState.__struct_fields__) and found["run"]["step"] > before


def test_several_look_at_the_same_state(page: PageServer) -> None:
    streams = [Stream(page) for _ in range(3)]
    try:
        assert [stream.sections()["head"]["name"] for stream in streams] == ["<b>cnn</b> on digits"] * 3
    finally:
        for stream in streams:
            stream.close()


def test_too_many_are_refused(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "STREAMS", 2)
    with serve_page(Counting()) as page:
        streams = [Stream(page) for _ in range(3)]
        try:
            assert [stream.answer.status for stream in streams] == [200, 200, 503]
        finally:
            for stream in streams:
                stream.close()


def test_one_who_does_not_read_is_given_up(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "STREAMS", 1)
    monkeypatch.setattr("onebox.report.page.page_server._Handler.timeout", 0.2)
    with serve_page(Counting(text="x" * (1 << 20))) as page, closing(Stream(page)) as silent:
        assert silent.answer.status == 200
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            with closing(Stream(page)) as other:
                if other.answer.status == 200:
                    assert other.sections()["run"]["step"] > 0
                    return
            time.sleep(0.1)
    raise AssertionError("the place of one who does not read stays taken")


def test_too_many_connections_are_hung_up_on(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "CONNECTIONS", 2)
    with serve_page(Counting()) as page:
        streams = [Stream(page) for _ in range(2)]
        try:
            with suppress(OSError, http.client.HTTPException):
                assert ask(page)[0] != 200
        finally:
            for each in streams:
                each.close()


def test_who_does_not_know_the_token_keeps_out_nobody_who_does(quick: None) -> None:
    with serve_page(Counting()) as page, ExitStack() as opened:
        stream = opened.enter_context(closing(Stream(page)))
        place = "127.0.0.1", place_of(page)[0]
        slow = [opened.enter_context(socket.create_connection(place, PATIENCE_S)) for _ in range(70)]
        for each in slow[-60:]:
            with suppress(OSError):
                each.sendall(b"GET /x/ HTTP/1.1\r\nX: ")
        assert ask(page)[0] == 200
        before = stream.sections()["run"]["step"]
        until(lambda: stream.sections()["run"]["step"] > before)
        assert slow[0].recv(1) == b"", "the oldest has made room"


def test_a_request_that_comes_slowly_is_hung_up_on(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "REQUEST_S", 0.2)
    with (
        serve_page(Counting()) as page,
        socket.create_connection(("127.0.0.1", place_of(page)[0]), PATIENCE_S) as slow,
    ):
        slow.sendall(b"GET / HTTP/1.1\r\n")

        def hung_up() -> bool:
            try:
                slow.sendall(b"X")
                return not slow.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True

        slow.settimeout(0.05)
        until(hung_up)


def test_a_source_that_fails_does_not_end_the_page(
    page: PageServer, source: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    source.fails = True
    with closing(Stream(page)) as stream:
        assert stream.event()["event"] == "beat"
        source.fails = False
        assert stream.sections()["head"]["state"] == "running"
    assert [record.getMessage() for record in caplog.records if record.name == "onebox"] == [
        "the page cannot be renewed: RuntimeError('the source has failed')"
    ]


def test_the_end_gives_the_last_state_and_frees_everything(quick: None) -> None:
    source = Counting(step=1)
    page = serve_page(source)
    port, _ = place_of(page)
    with closing(Stream(page)) as stream:
        assert stream.sections()["run"]["step"] == 1
        source.step = 2
        page.close()
        seen = [stream.event()]
        while seen[-1].get("event") != "end":
            seen.append(stream.event())
        assert json.loads([each["data"] for each in seen if each["data"]][-1])["run"]["step"] == 2
    page.close()
    assert source.closed
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("onebox-page")]


def test_the_trace_is_a_download(page: PageServer, source: Counting) -> None:
    own = place_of(page)[1]
    status, headers, body = ask(page, f"{own}trace.json")
    assert (status, body) == (200, source.content)
    assert headers["Content-Disposition"] == 'attachment; filename="onebox-trace.json"'
    source.content = None
    assert ask(page, f"{own}trace.json")[0] == 404


def test_a_trace_that_fails_is_an_answer_and_is_logged(
    page: PageServer, source: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    source.fails = True
    status, _, body = ask(page, f"{place_of(page)[1]}trace.json")
    assert status == 500 and b"the trace has failed" in body and b"try again" in body
    assert [record.getMessage() for record in caplog.records if record.name == "onebox"] == [
        "the page cannot make a trace: RuntimeError('the trace has failed')"
    ]


def test_an_error_of_the_server_is_logged(
    page: PageServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(handler: object) -> None:
        raise LookupError("a fault of the page")

    monkeypatch.setattr("onebox.report.page.page_server._Handler.do_GET", fail)
    with suppress(OSError, http.client.HTTPException):
        ask(page)
    page.close()
    assert [record.getMessage() for record in caplog.records if record.name == "onebox"] == [
        "the page cannot answer: LookupError('a fault of the page')"
    ]


def test_a_port_that_is_taken_is_an_error(page: PageServer) -> None:
    source = Counting()
    with pytest.raises(UsageError, match="name a free port"):
        serve_page(source, port=place_of(page)[0])
    assert source.closed


def test_tokens_differ(page: PageServer, quick: None) -> None:
    with serve_page(Counting()) as other:
        assert place_of(other)[1] != place_of(page)[1]
