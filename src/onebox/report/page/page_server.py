"""The server of the page: static files, and the state of a source as server-sent events, on loopback.

Only who knows the token in the address gets anything, and only by GET, under a name of loopback. The number of clients
is bounded, and those without the token keep out nobody who knows it; each has at most one message on its way, as a
client that reads slowly gets the newest state and not all of them. While nobody looks the source is not asked.

Format of the events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from onebox.bounded_http import LOOPBACK, REQUEST_S, BoundedServer, names_host
from onebox.errors import UsageError
from onebox.report.page.state import PageState

_LOG = logging.getLogger("onebox")

ADDRESS = "127.0.0.1"
"""The only address of the page: other machines reach it through a tunnel."""

EVERY_S = 1.0
"""Interval between two states."""

HEARTBEAT_S = 5.0
"""Interval between messages while nothing changes, by which a browser knows that it is still connected."""

STREAMS = 16
"""The most clients that get events at once."""

POLL_S = 0.5
"""Longest time until a server that is to end accepts no further connection."""

_CLOSE_S = 5.0

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageSource(Protocol):
    """Interface of what a page shows; called by the threads of its server, one at a time."""

    def state(self) -> PageState:
        """Return the present state."""

    def trace(self) -> bytes | None:
        """Return a Chrome trace of the last steps; ``None`` if there is none."""

    def close(self) -> None:
        """Free what the source holds."""


class StateFeed:
    """The state of a source, about once a second while somebody subscribes to it, in a thread that :meth:`close` ends.

    Args:
        source: The source.
        every_s: Interval between two states.
    """

    def __init__(self, source: PageSource, every_s: float) -> None:
        self._source = source
        self._every_s = every_s
        self._changed = threading.Condition()
        self._source_lock = threading.Lock()
        self._stopping = threading.Event()
        self._subscriptions = 0
        self._number = 0
        self._sections: dict[str, tuple[int, bytes]] = {}
        self._failed = ""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="onebox-page-state", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Subscribe to the state from now on."""
        with self._changed:
            if not self._subscriptions:
                self._sections = {}  # made when somebody looked last
            self._subscriptions += 1
            self._changed.notify_all()
        try:
            yield Subscription(self)
        finally:
            with self._changed:
                self._subscriptions -= 1

    def trace(self) -> bytes | None:
        """Return the trace of the source, for one caller at a time."""
        with self._source_lock:
            return self._source.trace()

    def close(self) -> None:
        """Give the subscriptions the last state, and end. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._subscriptions and not self._thread.is_alive():
            self._renew()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        """True after :meth:`close`: there will be no other state."""
        return self._ended

    def news(self, seen: dict[str, int], within_s: float) -> tuple[int, dict[str, bytes]]:
        """Wait for sections that have changed.

        Args:
            seen: The version of each section that is known; updated.
            within_s: Longest wait.

        Returns:
            The number of the state, and its changed sections as JSON; none when the time has passed.
        """

        def changed() -> dict[str, bytes]:
            return {name: data for name, (version, data) in self._sections.items() if seen.get(name) != version}

        with self._changed:
            self._changed.wait_for(lambda: self.ended or bool(changed()), within_s)
            found = changed()
            seen.update({name: self._sections[name][0] for name in found})
            return self._number, found

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._subscriptions > 0 or self._stopping.is_set())
            if self._stopping.is_set():
                return
            begin_s = time.monotonic()
            self._renew()
            self._stopping.wait(max(0.05, begin_s + self._every_s - time.monotonic()))

    def _renew(self) -> None:
        """Ask the source, and encode its sections."""
        try:
            with self._source_lock:
                state = self._source.state()
                sections = {name: msgspec.json.encode(getattr(state, name)) for name in state.__struct_fields__}
        except Exception as error:  # the page must not end what it shows
            if self._failed != repr(error):
                self._failed = repr(error)
                _LOG.warning("the page cannot be renewed: %s", self._failed, exc_info=True)
            return
        with self._changed:
            self._number += 1
            for name, data in sections.items():
                if self._sections.get(name, (0, b""))[1] != data:
                    self._sections[name] = self._number, data
            self._changed.notify_all()


class Subscription:
    """Subscription to a state; made by :meth:`StateFeed.subscribe`.

    Args:
        feed: The state.
    """

    def __init__(self, feed: StateFeed) -> None:
        self._feed = feed
        self._seen: dict[str, int] = {}

    def message(self, within_s: float) -> bytes:
        """Wait for a change, and return it as an event; a heartbeat when the time has passed.

        Args:
            within_s: Longest wait.
        """
        number, sections = self._feed.news(self._seen, within_s)
        if not sections:
            return b"event: beat\ndata: \n\n"
        body = b",".join(b'"%s":%s' % (name.encode(), data) for name, data in sections.items())
        return b"id: %d\ndata: {%s}\n\n" % (number, body)

    @property
    def ended(self) -> bool:
        """True if there will be no further change."""
        return self._feed.ended


class PageServer:
    """The page of a source, in threads that :meth:`close` ends; made by :func:`serve_page`.

    Args:
        server: The bound server.
        source: The source; closed with the server.
    """

    def __init__(self, server: _Server, source: PageSource) -> None:
        self._server = server
        self._source = source
        self._closed = False
        self._thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="onebox-page", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{ADDRESS}:{self._server.server_address[1]}/{self._server.token}/"

    def close(self) -> None:
        """Send the last state, end all threads, close all connections and free the port. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._thread.join(_CLOSE_S)
        self._server.feed.close()
        self._server.end_connections(_CLOSE_S)
        self._server.server_close()
        self._source.close()


