"""What does the live page cost, and how soon does it show a change?

(a) Its files in kB: everything that a browser loads.
(b) Emulated: 64 devices that compute nothing train with a page that somebody looks at; the processor time of the
    page's own threads, as a part of a core. Target: at most 0.005.
(c) The time from the end of a step to the moment at which a browser shows its number. Target: at most 2 s.
(d) One worker of one thread trains an MLP while three browsers look, and while nobody does, in turn in every round;
    the difference of the mean step times, as a part of them. Target: at most 0.005.

Browsers are pages of a headless Chromium, Debian's package of this name, and need Playwright; without them, clients
that read the same events take their place, and (c) is the time until those have them. Browsers are usually on another
machine: here they run only when a core has nothing else to do (SCHED_IDLE).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from common import finish, show, spread
from torch import nn

import onebox
from onebox.report.page import PageServer, serve_page
from onebox.report.page.live_run import LiveRun
from onebox.report.page.page_server import static_files

DEVICES, LOOKERS = 64, 3
STEP_S = 0.4
"""Time of a step of (b): this machine's few cores run all devices' processes, which would leave nothing else."""

WIDTH, BATCH = 256, 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round, on each side")
    parser.add_argument("--devices", type=int, default=DEVICES, help="of (b)")
    options = parser.parse_args()
    page_kb = sum(len(content) for _, content in static_files().values()) / 1000
    rows = [[name, f"{len(content) / 1000:.1f}"] for name, (_, content) in static_files().items()]
    show("(a) the files of the page", ["file", "kB"], rows)
    with lookers() as found:
        share = server_share(found, options.devices, options.rounds, options.seconds)
        slowdown, update_s = training(found, options.rounds, options.seconds)
    result = {
        "page_kb": round(page_kb, 1),
        f"server_core_share_{options.devices}_devices": round(share, 5),
        "update_s": round(update_s, 3),
        "step_slowdown": round(slowdown, 5),
    }
    finish(result, as_json=options.json)


class Lookers(Protocol):
    """Those who look at a page."""

    name: str

    def look(self, url: str, count: int) -> None:
        """Let so many look at a page, and wait until they have its state."""

    def leave(self) -> None:
        """Let all of them leave."""

    def wait_for(self, step: int) -> None:
        """Wait until one who looks shows a step, or a later one."""


@contextlib.contextmanager
def lookers() -> Iterator[Lookers]:
    """Browsers, or clients where there are none."""
    path = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        yield Clients()
        return
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))  # which later ones inherit
        yield Browsers(browser)
        browser.close()


class Browsers:
    """Pages of a browser.

    Args:
        browser: The browser.
    """

    name = "browsers"

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._pages: list[Any] = []

    def look(self, url: str, count: int) -> None:
        while len(self._pages) < count:
            self._pages.append(self._browser.new_context().new_page())
        for page in self._pages[:count]:
            page.goto(url)
            page.wait_for_selector("body[data-number]")

    def leave(self) -> None:
        for page in self._pages:
            page.goto("about:blank")

    def wait_for(self, step: int) -> None:
        shown = "Number(document.querySelector('#tiles dd').textContent.replace(/,/g, ''))"
        self._pages[0].wait_for_function(f"step => {shown} >= step", arg=step)


class Clients:
    """Clients that read the events, in threads of their own."""

    name = "clients"

    def __init__(self) -> None:
        self._left = threading.Event()
        self._threads: list[threading.Thread] = []
        self._step = 0
        self._changed = threading.Condition()

    def look(self, url: str, count: int) -> None:
        self._left.clear()
        self._threads = [threading.Thread(target=self._read, args=(f"{url}events",)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, step: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._step >= step, 30.0)

    def _read(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=30.0) as answer:
            for line in answer:
                if self._left.is_set():
                    return
                if line.startswith(b"data: {"):
                    run = json.loads(line[6:]).get("run")
                    with self._changed:
                        self._step = run["step"] if run else self._step
                        self._changed.notify_all()


class Job:
    """A trainer with a page, which any number of lookers may look at.

    Args:
        pool: Specification of its pool.
        stack: Closes it.
    """

    def __init__(self, pool: str, stack: ExitStack) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        opened = stack.enter_context(onebox.open(pool, threads=1))
        plan = onebox.DataParallel(shares="equal")
        self.trainer = stack.enter_context(
            onebox.Trainer(model, nn.functional.mse_loss, torch.optim.AdamW(model.parameters()), pool=opened, plan=plan)
        )
        self._batch = torch.ones(BATCH * len(opened), WIDTH), torch.zeros(BATCH * len(opened), WIDTH)
        self.live = LiveRun("mlp", self.trainer, folder="", total_steps=1_000_000, epochs=1)
        self.page: PageServer = stack.enter_context(serve_page(self.live))
        self.step()

    def step(self) -> None:
        """Make a step, and record it as a training loop does."""
        loss = self.trainer.step(*self._batch).item()
        step, now_s = self.trainer.steps_done, time.time()
        self.live.add({"event": "step", "step": step, "epoch": 1, "loss": loss, "samples": BATCH, "time": now_s})

    def steps_s(self, seconds: float, every_s: float = 0.0) -> float:
        """Make steps for some time, and none sooner than so long after the one before; return the mean seconds of
        one."""
        begin_s, steps = time.perf_counter(), 0
        while (now_s := time.perf_counter()) < begin_s + seconds:
            self.step()
            steps += 1
            time.sleep(max(0.0, now_s + every_s - time.perf_counter()))
        return (time.perf_counter() - begin_s) / steps


def page_threads_s() -> float:
    """Return the processor time of the page's threads in this process."""
    own = {
        t.native_id for t in threading.enumerate() if t.name.startswith("onebox-page") or "process_request" in t.name
    }
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in own) / 1e9


