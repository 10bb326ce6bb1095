"""What do batches of many lengths, and recurrent layers, cost where each shape has to be captured?

A transformer encoder of 4 layers is trained with batches of 8 to 71 words, as plain PyTorch in one process with one
thread, and by a Trainer on 2 workers with one thread each, in turn, a hundred steps at a time. The target is at most 4
captures and twice plain's time over 500 steps, captures included. An LSTM of two layers in both directions over 60
times is to have its first step within 3 s.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import commit, finish, machine, show
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.engine.workload import captures

WIDTH, WORDS, CLASSES, SAMPLES = 32, 50, 4, 16
SHORTEST, LONGEST = 8, 71
ROUND = 100
"""Steps of one side before it is the turn of the other."""

TIMES, FEATURES = 60, 16

Batch = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """Four layers of a transformer encoder; padded places are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words_BT: Tensor) -> Tensor:
        """Classify sentences."""
        return self.head(self.body(self.embed(words_BT), src_key_padding_mask=words_BT == 0).mean(1))


class Recurrent(nn.Module):
    """An LSTM of two layers in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(FEATURES, 32, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Classify sequences."""
        return self.head(self.body(x_BTD)[0].mean(1))


def sentences(steps: int) -> list[Batch]:
    """Return batches of several lengths, the same each time."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (steps,), generator=generator).tolist()
    return [
        (
            torch.randint(1, WORDS, (SAMPLES, length), generator=generator),
            torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        )
        for length in lengths
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what makes a step as PyTorch does."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def timed(step: Callable[[Tensor, Tensor], Any], batches: list[Batch]) -> tuple[float, list[float]]:
    """Return how long steps took, to the arrival of the last loss, and the losses."""
    begin_s = time.perf_counter()
    losses = [step(*batch) for batch in batches]
    values = [float(loss) for loss in losses]
    return time.perf_counter() - begin_s, values


@contextmanager
def counted() -> Iterator[list[float]]:
    """Note how long each capture takes, inside; those that check the loss included."""
    took_s: list[float] = []
    original = captures.capture

    def capture(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            took_s.append(time.perf_counter() - begin_s)

    captures.capture = capture
    try:
        yield took_s
    finally:
        captures.capture = original


def train_lengths(pool: onebox.Pool, steps: int) -> dict[str, float]:
    """Train both sides in turn; return what they took."""
    torch.manual_seed(0)
    model = Encoder()
    other = copy.deepcopy(model)
    batches, totals, losses = sentences(steps), {"plain": 0.0, "trainer": 0.0}, {"plain": [], "trainer": []}
    with (
        counted() as captures_s,
        onebox.Trainer(other, functional.cross_entropy, sgd(other), pool=pool) as trainer,
    ):
        sides = {"plain": plain_step(model, sgd(model)), "trainer": trainer.step}
        first_s = {}
        for side, step in sides.items():
            first_s[side], found = timed(step, batches[:1])
            losses[side] += found
        for begin in range(1, steps, ROUND):
            for side, step in sides.items():
                took_s, found = timed(step, batches[begin : begin + ROUND])
                totals[side] += took_s
                losses[side] += found
    apart = max(abs(a - b) for a, b in zip(losses["plain"], losses["trainer"], strict=True))
    whole = {side: first_s[side] + totals[side] for side in totals}
    return {
        "lengths": len({inputs.shape[1] for inputs, _ in batches}),
        "captures": len(captures_s),
        "capture_s": round(sum(captures_s), 2),
        "first_step_s": round(first_s["trainer"], 2),
        "plain_s": round(whole["plain"], 2),
        "trainer_s": round(whole["trainer"], 2),
        "ratio": round(whole["trainer"] / whole["plain"], 2),
        "losses_apart": apart,
    }


def first_step(pool: onebox.Pool) -> dict[str, float]:
    """Return how long the first step of a recurrent network takes."""
    torch.manual_seed(0)
    model = Recurrent()
    other = copy.deepcopy(model)
    batch = torch.randn(SAMPLES, TIMES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,))
    plain_s, expected = timed(plain_step(model, sgd(model)), [batch])
    with (
        counted() as captures_s,
        onebox.Trainer(other, functional.cross_entropy, sgd(other), pool=pool) as trainer,
    ):
        took_s, found = timed(trainer.step, [batch])
    return {
        "captures": len(captures_s),
        "plain_s": round(plain_s, 3),
        "first_step_s": round(took_s, 2),
        "losses_apart": abs(found[0] - expected[0]),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--verbose", action="store_true", help="print what a Trainer logs of captures")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    with onebox.open("cpu*2", threads=1) as pool:
        lengths = train_lengths(pool, options.steps)
        recurrent = first_step(pool)
    rows = [
        ["different lengths", str(lengths["lengths"])],
        ["captures, those that check the loss included", str(lengths["captures"])],
        ["they took, s", str(lengths["capture_s"])],
        ["first step, s", str(lengths["first_step_s"])],
        ["plain PyTorch in all, s", str(lengths["plain_s"])],
        ["Trainer in all, s", str(lengths["trainer_s"])],
        ["Trainer / plain", str(lengths["ratio"])],
        ["losses apart by at most", f"{lengths['losses_apart']:.1e}"],
        ["LSTM: first step of plain PyTorch, s", str(recurrent["plain_s"])],
        ["LSTM: first step of a Trainer, s", str(recurrent["first_step_s"])],
    ]
    show(f"{options.steps} batches of {SHORTEST} to {LONGEST} words, 2 workers x 1 thread", ("figure", "value"), rows)
    result = {"steps": options.steps, **lengths, "recurrent": recurrent, "machine": machine(), "commit": commit()}
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
