"""A model and a loss of the user's own in a real run: the result of one process, imported by the command alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from onebox.cli.models import seeded
from onebox.feed import Feed, load_dataset
from tests.process.cli.commands import POOL, command, metrics

OWN = """
import os
from pathlib import Path

from torch import nn
from torch.nn import functional

with Path(__file__).with_name("imported").open("a") as file:
    print(os.getpid(), file=file)


class Net(nn.Module):
    def __init__(self, data, width=24):
        super().__init__()
        channels, height, rows = data.shape
        self.first = nn.Linear(channels * height * rows, width).double()
        self.last = nn.Linear(width, data.classes).double()

    def forward(self, images):
        return self.last(self.first(images.flatten(1).double() / 255).tanh())


def smooth(outputs, targets):
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)
"""


def one_process() -> tuple[list[float], list[float]]:
    """Train as the commands do, with PyTorch alone; return the steps' losses and the epochs' accuracies."""
    data = load_dataset("digits")
    with seeded(4):
        first, last = nn.Linear(64, 24).double(), nn.Linear(24, 10).double()
    optimizer = torch.optim.AdamW([*first.parameters(), *last.parameters()], lr=1e-2, weight_decay=1e-2)

    def forward(images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = last(first(images.flatten(1).double() / 255).tanh())
        return logits

    losses, accuracies = [], []
    feed = Feed(data.train, batch_size=64, seed=4)
    for epoch in range(2):
        with feed.epoch(epoch) as batches:
            for images, targets in batches:
                loss = functional.cross_entropy(forward(images), targets, label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        correct = forward(data.test.images).argmax(1) == data.test.labels
        accuracies.append(correct.double().mean().item())
    return losses, accuracies


@pytest.mark.feature("Command line: Train a model and loss of one's own")
def test_a_run_of_an_own_model_and_loss(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    flags = ["--model", "own:Net", "--loss", "own:smooth", "--lr", "0.01", "--seed", "4", "--run", "run", *POOL]
    done = command(["train", *flags, "--epochs", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "own:Net of 1,810 parameters" in done.stdout
    assert len((tmp_path / "imported").read_text().splitlines()) == 1  # not by a worker
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["model"], config["loss"]) == ("own:Net", "own:smooth")

    done = command(["train", "--resume", "run", "--epochs", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    records = metrics(tmp_path / "run")
    losses, accuracies = one_process()
    steps = [record["loss"] for record in records if record["event"] == "step"]
    assert steps == pytest.approx(losses, rel=1e-9)
    assert [record["test_accuracy"] for record in records if record["event"] == "epoch"] == pytest.approx(accuracies)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = command(["train", "--resume", str(tmp_path / "run"), "--epochs", "3"], elsewhere)
    assert done.returncode == 2
    assert f"--model own:Net: there is no module own, neither in the current folder, {elsewhere}" in done.stderr


def test_planning_and_profiling_an_own_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    pool, own = ["--pool", "cpu", "--threads", "1"], ["--model", "own:Net", "--loss", "own:smooth"]
    line = ["plan", *pool, *own, "--micro-batches", "32", "--budget", "0.2", "--show-memory", "--out", "plan.json"]
    done = command(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "onebox train --model own:Net --loss own:smooth --pool cpu --threads 1 --plan plan.json" in done.stdout
    done = command(["plan", *pool, *own, "--check", "plan.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    done = command(["profile", *pool, *own, "--micro-batches", "8"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "segments on cpu, micro-batches of 8" in done.stdout
    done = command(["memory", *pool, *own, "--memory", "64MiB", "--plan", "plan.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "own:Net, batch 64, adamw" in done.stdout
