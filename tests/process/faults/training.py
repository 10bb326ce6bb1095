"""A small training run, and what it is asked when something goes wrong in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.errors import OneboxError
from onebox.pool import Fault, open_pool
from tests.kit.trainer_arguments import grouped

STEPS = 8
WITHIN_S = 30.0
"""A fault is reported within this time, on a machine that is busy with other things too: a guard, not a measure."""

AT_ONCE_S = 10.0
"""What is known is said within this time, likewise: nothing else is waited for."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Raised:
    """An error that a run ended with.

    Args:
        error: The error.
        after_s: Time from the beginning of the step that raised it.
    """

    error: OneboxError
    after_s: float


def batch(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 8] and targets [B] of a step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    x_BD = torch.randn(size, 8, generator=generator, dtype=torch.float64)
    return x_BD, torch.randint(0, 4, (size,), generator=generator)


def parts(seed: int = 0, width: int = 16) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return a model, its loss and its optimizer, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)).double()
    return model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trainer_on(pool: onebox.Pool, sync: str, **options: Any) -> onebox.Trainer:
    """Return a trainer of the small model, which says what befalls it.

    Nothing runs on the workers but steps: faults are counted by instructions.
    """
    usual = {"sync": sync, "check_every": 0, "recover": False, "loss_reduction": "mean"}
    return onebox.Trainer(*parts(), **grouped(pool=pool, **{**usual, **options}))


class Stopwatch:
    """Tells the time since it was last started."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start anew."""
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Time since the last start."""
        return time.monotonic() - self._start_s


def steps(trainer: onebox.Trainer, until: int, watch: Stopwatch | None = None) -> Tensors:
    """Train on to a step, reading the weights after each, and return them; a watch is started with each step."""
    found: Tensors = {}
    while trainer.steps_done < until:
        if watch is not None:
            watch.start()
        trainer.step(*batch(trainer.steps_done)).item()
        found = trainer.tensors()
    return found


def train(pool: onebox.Pool, sync: str, until: int = STEPS) -> Tensors:
    """Train the small model anew."""
    with trainer_on(pool, sync) as trainer:
        return steps(trainer, until)


def fails(run: Callable[[], object], watch: Stopwatch | None = None) -> Raised:
    """Run what is to fail and return how it failed, and when by a watch that it may start anew."""
    watch = watch or Stopwatch()
    with pytest.raises(OneboxError) as caught:
        run()
    return Raised(caught.value, watch.elapsed_s)


def questions(trainer: onebox.Trainer) -> list[Callable[[], object]]:
    """Return calls of each kind that a trainer takes."""
    return [
        lambda: trainer.step(*batch(0)).item(),
        lambda: trainer.evaluate([batch(0)]),
        trainer.tensors,
        trainer.pull,
        trainer.memory,
    ]


def fails_with_one_error(trainer: onebox.Trainer, until: int = STEPS) -> OneboxError:
    """Train until it fails; require that it fails in time, and that every later call says the same at once."""
    watch = Stopwatch()
    raised = fails(lambda: steps(trainer, until, watch), watch)
    assert raised.after_s < WITHIN_S, raised
    for question in questions(trainer):
        again = fails(question)
        assert again.error is raised.error
        assert again.after_s < AT_ONCE_S
    return raised.error


def faulty_pool(kind: str, instruction: str, count: int, worker: int = 1) -> onebox.Pool:
    """Open a pool of two workers, of which one has a fault."""
    return open_pool("cpu*2", threads=1, faults={worker: [Fault(kind, instruction, count)]})  # type: ignore[arg-type]
