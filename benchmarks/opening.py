"""How long does it take to open a pool of this machine, and how much of the processors?

To import torch is nearly all of what a worker's start takes. A zygote does it once and forks the workers; here
that is compared with workers that are started from nothing, in turn, in one process. The first pool of a process is
the one that starts the zygote; those after it find it there.

The second table is what a worker's first optimizer takes, to be made and to step once: by the class of ``torch.optim``,
which imports PyTorch's compiler, and by what a worker makes of it, which does not; each in a process of its own, in
turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import finish, show, spread

from onebox.pool import open_pool
from onebox.pool.backends import local
from onebox.pool.launch.zygotes import OWN, Zygotes

SIDES = ("from nothing", "first, by a zygote", "by a zygote")

OPTIMIZERS = {"torch.optim": "torch.optim.AdamW", "a worker's": 'without_compiler("AdamW")'}
"""What makes an optimizer, by whose it is."""

FIRST_STEP = """
import json, time
import psutil, torch
from onebox.worker.process import main as worker
from onebox.worker.optimizer.native import without_compiler

weight = torch.zeros(8, 8)
weight.grad = torch.ones(8, 8)
before_bytes, begin_s, processor_s = psutil.Process().memory_full_info().uss, time.monotonic(), time.process_time()
{kind}([weight]).step()
spent = time.monotonic() - begin_s, time.process_time() - processor_s
print(json.dumps([*spent, (psutil.Process().memory_full_info().uss - before_bytes) / 1e6]))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    rows: list[list[str]] = []
    result: dict[str, Any] = {}
    for workers in options.workers:
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, values in measure(workers).items():
                found[side].append(values)
        for side, values in found.items():
            seconds, processor = ([each[kind] for each in values] for kind in (0, 1))
            rows.append([str(workers), side, spread(seconds), spread(processor)])
            name = f"{workers} {side}"
            result |= {f"{name}: s": statistics.median(seconds), f"{name}: cpu_s": statistics.median(processor)}
    show("Opening a pool of CPU workers", ["workers", "started", "seconds", "CPU seconds"], rows)
    result |= show_first_steps(options.rounds)
    result |= show_commands(options.rounds)
    finish(result, as_json=options.json)


def show_first_steps(rounds: int) -> dict[str, float]:
    """Print what the first optimizer of a process takes, by whose it is; return the medians."""
    found: dict[str, list[list[float]]] = {side: [] for side in OPTIMIZERS}
    for _ in range(rounds):
        for side, kind in OPTIMIZERS.items():
            command = [sys.executable, "-c", FIRST_STEP.format(kind=kind)]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
            found[side].append(json.loads(ran.stdout))
    columns = {side: list(zip(*values, strict=True)) for side, values in found.items()}
    show(
        "The first optimizer of a worker: made, and one step",
        ["class", "seconds", "CPU seconds", "MB"],
        [[side, *map(spread, of)] for side, of in columns.items()],
    )
    return {
        f"first step, {side}: {name}": statistics.median(values)
        for side, of in columns.items()
        for name, values in zip(("s", "cpu_s", "mb"), of, strict=True)
    }


def show_commands(rounds: int) -> dict[str, float]:
    """Print what a script that imports PyTorch takes, by plain Python and under ``onebox run``; return the medians."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text("import torch\n")
        under = [sys.executable, "-m", "onebox", "run", "--pool", "cpu*2", "--threads", "1", str(script)]
        commands = {"python": [sys.executable, str(script)], "onebox run": under}
        found: dict[str, list[float]] = {side: [] for side in commands}
        for _ in range(rounds):
            for side, command in commands.items():
                begin_s = time.monotonic()
                subprocess.run(command, timeout=120, check=True)
                found[side].append(time.monotonic() - begin_s)
    found["difference"] = [under - plain for plain, under in zip(*found.values(), strict=True)]
    show("A script that imports PyTorch", ["", "seconds"], [[side, spread(values)] for side, values in found.items()])
    return {"start_s_over_python": statistics.median(found["difference"])}


def measure(workers: int) -> dict[str, tuple[float, float]]:
    """Open a pool in each way; return seconds until it is open, and processor time of all processes."""
    own: Any = local
    zygotes = Zygotes()
    try:
        found = {}
        for side, spawner in zip(SIDES, (None, zygotes, zygotes), strict=True):
            own.OWN = spawner
            found[side] = opened(workers)
        return found
    finally:
        own.OWN = OWN
        zygotes.close()


def opened(workers: int) -> tuple[float, float]:
    """Open and close a pool; return the seconds and the processor time until it was open."""
    before, begin_s = processor_s(), time.monotonic()
    with open_pool(f"cpu*{workers}", threads=1):
        return time.monotonic() - begin_s, processor_s() - before


def processor_s() -> float:
    """Return the processor time of this process and of all that it has started, and they."""
    total = 0.0
    for process in (psutil.Process(os.getpid()), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


if __name__ == "__main__":
    main()