def serve_page(source: PageSource, *, port: int = 0) -> PageServer:
    """Serve the page of a source at ``http://127.0.0.1:PORT/TOKEN/`` until the result is closed.

    Args:
        source: The source; closed with the server.
        port: The port; 0 for any free one.

    Raises:
        UsageError: The port is taken.
    """
    try:
        server = _Server(port)
    except (OSError, OverflowError) as error:
        source.close()
        raise UsageError(
            f"the page cannot be served at {ADDRESS}, port {port}: {error}; name a free port, or 0 for any"
        ) from None
    server.feed = StateFeed(source, EVERY_S)
    return PageServer(server, source)


def static_files() -> Mapping[str, tuple[str, bytes]]:
    """Return the type and the content of each file of the page."""
    found = {}
    for file in files("onebox.report.page").joinpath("static").iterdir():
        kind = _TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            found[file.name] = f"{kind}; charset=utf-8", file.read_bytes()
    return found


class _Server(BoundedServer):
    feed: StateFeed

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self.files = static_files()
        self.streams = threading.BoundedSemaphore(STREAMS)
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up; log other errors."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _LOG.warning("the page cannot answer: %r", error, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        """Answer with a file of the page, its state, or a trace."""
        name = self._asked()
        if name is None:
            return
        if name == "events":
            self._events()
        elif name == "trace.json":
            self._trace()
        elif name in self.server.files:
            kind, content = self.server.files[name]
            self._answer(HTTPStatus.OK, content, kind)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such file")

    def _other_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the page is read-only: only GET is allowed", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _other_method

    def _asked(self) -> str | None:
        """Return the name of what is asked for, ``index.html`` where it is empty; refuse who may not ask."""
        if not names_host(self.headers.get("Host", ""), LOOPBACK):
            self._refuse(HTTPStatus.FORBIDDEN, "the page is for this machine alone")
            return None
        parts = self.path.partition("?")[0].split("/")
        token = parts[1] if len(parts) > 1 else ""
        if not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()) or len(parts) != 3:
            self._refuse(HTTPStatus.NOT_FOUND, "the address needs the token that was printed with it")
            return None
        self.server.accept(self.connection)
        return parts[2] or "index.html"

    def _events(self) -> None:
        """Send the state, and then its changes."""
        if not self.server.streams.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS} others look already", Retry_After="10")
            return
        try:
            with self.server.feed.subscribe() as subscription:
                self._begin(HTTPStatus.OK, "text/event-stream", {})
                self.wfile.write(b"retry: 1000\n\n")
                while not subscription.ended:
                    self.wfile.write(subscription.message(HEARTBEAT_S))
                self.wfile.write(subscription.message(0.0))
                self.wfile.write(b"event: end\ndata: \n\n")
        except OSError:
            return  # it has hung up, or does not read
        finally:
            self.server.streams.release()

    def _trace(self) -> None:
        try:
            content = self.server.feed.trace()
        except Exception as error:  # the page must not end what it shows
            _LOG.warning("the page cannot make a trace: %r", error, exc_info=True)
            text = f"the trace cannot be made: {error!r}; try again after the next step, and see the log of the command"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, text)
            return
        if content is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no trace yet")
            return
        name = 'attachment; filename="onebox-trace.json"'
        self._answer(HTTPStatus.OK, content, "application/json", {"Content-Disposition": name})

    def _refuse(self, status: HTTPStatus, text: str, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._answer(status, f"{text}\n".encode(), "text/plain; charset=utf-8", named)

    def _answer(self, status: HTTPStatus, content: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        with contextlib.suppress(OSError):
            self._begin(status, kind, {"Content-Length": str(len(content)), **(headers or {})})
            if self.command != "HEAD":
                self.wfile.write(content)

    def _begin(self, status: HTTPStatus, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "onebox"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: paths have the token."""
