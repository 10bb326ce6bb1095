"""``onebox watch``: what is shown, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from onebox.cli import main

WITHIN_S = 30.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run in ./runs/one, of one who is paired with nobody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    monkeypatch.delenv("ONEBOX_POOL", raising=False)
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"model": "cnn", "data": "digits", "epochs": 2}))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/else"], "there is no folder nowhere/else; give that of a run, or hosts"),
        (["runs/two"], "there is no folder runs/two; give that of a run, or hosts"),
        (["runs"], "no config.json"),
        (["./lab1"], "there is no folder"),
        (["runs/one/config.json"], "is a file; give the folder of a run"),
        (["lab1"], "onebox pair"),
        (["lab1,,"], "lab1"),
        (["runs/one", "--port", "65536"], "--port 65536: allowed are 1 to 65535"),
    ],
    ids=str,
)
def test_what_cannot_be_watched(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_no_run_at_all(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(here / "runs")
    assert main(["watch"]) == 2
    assert "give the folder of a run, or the host of an agent" in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", "runs/one", "--port", str(port)]) == 2
    assert f"the page cannot be served at 127.0.0.1, port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_newest_run_is_served_until_a_signal(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[tuple[str, bytes]] = []

    def visit() -> None:
        end_s, url = time.monotonic() + WITHIN_S, ""
        while not url and time.monotonic() < end_s:
            time.sleep(0.01)
            url = "".join(word for word in capsys.readouterr().out.split() if word.startswith("http"))
        try:
            with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
                found.append((url, answer.read()))
        finally:
            os.kill(os.getpid(), number)

    visitor = threading.Thread(target=visit)
    visitor.start()
    assert main(["watch"]) == 0
    visitor.join(WITHIN_S)
    ((url, body),) = found
    assert url.startswith("http://127.0.0.1:") and b"<title>onebox</title>" in body
    assert not [each for each in threading.enumerate() if each.name.startswith("onebox-page")]


@pytest.mark.parametrize("command", ["train", "run", "serve"])
def test_the_port_of_a_page_needs_a_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [command, "--page-port", "8000", *(["script.py"] if command == "run" else [])]
    assert main(line) == 2
    assert "--page-port 8000 is for a page; it needs --page" in capsys.readouterr().err
