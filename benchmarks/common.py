"""What benchmarks share: models, machine, commit, tables, and the peers that run in processes of their own."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

BATCH = 200
"""Samples of a batch on one device, as in the published experiment (Yang 2018)."""


BUDGET_S = 240.0
"""Seconds after which a benchmark begins nothing that it could leave out, so that it ends within five minutes."""


class Budget:
    """The time of a benchmark, which begins with this.

    Args:
        long: Whether there is no limit.
        clock: Returns the time in seconds.

    Example:
        >>> list(Budget(long=True).rounds(3, 0.5))
        [0, 1, 2]
    """

    def __init__(self, *, long: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._long, self._clock, self._begin_s = long, clock, clock()

    def spent(self, share: float) -> bool:
        """Return whether a share of the time has passed."""
        return not self._long and self._clock() > self._begin_s + share * BUDGET_S

    def rounds(self, most: int, share: float, *, least: int = 2) -> Iterator[int]:
        """Yield the numbers of at most so many rounds, of which none but the least begins after a share of the time."""
        for number in range(most):
            if number >= least and self.spent(share):
                return
            yield number


class Cnn(nn.Module):
    """The network of PyTorch's MNIST example: two convolutions, two linear layers; 1.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images [B, 1, 28, 28] to logits [B, 10]."""
        return self.body(images.to(torch.float32) / 255.0)


class Mlp(nn.Module):
    """784 to 1024 to 1024 to 10; 1.9 million parameters, few operations for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 images [B, 1, 28, 28] to logits [B, 10]."""
        return self.body(images.to(torch.float32) / 255.0)


MODELS = {"cnn": Cnn, "mlp": Mlp}


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer (SGD with momentum), the same every time."""
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches(count: int, size: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return MNIST-shaped batches of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 256, (size, 1, 28, 28), dtype=torch.uint8, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


class Peer:
    """A process of ``peers.py`` that runs so many steps when told to and says how long they took.

    Args:
        *arguments: Its command line.
        script: Another script that does so.
    """

    def __init__(self, *arguments: str, script: str = "peers.py") -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def start(self, steps: int | str) -> None:
        """Begin to run steps, or to do what else a script understands."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()

    def seconds(self) -> float:
        """Wait for the steps to end and return how long they took."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with status {self._process.wait()}")
        return float(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the median of values with the least and the most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine() -> str:
    """Return the machine in a line."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {cores} cores{gpu}, Python {platform.python_version()}, torch {torch.__version__}"


def commit() -> str:
    """Return the commit, with a plus sign where the tree has changed since."""
    run = ["git", "-C", str(Path(__file__).parent)]
    name = subprocess.run([*run, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*run, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return (name.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, under the machine and the commit."""
    console = Console(width=120, highlight=False)
    console.print(f"{machine()}; commit {commit()}; command: {' '.join(['python', *sys.argv])}")
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def finish(result: dict[str, Any], *, as_json: bool) -> None:
    """Print the result as one JSON object, where asked for."""
    if as_json:
        print(json.dumps(result))
