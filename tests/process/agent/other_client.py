"""A client of two agents, for another system than Linux; prints what came of it as JSON. See ``tests.other_system``."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox import portable
from onebox.errors import UsageError
from onebox.feed import Feed
from onebox.feed.sources import NumpyFiles
from tests.other_system import SOURCE
from tests.unit.test_portable import of_linux

STEPS, BATCH = 20, 8
RATE = 1e-2


def import_all() -> int:
    """Import all modules that are not of Linux alone."""
    names = {
        ".".join(("onebox", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCE.rglob("*.py")
    }
    found = [name for name in sorted(names) if not of_linux(name) and not name.endswith("__main__")]
    for name in found:
        importlib.import_module(name)
    return len(found)


def model() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).double()


def feed(folder: Path, by: Any = "auto") -> Feed:
    """Return batches from files; a transform that draws, which Linux would run in processes."""
    return Feed(
        NumpyFiles(folder / "x.npy", folder / "y.npy"), batch_size=BATCH, seed=5, transform=noisy, process_by=by
    )


def noisy(sample: Any) -> Tensor:
    """Add noise."""
    x = torch.as_tensor(sample)
    return x + torch.rand_like(x) / 10


def write(folder: Path) -> None:
    """Write the data."""
    generator = np.random.default_rng(1)
    np.save(folder / "x.npy", generator.standard_normal((STEPS * BATCH, 12)))
    np.save(folder / "y.npy", generator.integers(0, 4, STEPS * BATCH))


def plain(batches: list[tuple[Tensor, Tensor]], device: str) -> list[float]:
    """Train by a plain loop."""
    net = model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    losses = []
    for x, y in batches:
        loss = functional.cross_entropy(net(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def planned(pool: onebox.Pool, batches: list[tuple[Tensor, Tensor]], folder: Path) -> list[float]:
    """Train by a trainer, both devices on a part of each batch; in the middle another one goes on from a checkpoint."""
    plan = onebox.Plan.data_parallel(range(2), (1.0, 1.0))
    losses, half = [], STEPS // 2
    for begin in 0, half:
        net = model()
        parts = net, functional.cross_entropy, torch.optim.AdamW(net.parameters(), lr=RATE)
        made = (
            onebox.Trainer.resume(folder, *parts, pool=pool) if begin else onebox.Trainer(*parts, pool=pool, plan=plan)
        )
        with made as trainer:
            losses += [float(trainer.step(x, y)) for x, y in batches[begin : begin + half]]
            trainer.save(folder)
    return losses


def stopped() -> int:
    """Return the exit status of a loop that does not end in time after SIGTERM."""
    try:
        with onebox.StopSignals(within_s=0.2) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s:
                time.sleep(0.01)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def refusal(action: Any) -> str:
    """Return the message of a usage error."""
    try:
        action()
    except UsageError as error:
        return str(error)
    return ""


def difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main(spec: str, place: str) -> None:
    """Do all that a client does."""
    folder = Path(place)
    write(folder)
    made = [(x.clone(), y.clone()) for x, y in feed(folder).epoch(0)]
    expected = plain(made, "cpu")
    found: dict[str, Any] = {"system": portable.SYSTEM, "modules": import_all(), "batches": len(made)}
    with onebox.open(spec, threads=1) as pool:
        found["planned"] = difference(planned(pool, made, folder / "checkpoint"), expected)
        found["virtual device"] = difference(plain(made, "vgpu:1"), expected)
    for name in "cpu*2", "auto", "sim*2":
        found[name] = refusal(lambda name=name: onebox.open(name))  # type: ignore[misc]
    found["file of hosts"] = refusal(lambda: onebox.open("C:\\keys\\hosts.toml"))
    found["processes"] = refusal(lambda: next(iter(feed(folder, "processes").epoch(0))))
    found["stopped"] = stopped()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
