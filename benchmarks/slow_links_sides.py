"""The sides of ``slow_links.py`` by name, and the processes on hosts of a network that run them.

A process reads requests from its standard input and answers each, a JSON object in a line: ``slow_links_torch.py`` is
one on each host, with the sides of PyTorch, and ``slow_links_onebox.py`` one on the first host, a client of onebox.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.net.hosts import Host

SCRIPTS = {"torch": "slow_links_torch.py", "onebox": "slow_links_onebox.py"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """A side.

    Args:
        by: The program that has it.
        about: What it is.
        periodic: Whether it exchanges something large in one of ``every`` steps only, so that it is run for as many.
        measures: Whether its plan depends on the measured links, so that it is made when these are limited.
        codec: The codec of the gradients that a plan by hand names.
        static: Whether it is one of the plans, all exact, that the adaptive side is compared with.
    """

    by: Literal["torch", "onebox"]
    about: str
    periodic: bool = False
    measures: bool = False
    codec: str = ""
    static: bool = False


SIDES = {
    "ddp": Side(by="torch", about="DistributedDataParallel"),
    "ddp fp16": Side(by="torch", about="the same with its fp16 hook"),
    "ddp powersgd": Side(by="torch", about="the same with its PowerSGD hook, and one bucket"),
    "post-local sgd": Side(by="torch", about="post-local SGD, averaged every so many steps", periodic=True),
    "sync": Side(by="onebox", about="data parallel, exact sums", static=True),
    "sync bf16": Side(by="onebox", about="data parallel, gradients as bf16", codec="bf16"),
    "sync int8": Side(by="onebox", about="data parallel, gradients as int8", codec="int8"),
    "gated": Side(by="onebox", about="lossy gradients allowed", measures=True),
    "islands": Side(by="onebox", about="an island on each host, outer Nesterov SGD", periodic=True),
    "default": Side(by="onebox", about="a trainer without any choice", measures=True, static=True),
    "single": Side(by="onebox", about="the device of the client alone", static=True),
    "pipelined": Side(by="onebox", about="a stage on each device, 1F1B", static=True),
    "adaptive": Side(by="onebox", about="the planner's plan, which follows the link", measures=True),
}
"""All sides. Those that are exact compute the same, whoever has them."""

FIXED = ("sync", *(name for name, side in SIDES.items() if side.codec), "single")
"""Choices by hand of who allows lossy gradients, as the gated side does, whose planner may take one device only."""

DROPPED = ("pipelined", "adaptive")
"""Sides of the drops of a link only."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all sides of a group are run with.

    Args:
        size: A name of ``slow_links_model.SIZES``.
        addresses: Of the hosts.
        batch: Sequences of a step, over all devices; 0 for as many as the size has.
        dtype: Of the parameters.
        every: Inner steps of an island, and of post-local SGD, for each exchange.
        outer_rate: The outer learning rate.
        outer_momentum: Its momentum.
        fragments: Parts of the model that islands exchange one at a time.
        overlap: Steps during which the sums of an outer step travel while islands go on.
        compression: The codec of outer gradients.
        rank: Of PowerSGD's approximation.
    """

    size: str
    addresses: tuple[str, ...]
    batch: int = 0
    dtype: str = "float32"
    every: int = 30
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    compression: str = "none"
    rank: int = 4

    @classmethod
    def parsed(cls, text: str) -> Setting:
        """Return the setting that a command line has, from :meth:`text`."""
        given = json.loads(text)
        return cls(**given | {"addresses": tuple(given["addresses"])})

    @property
    def text(self) -> str:
        """Return it for a command line."""
        return json.dumps(asdict(self))


def serve(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer requests until standard input ends.

    Args:
        handlers: For each request its function, which gets the other fields.
    """
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(handlers[request.pop("do")](**request)), flush=True)


class Process:
    """A process on a host that answers requests.

    Args:
        host: The host.
        script: Of this folder.
        arguments: Of its command line.
        env: More of its environment.
        output: A file for what it prints as errors.
    """

    def __init__(
        self, host: Host, script: str, arguments: Sequence[str], *, env: Mapping[str, str], output: Path
    ) -> None:
        self.name = f"{script} on {host.name}"
        self._output = output
        command = host.command(sys.executable, str(Path(__file__).with_name(script)), *arguments)
        with output.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=dict(env)
            )

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, within_s: float) -> dict[str, Any]:
        """Return the answer to the last request.

        Raises:
            RuntimeError: The process has ended, or it takes too long.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(0.0, within_s))[0]:
            raise RuntimeError(f"{self.name} has not answered in time; {self._said()}")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def finish(self) -> None:
        """Let the process end. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdout is not None
        self.finish()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=30)
        self._process.stdout.close()

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"{self.name} ended with status {self._process.wait(timeout=30)}; {self._said()}")

    def _said(self) -> str:
        return f"it printed: {self._output.read_text(errors='replace')[-2000:].strip() or 'nothing'}"


class Crew:
    """Processes that do the same at the same time.

    Args:
        processes: One or several.
        within_s: For how long an answer is waited for.
    """

    def __init__(self, processes: Sequence[Process], within_s: float) -> None:
        self._processes, self._within_s = processes, within_s

    def ask(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Return what each process answers to a request."""
        for process in self._processes:
            process.send({"do": do, **fields})
        end_s = time.monotonic() + self._within_s
        return [process.answer(end_s - time.monotonic()) for process in self._processes]

    def steps(self, side: str, count: int) -> float:
        """Run steps of a side; return the seconds that the slowest process took."""
        return max(float(answer["seconds"]) for answer in self.ask("steps", side=side, count=count))

    def loss(self, side: str) -> float:
        """Return the loss of a side on the held-out text."""
        return float(self.ask("loss", side=side)[0]["loss"])
