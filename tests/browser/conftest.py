"""A headless Chromium, driven by Playwright, and what is asked of every page.

Debian's package ``chromium`` brings the browser; where there is none, tests that need it skip. They leave pictures in
the folder that the variable ONEBOX_SCREENSHOTS names, where there is one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

WITHIN_MS = 30_000
"""Bound of every wait: a loaded machine may take long."""

WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 812}


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium; Debian's package of this name has it")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is missing")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[*arguments, "--disable-gpu"])
        yield browser
        browser.close()


class Visitor:
    """One who looks at pages, and records what they ask for and complain about.

    Args:
        context: The browser's context.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def look(self, url: str) -> Any:
        """Open a page and wait until it has its first state."""
        page = self._context.new_page()
        page.set_default_timeout(WITHIN_MS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        page.goto(url)
        page.wait_for_selector("body[data-number]")
        return page

    def close(self) -> None:
        """Close all pages, and check that they have asked nothing of other machines."""
        self._context.close()
        hosts = {urlsplit(url).hostname for url in self.requests if not url.startswith(("data:", "blob:"))}
        assert hosts <= {"127.0.0.1"}
        failed = "net::ERR_"  # of a server that was ended
        assert [each for each in self.complaints if failed not in each] == []


@pytest.fixture
def visitors(chromium: Any) -> Iterator[Any]:
    """A function that makes a visitor with a viewport and a colour scheme."""
    made: list[Visitor] = []

    def make(viewport: dict[str, int] = WIDE, scheme: str = "light", **options: Any) -> Visitor:
        context = chromium.new_context(viewport=viewport, color_scheme=scheme, **options)
        made.append(Visitor(context))
        return made[-1]

    yield make
    for each in made:
        each.close()


def screenshot(page: Any, name: str) -> None:
    """Leave a picture of a page where that is asked for."""
    folder = os.environ.get("ONEBOX_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        until(page, "() => document.querySelector('#gantt canvas').dataset.step > 1")
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def serious(page: Any) -> list[str]:
    """Return the serious accessibility problems of a page, by axe-core."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")
    found: Sequence[dict[str, Any]] = axe.Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found if each["impact"] in ("serious", "critical")
    ]


def until(page: Any, condition: str, argument: object = None) -> None:
    """Wait until an expression of JavaScript is true on a page."""
    page.wait_for_function(condition, arg=argument, timeout=WITHIN_MS)
