"""Commands on the client's host as macOS or Windows would run them: see ``tests.other_system``.

Windows' output to a file or a pipe is of few characters, so that it is here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.net.fleet import Fleet
from tests.net.hosts import Network

WITHIN_S = 200.0
JOB = ("--model", "mlp", "--data", "digits")
ENCODINGS = {"win32": "ascii", "darwin": "utf-8"}

SCRIPT = """
import torch
from torch import nn
net = nn.DataParallel(nn.Linear(4, 2).cuda())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.ones(6, 4, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.cuda.device_count(), loss.item() > 0)
"""

CHILD = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", "import torch; torch.ones(2, device='cuda')"]).returncode)
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["win32", "darwin"])
def platform(request: pytest.FixtureRequest) -> str:
    """The other system."""
    return str(request.param)


@pytest.fixture
def command(fleet: Fleet, network: Network, platform: str, tmp_path: Path) -> Command:
    """Run ``onebox`` on the client's host, on the other system."""

    def run(*arguments: str, who: str = "client", given: str = "") -> subprocess.CompletedProcess[str]:
        line = (sys.executable, "-m", "tests.other_system", platform, "-m", "onebox", *arguments)
        environment = fleet.environment(who) | {
            "PYTHONIOENCODING": ENCODINGS[platform],
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        return network["client"].run(*line, env=environment, given=given, timeout_s=WITHIN_S)

    return run


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command has printed that has not failed."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_client_is_paired_by_a_code(fleet: Fleet, network: Network, command: Command, platform: str) -> None:
    green = network["green"].address
    before = len(fleet.printed("green"))
    accepting = fleet.python("green", "green", "-m", "onebox", "pair", "accept")
    try:
        code = ""
        while not code and accepting.poll() is None:
            code = "".join(re.findall(r"^code, .*:  (\S+)$", fleet.printed("green")[before:], re.MULTILINE))
            time.sleep(0.05)
        who = f"ana-{platform}"
        printed(command("pair", "connect", green, "--name", f"{who}@desk", who=who, given=f"{code}\n"))
        assert accepting.wait(20) == 0
    finally:
        accepting.kill()
        accepting.wait(30)
    assert green in printed(command("pair", "list", who=who))
    assert green in printed(command("status", who=who))
    assert "started" in printed(command("logs", green, who=who))


@pytest.mark.feature("Installation: Use a client on macOS or Windows")
def test_a_model_is_planned_and_trained(fleet: Fleet, command: Command, tmp_path: Path) -> None:
    spec = fleet.spec("red", "green")
    plan = tmp_path / "plan.json"
    printed(command("plan", *JOB, "--pool", spec, "--out", str(plan)))
    run = tmp_path / "run"
    options = ("--pool", spec, "--plan", str(plan), "--epochs", "1", "--run", str(run))
    said = printed(command("train", *JOB, *options))
    assert float(re.findall(r"test accuracy (\d+\.\d) %", said)[-1]) > 80
    assert "it fits" in printed(command("memory", *JOB, "--pool", "sim*2"))


def test_a_script_runs_on_the_devices(fleet: Fleet, command: Command, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    spec = fleet.spec("red", "green")
    assert printed(command("run", "--pool", spec, str(tmp_path / "script.py"))).split() == ["2", "True"]


def test_a_child_of_a_script_says_why_it_has_no_device(
    fleet: Fleet, command: Command, platform: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(CHILD, encoding="utf-8")
    done = command("run", "--pool", fleet.spec("red"), str(tmp_path / "script.py"))
    if platform == "darwin":  # which has the sockets for it
        printed(done)
    else:
        assert done.returncode == 1
        assert "cannot share them on Windows" in done.stderr or "cannot share them on Linux" in done.stderr


def test_what_runs_on_linux_alone_is_refused(command: Command, platform: str) -> None:
    system = {"win32": "Windows", "darwin": "macOS"}[platform]
    for arguments, what in (
        (("train", *JOB, "--pool", "cpu*2"), "pool 'cpu*2' asks for workers of this machine, which run"),
        (("serve",), "'onebox serve' runs"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert f"onebox: {what} on Linux alone, and this machine has {system}; " in done.stderr
    assert f"workers run on Linux, and this machine has {system}" in printed(command("env"))
