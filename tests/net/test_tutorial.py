"""The tutorial on two machines, as it is written, on two hosts of a network."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.waiting import until
from tests.net.fleet import ROOT, START_S
from tests.net.hosts import Host, Network, tool, unavailable

PAGE = (ROOT / "docs" / "tutorials" / "two-machines.md").read_text()
COMMANDS = re.findall(r"^(lab1|desk)\$ onebox (.+)$", PAGE, re.MULTILINE)


class Terminal:
    """A host on which the commands of one person are run, in a folder with keys of its own."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.folder = folder
        folder.mkdir()
        self.environment = {"ONEBOX_CONFIG": str(folder / "keys"), "PYTHONPATH": f"{ROOT / 'src'}"}

    def _line(self, words: list[str]) -> list[str]:
        return ["sh", "-c", f'cd "{self.folder}" && exec "$@"', "sh", sys.executable, "-m", "onebox", *words]

    def run(self, words: list[str], given: str = "") -> str:
        done = self.host.run(*self._line(words), env=self.environment, given=given, timeout_s=300)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start(self, words: list[str]) -> tuple[subprocess.Popen[bytes], Callable[[], str]]:
        output = self.folder / f"{words[0]}.out"
        return self.host.start(*self._line(words), env=self.environment, output=output), output.read_text


def wait_for(pattern: str, process: subprocess.Popen[bytes], printed: Callable[[], str]) -> str:
    """Return what a pattern finds in the output of a process once it is there."""
    found = until(lambda: process.poll() is not None or re.search(pattern, printed(), re.MULTILINE), START_S)
    assert isinstance(found, re.Match), printed()
    return found[found.re.groups]


@pytest.mark.feature("Agents: Pair client and agent by a code")
def test_the_tutorial_on_two_machines(tmp_path: Path) -> None:
    why = unavailable()
    if why:
        pytest.skip(why)
    assert [command.split()[0] for _, command in COMMANDS][:3] == ["pair", "pair", "serve"]
    with Network(["lab1", "desk"]) as network:
        for host in network.hosts.values():  # as machines have it, and by which an agent finds its own address
            tool("ip", "-n", host.space, "route", "add", "default", "dev", "eth0")
        terminals = {name: Terminal(network[name], tmp_path / name) for name in ("lab1", "desk")}
        running: list[subprocess.Popen[bytes]] = []
        code = ""
        try:
            for name, command in COMMANDS:
                words = [re.sub(r"^lab1\b", network["lab1"].address, word) for word in shlex.split(command)]
                if words[:2] == ["pair", "accept"]:
                    process, printed = terminals[name].start(words)
                    running.append(process)
                    code = wait_for(r"^code, .*:  (\S+)$", process, printed)
                elif words[0] == "serve":
                    root = ["--allow-root"] if not os.geteuid() else []  # users of leases may not read this folder
                    process, printed = terminals[name].start([*words, *root])
                    running.append(process)
                    wait_for(r'("started")', process, printed)
                else:
                    said = terminals[name].run(words, given=f"{code}\n" if words[0] == "pair" else "")
                    assert said.strip()
                    if words[0] == "train":
                        assert re.search(r"test accuracy \d", said), said
            running[-1].send_signal(signal.SIGTERM)
            assert running[-1].wait(30) in (0, 143)
        finally:
            for process in running:
                process.kill()
                process.wait(30)
