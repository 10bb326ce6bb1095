"""A client, an agent and workers of which one side is of another version: one error, which names both."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onebox
from onebox.errors import PoolError, WorkerDied
from onebox.pool.backends.agents.agent_source import connect_agent
from onebox.pool.errors import WorkerLocation
from onebox.pool.keys.keyring import identity
from onebox.pool.launch import zygotes
from onebox.pool.launch.worker_process import WorkerProcess
from onebox.wire import new_keys
from onebox.wire.protocol.agents import Want
from onebox.worker import WorkerConfig
from tests.kit import warm
from tests.process.agent.hosts import NOTICED_S, Host, start

LATER = "9.9.9"
HERE = onebox.__version__
CLIENT = """
import sys
import onebox

onebox.open(sys.argv[1] + "/cpu", threads=1)
"""


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a later version: of another protocol, whose clients say more when they introduce themselves."""
    folder = tmp_path_factory.mktemp("later")
    package = folder / "onebox"
    shutil.copytree(Path(onebox.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in (
        ("version.py", rf'"{re.escape(HERE)}"', f'"{LATER}"'),
        ("wire/protocol/agents.py", r"(?m)^AGENT_PROTOCOL = \d+", "AGENT_PROTOCOL = 999"),
        ("wire/protocol/agents.py", r"(?m)^    python: str$", "    python: str\n    system: str = 'Linux'"),
        ("worker/process/config.py", r"(?m)^    cores: tuple", "    niceness: int = 0\n    cores: tuple"),
    ):
        text, changed = re.subn(old, new, (package / name).read_text())
        assert changed == 1, name
        (package / name).write_text(text)
    return folder


@pytest.fixture
def host(folder: Path) -> Host:
    """An agent of this version, which the test ends."""
    identity("client")
    (made,) = start(1)
    return made


def test_a_later_agent_and_a_later_client_are_refused_with_both_versions(host: Host, later: Path) -> None:
    """Leases of an agent end with a reason when a later version of it is started."""
    try:
        environment = {**warm.single(), "PYTHONPATH": str(later)}
        line = [sys.executable, "-c", CLIENT, host.address]
        told = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert told.stderr.splitlines()[-1].startswith("onebox.errors.PoolError: ")
        assert f"this client runs onebox {LATER} " in told.stderr and f" runs onebox {HERE} " in told.stderr
        connection = connect_agent(host.address)
        try:
            (member,) = connection.lease([Want("cpu")], new_keys().public, cut_s=10 * NOTICED_S)
            host.kill()
            host.start_again(code=later)
            assert select.select([member.descriptor], [], [], NOTICED_S)[0], "nothing was told"
            both = rf"says: versions that do not match: this client runs onebox {HERE} .* runs onebox {LATER} "
            assert re.search(rf"{both}|the agent does not know of it any more: it has ended", str(member.death()))
            with pytest.raises(PoolError, match=both):
                connection.inspect()
        finally:
            connection.close()
        with pytest.raises(PoolError, match=rf"this client runs onebox {HERE} .* runs onebox {LATER} "):
            connect_agent(host.address)
    finally:
        host.kill()


def test_a_worker_of_a_version_that_was_installed_meanwhile_says_so(
    later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "__file__", str(later / "onebox/pool/launch/zygotes.py"))
    keys = new_keys()
    config = WorkerConfig("cpu", 1, keys.public, keys.secret, keys.public, owner=os.getpid())
    worker = WorkerProcess(WorkerLocation(worker=0, host="localhost", device="cpu"), config, None, None)
    try:
        with pytest.raises(WorkerDied, match=rf"onebox {HERE} has started this worker, but .* onebox {LATER}") as told:
            worker.ports()
        assert "Traceback" not in str(told.value)
    finally:
        worker.close(grace_s=0.0)
