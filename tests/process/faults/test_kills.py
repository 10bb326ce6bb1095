"""Whichever process is killed, at whatever moment and in whatever order: what is left goes on, and ends with its owner.

The scene: an agent; a client that opens pools of a worker of its own and of one of the agent, and lets them exchange
tensors; the zygotes of both. One process after another is killed; an agent or a client is started again. At last all
are, in any order, and nothing is left: no process, file or socket. Memory that is shared has no name, but for that of
libraries in ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onebox.forking import adopt_orphans
from onebox.pool import open_pool
from onebox.pool.keys.keyring import KnownAgent, identity, remember_agent
from onebox.wire import KeyPair, new_keys
from tests.kit import warm
from tests.kit.waiting import until
from tests.process.faults.scripts import REPOSITORY

KINDS = ("client", "agent", "zygote of the client", "zygote of the agent", "worker")
MOST_S = 1.0
"""A process is killed up to so long after the one before has been seen to matter no more."""

WAIT_S = 240.0
"""Whatever is started is there within this time, and whatever has lost its owner has ended."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)

AGENT = """
import sys
from onebox.agent import Agent, ClientLimits, Offered
from onebox.wire import KeyPair

public, secret, port = sys.argv[1:]
agent = Agent(
    keys=KeyPair(public, secret),
    name_of=lambda key: "ana",
    bind="127.0.0.1",
    port=int(port),
    advertise="127.0.0.1",
    offers=[Offered(device="cpu", name="a CPU", memory_bytes=1 << 36, threads=1024)],
    limits=ClientLimits(),
    tell=lambda event, **fields: None,
)
print(agent.endpoint, flush=True)
agent.run()
"""

CLIENT = """
import sys, time
import torch
import onebox

while True:
    try:
        with onebox.open(f"cpu,{sys.argv[1]}/cpu", threads=1, grace_s=5.0):
            x = torch.ones(1 << 18, device="vgpu:0")
            for _ in range(10):
                x = (x.to("vgpu:1") * 1).to("vgpu:0")
            assert x.sum().item() == 1 << 18
        print("done", flush=True)
    except (onebox.errors.OneboxError, RuntimeError) as error:
        print(f"failed: {error}", flush=True)
"""


class Scene:
    """An agent and a client in processes of their own, which are started again when they are killed.

    Args:
        folder: For the client's output.
    """

    def __init__(self, folder: Path) -> None:
        self.keys: KeyPair = new_keys()
        self._output = folder / "said"
        self._memories = named_memories()
        self._before = {each.pid for each in psutil.Process().children(recursive=True)}
        self._agent, self.endpoint = self._start_agent("0")
        remember_agent(KnownAgent(self.endpoint, self.keys.public, "host"))
        self._client = self._start_client()

    def family(self) -> list[psutil.Process]:
        """Return all processes of the scene that run; those that have ended are reaped, whose parents have."""
        found = []
        me = psutil.Process()
        for each in me.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if each.pid in self._before:
                    continue
                if each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
                elif each.pid not in (self._agent.pid, self._client.pid) and each.ppid() == me.pid:
                    os.waitpid(each.pid, 0)
        return found

    def find(self, kind: str) -> psutil.Process | None:
        """Return a process of a kind, if there is one now."""
        owners = {"client": self._client.pid, "agent": self._agent.pid}
        for each in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if kind in owners:
                    if each.pid == owners[kind]:
                        return each
                elif kind == "worker":
                    if each.name() == "onebox-worker":
                        return each
                elif each.name() == "onebox-zygote" and each.ppid() == owners[kind.rpartition(" ")[2]]:
                    return each
        return None

    def kill(self, process: psutil.Process) -> None:
        """Kill a process; start it again if it is the agent or the client."""
        with contextlib.suppress(psutil.NoSuchProcess):  # such as a worker whose pool was closed
            process.kill()
        if process.pid == self._agent.pid:
            self._end_agent()
            self._agent, _ = self._start_agent(self.endpoint.rpartition(":")[2])
        if process.pid == self._client.pid:
            self._client.wait()
            self._client = self._start_client()

    def files(self) -> set[Path]:
        """Return the temporary files, sockets and named memories that there are, but for the locks of cores, which are
        kept for all of a user's processes."""
        left = Path(tempfile.gettempdir()).iterdir()
        temporary = {each for each in left if not each.name.startswith("onebox-cores-")}
        return temporary | (named_memories() - self._memories)

    def rounds(self) -> int:
        """Return how many pools clients have used from beginning to end."""
        return self._output.read_text().count("done\n")

    def close(self) -> None:
        """Kill the agent and the client."""
        for each in (self._agent, self._client):
            each.kill()
        self._end_agent()
        self._client.wait()

    def _end_agent(self) -> None:
        self._agent.wait()
        assert self._agent.stdout is not None
        self._agent.stdout.close()

    def _start_agent(self, port: str) -> tuple[subprocess.Popen[str], str]:
        line = [sys.executable, "-c", AGENT, self.keys.public, self.keys.secret, port]
        made: subprocess.Popen[str] = warm.Popen(
            line, cwd=REPOSITORY, env=warm.single(), stdout=subprocess.PIPE, text=True
        )
        assert made.stdout is not None
        return made, made.stdout.readline().strip().removeprefix("tcp://")

    def _start_client(self) -> subprocess.Popen[str]:
        with self._output.open("a") as output:
            line = [sys.executable, "-c", CLIENT, self.endpoint]
            return warm.Popen(
                line, cwd=REPOSITORY, env=warm.single(), stdout=output, stderr=subprocess.DEVNULL, text=True
            )


def named_memories() -> set[Path]:
    """Return the shared memories of this machine that have a name of ours."""
    return set(Path("/dev/shm").glob("onebox*"))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """All of its processes stay descendants of this one, whatever becomes of their parents; temporary files are in a
    folder of their own, whose path has room for sockets."""
    temporary = tempfile.TemporaryDirectory(prefix="kills-")
    monkeypatch.setenv("TMPDIR", temporary.name)
    monkeypatch.setattr(tempfile, "tempdir", temporary.name)
    monkeypatch.setenv("ONEBOX_CONFIG", str(tmp_path / "keys"))
    monkeypatch.delenv("ONEBOX_POOL", raising=False)
    identity("client")
    adopt_orphans()
    try:
        made = Scene(tmp_path)
        try:
            yield made
        finally:
            made.close()
            for each in made.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            until(lambda: not made.family())
    finally:
        ctypes.CDLL(None).prctl(_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)
        temporary.cleanup()


@pytest.mark.feature("Recovery: Leave no process behind")
@pytest.mark.parametrize(
    ("seed", "count"), [(1, 12), pytest.param(2, 200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_nothing_is_left_of_processes_that_are_killed_at_random_moments(scene: Scene, seed: int, count: int) -> None:
    draw = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    draw.shuffle(kinds)
    for kind in kinds:
        try:
            found = until(lambda: scene.find(kind), within_s=WAIT_S)  # noqa: B023 - it is called at once
        except AssertionError as error:
            raise AssertionError(f"no {kind}, but {scene.family()}") from error
        time.sleep(draw.uniform(0, MOST_S))
        scene.kill(found)
    rounds = scene.rounds()
    until(lambda: scene.rounds() >= rounds + 2, within_s=WAIT_S)
    last = list(KINDS)
    draw.shuffle(last)
    for kind in last:
        process = scene.find(kind)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(draw.uniform(0, MOST_S / 10))
    until(lambda: not scene.family(), within_s=WAIT_S)
    with open_pool("cpu*1", threads=1):
        pass  # which removes folders of sockets that were left
    assert scene.files() == set()
