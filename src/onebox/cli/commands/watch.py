"""``onebox watch``: agents, or the folder of a run, on a page in a browser."""

from __future__ import annotations

import contextlib
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from onebox.cli.agent_watch import HostWatch, addresses_of, close_watches
from onebox.cli.options.agents import WatchConfig
from onebox.errors import UsageError
from onebox.files import put_file
from onebox.report import HostState
from onebox.report.page import PageSource, serve_page
from onebox.report.page.host_offers import JOURNAL_LINES, HostOffers
from onebox.report.page.recorded_run import RecordedRun, newest_run

_EVERY_S = 1.0


def watch(config: WatchConfig) -> None:
    """Serve the page until Ctrl-C, its regular end.

    Raises:
        UsageError: There is nothing to show, or the port is taken.
    """
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        page = stack.enter_context(serve_page(_source(config.target), port=config.port))
        print(f"page at {page.url}  (Ctrl-C ends it)", flush=True)
        if config.open:
            webbrowser.open(stack.enter_context(_private_link(page.url)))
        while True:
            time.sleep(_EVERY_S)  # and not for an event: on Windows, Ctrl-C does not interrupt that


@contextlib.contextmanager
def _private_link(url: str) -> Iterator[str]:
    """Return the address of a file that leads to a page, and that only this user can read: other users see the command
    lines of programs, such as a browser's."""
    with tempfile.TemporaryDirectory(prefix="onebox-page-") as folder:
        file = Path(folder, "page.html")
        put_file(file, f'<meta http-equiv="refresh" content="0; url={url}">\n'.encode())
        yield file.as_uri()


def _source(target: str | None) -> PageSource:
    """Return what is to be shown.

    Raises:
        UsageError: There is no such folder or agent.
    """
    if target is None:
        return RecordedRun(newest_run())
    path = Path(target).expanduser()
    if path.is_dir():
        return RecordedRun(path)
    if path.exists():
        raise UsageError(f"{target} is a file; give the folder of a run, or hosts where onebox serve runs")
    if "/" in target or target.startswith((".", "~")):
        raise UsageError(f"there is no folder {target}; give that of a run, or hosts where onebox serve runs")
    return WatchedHosts(addresses_of(target))


class WatchedHosts(HostOffers):
    """Agents that are queried while somebody looks.

    Args:
        addresses: Their addresses.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._watches = [HostWatch(address, _EVERY_S, log_lines=JOURNAL_LINES) for address in addresses]
        super().__init__(self._present, self._lines)

    def _present(self) -> list[HostState]:
        return [each.state for each in self._watches]

    def _lines(self) -> list[str]:
        """Return the newest lines of all logs, by time."""
        return sorted(line for each in self._watches for line in each.lines)

    def close(self) -> None:
        """End the queries."""
        close_watches(self._watches)