def server_share(found: Lookers, devices: int, rounds: int, seconds: float) -> float:
    """Measure (b)."""
    with ExitStack() as stack:
        job = Job(f"sim*{devices}", stack)
        found.look(job.page.url, 1)
        job.steps_s(2.0, STEP_S)
        shares = []
        for _ in range(rounds):
            begin_s, used_s = time.perf_counter(), page_threads_s()
            job.steps_s(seconds, STEP_S)
            shares.append((page_threads_s() - used_s) / (time.perf_counter() - begin_s))
        found.leave()
    title = f"(b) the page's threads, {devices} emulated devices, one of the {found.name}"
    show(title, ["", "part of a core"], [["server", spread(shares, 4)]])
    return statistics.median(shares)


def training(found: Lookers, rounds: int, seconds: float) -> tuple[float, float]:
    """Measure (c) and (d)."""
    with ExitStack() as stack:
        job = Job("cpu", stack)
        job.steps_s(2.0)
        times: dict[str, list[float]] = {"nobody looks": [], f"{LOOKERS} {found.name} look": []}
        nobody, somebody = times
        for number in range(rounds):
            for side in (nobody, somebody) if number % 2 else (somebody, nobody):
                if side == somebody:
                    found.look(job.page.url, LOOKERS)
                job.steps_s(0.5)
                times[side].append(job.steps_s(seconds))
                if side == somebody:
                    found.leave()
        found.look(job.page.url, LOOKERS)
        delays = []
        for number in range(rounds):
            time.sleep(0.3 + 0.11 * (number % 8))
            job.step()
            begin_s = time.perf_counter()
            found.wait_for(job.trainer.steps_done)
            delays.append(time.perf_counter() - begin_s)
        found.leave()
    ratios = [after / before - 1 for before, after in zip(times[nobody], times[somebody], strict=True)]
    rows = [[side, spread([1e3 * each for each in own])] for side, own in times.items()]
    show("(d) a step of one worker", ["", "ms"], [*rows, ["slowdown", spread(ratios, 4)]])
    show("(c) from the end of a step to a page that shows it", ["", "s"], [[found.name, spread(delays)]])
    return statistics.median(ratios), max(delays)


if __name__ == "__main__":
    main()
