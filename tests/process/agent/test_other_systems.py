"""Clients on macOS and Windows, as far as Linux can be made to look like them: see ``tests.other_system``."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit import warm
from tests.kit.reference import AGREE
from tests.process.agent.hosts import Host

WITHIN_S = 500.0
ROOT = Path(__file__).resolve().parents[3]

LOCK = """
import os, sys
from onebox import portable
first, second = (os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(2))
portable.lock_file(first)
try:
    portable.lock_file(second)
except BlockingIOError:
    print(portable.SYSTEM, portable.access_of_others(os.stat(sys.argv[1])).writable, hasattr(portable.os, "eventfd"))
portable.sync(portable.Path(sys.argv[1]).parent)
"""


def on(platform: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as another system would."""
    command = [sys.executable, "-m", "tests.other_system", platform, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=warm.single(), capture_output=True, text=True, timeout=WITHIN_S, check=False
    )


@pytest.mark.feature("Installation: Use a client on macOS or Windows")
@pytest.mark.parametrize(("platform", "system"), [("win32", "Windows"), ("darwin", "macOS")])
def test_a_client_of_another_system_trains_as_one_process_does(
    hosts: tuple[Host, Host], folder: Path, tmp_path: Path, platform: str, system: str
) -> None:
    spec = ",".join(f"{host.address}/cpu" for host in hosts)
    done = on(platform, str(Path(__file__).with_name("other_client.py")), spec, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["system"] == system and found["modules"] > 400 and found["batches"] == 20
    assert max(found["planned"], found["virtual device"]) <= AGREE
    for name in "cpu*2", "auto", "sim*2":
        assert found[name].startswith(
            f"pool {name!r} asks for workers of this machine, which run on Linux alone, and this machine has {system}; "
            "name hosts with Linux where 'onebox serve' runs"
        )
    assert "hosts.toml' cannot be read" in found["file of hosts"]
    assert found["processes"] == f"process_by='processes' needs Linux, and this machine has {system}; say 'threads'"
    assert found["stopped"] == 143
    assert [host.held() for host in hosts] == [0, 0]


@pytest.mark.parametrize(("platform", "printed"), [("win32", "Windows False False"), ("darwin", "macOS True False")])
def test_files_are_locked_and_synced_in_the_ways_of_another_system(tmp_path: Path, platform: str, printed: str) -> None:
    (tmp_path / "lock.py").write_text(LOCK, encoding="utf-8")
    (tmp_path / "lock").touch()
    (tmp_path / "lock").chmod(0o666)
    done = on(platform, str(tmp_path / "lock.py"), str(tmp_path / "lock"))
    assert (done.returncode, done.stdout) == (0, f"{printed}\n"), done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_unit_tests_of_a_public_host_pass(platform: str) -> None:
    workflow = (ROOT / ".github" / "workflows" / "clients.yml").read_text(encoding="utf-8")
    _, _, arguments = workflow.partition("python -m pytest ")
    done = on(platform, "-m", "pytest", "-p", "no:cacheprovider", *shlex.split(arguments))
    assert done.returncode == 0, done.stdout[-4000:]
