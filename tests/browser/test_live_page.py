"""The page of what goes on: a training run that loses a worker, a script, an agent, and a server that stops."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onebox.plan import Plan, Stage
from onebox.pool.keys.keyring import allow_client, identity
from tests.browser.conftest import PHONE, WIDE, screenshot, serious, until
from tests.kit import warm
from tests.process.cli.commands import read_until, running, workers_of

ADDRESS = r"page at (http://127\.0\.0\.1:\d+/[\w-]+/)"
SEGMENTS = (("model.body.0.0", "model.body.1.0"), ("model.body.4.0", "model.body.5.0", "model.body.8"))
"""The parts of the built-in CNN, by stage."""
TRAIN = ("train", "--data", "digits", "--model", "cnn", "--seed", "3", "--threads", "1", "--page")

STEP = "() => Number(document.querySelector('#tiles dd').textContent.replace(/,/g, ''))"
"""The number of the step on a page."""


@dataclass
class Training:
    """A run of two stages with a page, which goes on until it is ended."""

    process: subprocess.Popen[str]
    url: str
    folder: Path


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    stages = tuple(
        Stage(replicas=((device,),), shares=(1.0,), segments=segments) for device, segments in enumerate(SEGMENTS)
    )
    plan = Plan(stages=stages, micro_batch=16, schedule="1f1b")
    (tmp_path / "plan.json").write_text(plan.to_json())
    line = [*TRAIN, "--pool", "cpu*2", "--plan", "plan.json", "--epochs", "1000", "--recover", "on", "--run", "run"]
    with running(line, tmp_path) as process:
        (url,) = read_until(process, ADDRESS)
        read_until(process, r"step \d+/")
        reader = threading.Thread(target=lambda: [None for _ in process.stdout or ()])
        reader.start()
        yield Training(process, url, tmp_path / "run")
        process.kill()
        reader.join(60)


@pytest.mark.feature("Monitoring: Watch a run in a browser")
def test_a_run_is_shown_with_all_that_it_does(training: Training, visitors: Any) -> None:
    page = visitors(reduced_motion="reduce").look(training.url)
    until(page, "() => document.querySelector('#gantt canvas').dataset.step > 1")
    assert page.inner_text("#name") == "cnn on digits" and page.inner_text("#state-word") == "running"
    assert page.locator("#plan-table tbody tr").count() == 2
    until(page, "() => /forward \\S+ (ms|µs)/.test(document.querySelector('#plan-table').innerText)")
    legend = page.inner_text("#legend").split("\n")
    assert {"forward", "backward", "update", "wait", "transfer"} <= set(legend)
    until(page, "() => /\\d % *$/m.test(document.querySelector('#hosts').innerText)")
    assert "MiB of" in page.inner_text("#hosts") or "KiB of" in page.inner_text("#hosts")
    texts = page.inner_text("#tiles")
    assert "computing" in texts or "feed" in texts
    before = page.evaluate(STEP)
    until(page, f"before => ({STEP})() > before", before)
    for each in (page, visitors(WIDE, "dark").look(training.url), visitors(PHONE, "dark").look(training.url)):
        until(each, "() => document.querySelector('#gantt canvas').dataset.step > 1")
        assert each.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        assert serious(each) == []
    with page.expect_download() as waiting:
        page.click("#trace")
    trace = json.loads(Path(waiting.value.path()).read_text())
    assert {"compute", "transfer"} <= {event.get("cat") for event in trace["traceEvents"]}


@pytest.mark.feature("Monitoring: Watch a run in a browser")
def test_a_killed_worker_and_the_recovery(training: Training, visitors: Any) -> None:
    page = visitors().look(training.url)
    until(page, "() => document.querySelector('#gantt canvas').dataset.step > 1")
    os.kill(workers_of(training.process)[1].pid, signal.SIGKILL)
    until(page, "() => /device 1 .*is lost/.test(document.querySelector('#events-list').innerText)")
    until(page, "() => /recovery/.test(document.querySelector('#events-list').innerText)")
    before = page.evaluate(STEP)
    until(page, f"before => ({STEP})() > before + 80", before)
    assert page.inner_text("#state-word") == "running"
    screenshot(page, "page-light")
    screenshot(visitors(WIDE, "dark").look(training.url), "page-dark")
    screenshot(visitors(PHONE, "dark").look(training.url), "page-phone")


def test_a_run_that_is_ended_says_so_and_its_folder_shows_the_same(training: Training, visitors: Any) -> None:
    page = visitors().look(training.url)
    training.process.send_signal(signal.SIGINT)
    until(page, "() => document.querySelector('#banner').textContent.includes('onebox watch')")
    assert page.inner_text("#state-word") == "ended"
    assert training.process.wait(60) == 130
    with running(["watch", "run"], training.folder.parent) as process:
        (url,) = read_until(process, ADDRESS)
        later = visitors().look(url)
        assert later.inner_text("#state-word") == "ended"
        assert later.inner_text("#banner").startswith("Interrupted after step")
        assert later.locator("#plan-table tbody tr").count() == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_run_whose_process_is_killed_is_seen_in_its_folder(training: Training, visitors: Any) -> None:
    with running(["watch", "run"], training.folder.parent) as process:
        (url,) = read_until(process, ADDRESS)
        page, live = visitors().look(url), visitors().look(training.url)
        assert page.inner_text("#state-word") == "running"
        training.process.kill()
        until(page, "() => document.querySelector('#state-word').textContent === 'failed'")
        assert "without a word" in page.inner_text("#banner")
        until(live, "() => document.querySelector('#state-word').textContent === 'connection lost'")


def test_a_server_that_stops_is_lost_and_found_again(training: Training, visitors: Any) -> None:
    with running(["watch", "run"], training.folder.parent) as process:
        (url,) = read_until(process, ADDRESS)
        page = visitors().look(url)
        process.send_signal(signal.SIGSTOP)
        until(page, "() => document.querySelector('#state-word').textContent === 'connection lost'")
        assert page.is_visible("#banner")
        process.send_signal(signal.SIGCONT)
        until(page, "() => document.querySelector('#state-word').textContent === 'running'")


@pytest.mark.feature("Monitoring: Watch the pool of a script")
def test_the_pool_of_a_script(tmp_path: Path, visitors: Any) -> None:
    script = "import torch\nx = torch.ones(9, device='cuda:1')\nwhile True:\n    x.sum().item()\n"
    (tmp_path / "script.py").write_text(script)
    line = ["run", "--pool", "cpu*2", "--threads", "1", "--page", "script.py", "--password", "secret"]
    with running(line, tmp_path) as process:
        assert process.stderr is not None
        url = next(match[1] for line in process.stderr if (match := re.search(ADDRESS, line)))
        page = visitors().look(url)
        assert page.inner_text("#name") == "script.py"
        assert "secret" not in page.content()
        assert page.locator("#hosts tbody tr").count() == 2
        until(page, "() => /cuda:1/.test(document.querySelector('#script-bound').innerText)")
        lines = page.locator("#script-lines")
        assert re.search(r"script\.py:4\s+x\.sum\(\)\.item\(\)\s+\d", lines.inner_text())
        assert serious(page) == []
        os.kill(workers_of(process)[1].pid, signal.SIGKILL)
        until(page, "() => /device 1 .*is lost/.test(document.querySelector('#events-list').innerText)")
        assert page.inner_text("#hosts").count("lost") == 1


@contextlib.contextmanager
def serving(owner: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """An agent with a page."""
    line = ["serve", "--allow-root", "--bind", "127.0.0.1", "--port", "0", "--devices", "cpu", "--page"]
    environment = warm.single() | {"ONEBOX_CONFIG": str(owner)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "onebox", *line]
    with warm.Popen(command, cwd=folder, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.feature("Monitoring: Watch agents in a browser")
def test_agents_by_their_own_page_and_from_a_client(
    tmp_path: Path, visitors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, client = tmp_path / "owner", tmp_path / "client"
    monkeypatch.setenv("ONEBOX_CONFIG", str(client))
    key = identity("client").public
    monkeypatch.setenv("ONEBOX_CONFIG", str(owner))
    allow_client("ana@desk", key)
    agent = identity("agent").public
    with serving(owner, tmp_path) as process:
        assert process.stderr is not None
        found = {}
        for line in process.stderr:
            found |= {name: match[1] for name, pattern in PATTERNS.items() if (match := re.search(pattern, line))}
            if len(found) == len(PATTERNS):
                break
        (client / "agents.json").write_text(json.dumps([{"address": found["agent"], "key": agent, "host": "lab"}]))
        monkeypatch.setenv("ONEBOX_CONFIG", str(client))
        watching = [sys.executable, "-m", "onebox", "watch", found["agent"]]
        pages = [visitors().look(found["page"])]
        with warm.Popen(
            watching,
            cwd=tmp_path,
            env=warm.single() | {"ONEBOX_CONFIG": str(client)},
            stdout=subprocess.PIPE,
            text=True,
        ) as watcher:
            try:
                (url,) = read_until(watcher, ADDRESS)
                pages.append(visitors(PHONE).look(url))
                for page in pages:
                    until(page, "() => document.querySelectorAll('#hosts tbody tr').length === 1")
                    until(page, "() => /free/.test(document.querySelector('#hosts').innerText)")
                    until(page, "() => /started/.test(document.querySelector('#events-list').innerText)")
                    assert serious(page) == []
                process.kill()
                until(pages[1], "() => document.querySelector('.problem:not([hidden])') !== null")
            finally:
                watcher.kill()


PATTERNS = {"page": ADDRESS, "agent": r"agent at (127\.0\.0\.1:\d+)"}
