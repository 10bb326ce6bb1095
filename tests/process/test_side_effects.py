"""What a model's code does to Python's state is done as in a plain loop, once for each micro-batch, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import onebox
from onebox import Trainer
from onebox.errors import CaptureError
from onebox.plan import Plan
from onebox.pool.pool import Pool

GUARDED = True

CALLS = 0
TABLE = {"seen": 0}


class Held:
    """An object that is no module."""

    samples = 0


HELD = Held()


class Counting(nn.Module):
    """A layer that notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.calls, self.table, self.rounds = 3, {"samples": 1}, [0]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 4] to [B, 2]."""
        global CALLS  # noqa: PLW0603
        CALLS += 1
        TABLE["seen"] += x.shape[0]
        HELD.samples += x.shape[0]
        self.calls += 1
        self.table["samples"] += len(x)
        self.twice = 2 * self.calls
        self.last_shape = tuple(x.shape)
        if self.training:
            self.note = "training", self.line.out_features
        return self.line(x)

    def state(self) -> Any:
        """Return all that it has noted."""
        names = "calls", "table", "rounds", "twice", "last_shape", "note"
        own = {name: copy.copy(getattr(self, name, None)) for name in names}
        return own, CALLS, dict(TABLE), HELD.samples


def begun() -> Counting:
    """Return a model, with all counts as they are at first."""
    global CALLS
    CALLS, TABLE["seen"], HELD.samples = 0, 0, 0
    torch.manual_seed(0)
    return Counting().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return batches, of which the last is smaller."""
    return [(torch.ones(size, 4).double(), torch.zeros(size, 2).double()) for size in (6, 6, 6, 5)]


def test_counts_and_notes_are_those_of_a_plain_loop_over_the_micro_batches(pool: Pool) -> None:
    def plainly() -> list[Any]:
        model, found = begun(), []
        for x, _ in batches():
            for part in x.split(3):
                model(part)
            found.append(model.state())
        model.eval()
        for part in torch.ones(6, 4).double().split(3):
            model(part)
        return [*found, model.state()]

    expected, model = plainly(), begun()
    plan = Plan.data_parallel(range(2), (1.0, 1.0), micro_batch=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(model, mse_loss, optimizer, pool=pool, plan=plan) as trainer:
        found = []
        for batch in batches():
            trainer.step(*batch)
            found.append(model.state())
        trainer.evaluate([(torch.ones(6, 4).double(), torch.zeros(6, 2).double())])
        found.append(model.state())
        model.calls = 100  # by hand: nothing depends on it
        captured = len(trainer.captures._states)
        trainer.step(*batches()[0])
        assert (model.calls, len(trainer.captures._states)) == (102, captured)
        trainer.pull()
    assert found == expected


class Dependent(nn.Module):
    """A layer whose result, or what it does, depends on what it changes."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.compute = nn.Linear(4, 2), forward
        self.calls, self.rate, self.rounds, self.begun = 0, 0.5, [0], False

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, 4] to [B, 2]."""
        return self.compute(self, self.line(x))


def multiplied(self: Any, y: Tensor) -> Tensor:
    self.calls += 1
    return y * self.calls


def decided(self: Any, y: Tensor) -> Tensor:
    self.calls += 1
    return y if self.calls % 2 else -y


def rising(self: Any, y: Tensor) -> Tensor:
    self.rate += 0.5
    return y


def longer(self: Any, y: Tensor) -> Tensor:
    self.rounds.append(1)
    return y


def first(self: Any, y: Tensor) -> Tensor:
    if self.begun:
        return y
    self.begun = True
    return 2 * y


@pytest.mark.parametrize(
    ("forward", "what"),
    [(multiplied, "calls"), (decided, "calls"), (rising, "rate"), (longer, "rounds"), (first, "begun")],
)
def test_what_the_result_depends_on_is_refused_by_line_and_is_as_it_was(
    forward: Callable[[Any, Tensor], Tensor], what: str, pool: Pool
) -> None:
    model = Dependent(forward).double()
    before = {name: copy.copy(value) for name, value in vars(model).items() if name in ("calls", "rate", "rounds")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Trainer(model, mse_loss, optimizer, pool=pool) as trainer,
        pytest.raises(CaptureError, match=rf"changes model\.{what}"),
    ):
        trainer.step(*batches()[0])
    assert {name: vars(model)[name] for name in before} == before


def test_sizes_that_are_noted_are_captured_one_by_one(pool: Pool) -> None:
    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.length = x.shape[1]
            return self.line(x).mean(1)

    model = Lengths().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with onebox.Trainer(model, mse_loss, optimizer, pool=pool) as trainer:
        for length in (2, 3, 4, 5, 3):
            trainer.step(torch.ones(4, length, 2).double(), torch.zeros(4, 2).double())
            assert model.length == length
        trainer.pull()
