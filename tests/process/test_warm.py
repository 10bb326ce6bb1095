"""What tests start as a fork is what a new process would be: words, status, streams and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit import warm

LINES = {
    "a module": ["-m", "onebox", "--version"],
    "a wrong command": ["-m", "onebox", "nonsense"],
    "an error": ["-c", "import os, sys; print(sys.argv, __name__, os.getcwd(), sys.path[0]); 1/0", "word"],
    "a warning": [
        "-W",
        "error",
        "-c",
        "import sys, warnings; print(sys.warnoptions, sys.argv); warnings.warn('of it')",
    ],
    "a status": ["-c", "import sys; sys.exit(7)"],
    "a file": ["there/script.py", "--word"],
    "a pool": ["-m", "onebox", "run", "--pool", "cpu", "--threads", "1", "there/pool.py"],
}
SCRIPT = "import os, sys; print(sys.argv, __name__, __file__, sys.path[0], os.environ['ONE'], 'TWO' in os.environ)"
POOL = """
import os, psutil, torch
print(torch.arange(6.0, device="cuda").view(2, 3).sum(1).tolist(), torch.get_num_threads())
for child in psutil.Process().children():
    if child.name() == "onebox-zygote":
        (worker,) = child.children()
        print(worker.name(), os.getpgid(child.pid) == child.pid, child.num_threads())
"""


@pytest.mark.parametrize("line", LINES.values(), ids=list(LINES))
def test_it_says_and_returns_the_same(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "script.py").write_text(SCRIPT)
    (tmp_path / "there" / "pool.py").write_text(POOL)
    monkeypatch.setenv("TWO", "2")
    environment = {**warm.single(), "ONE": "1"}
    del environment["TWO"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True, "timeout": 100}
    line = [word.replace("there", f"{tmp_path}/there") for word in line]
    found = warm.run([sys.executable, *line], **options)
    expected = subprocess.run([sys.executable, *line], capture_output=True, check=False, **options)
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_is_a_child_of_this_process_and_hears_signals(number: signal.Signals) -> None:
    line = [sys.executable, "-c", "import os, time; print(os.getppid(), flush=True); time.sleep(60)"]
    with warm.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == os.getpid()
        process.send_signal(number)
        assert process.wait(60) == -number
