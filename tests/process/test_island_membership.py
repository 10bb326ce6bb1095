"""Islands that are lost and join again, compared with a plain loop that sees the same membership."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import onebox
from onebox.engine.islands.membership import IslandChange
from onebox.pool import Pool
from tests.models import CASES, OPTIMIZERS
from tests.process.shelf import Shelf, untouched
from tests.process.stages import SEED, staged
from tests.process.test_islands import SIZES, SMALL, Reference, islands
from tests.reference import Outcome, assert_same, state_of

NOTICED_S = 30.0
"""For the end of a worker to be noticed."""


class Changing(Reference):
    """The reference, whose islands leave and join."""

    def leave(self, island: int) -> None:
        self.weights = [0 if each == island else weight for each, weight in enumerate(self.weights)]
        for samples in self.samples:
            samples[island] = 0

    @torch.no_grad()
    def join(self, island: int, weight: float) -> None:
        """Take the global values, and of the first island that is there the optimizer's state and other buffers."""
        first = next(each for each, own in enumerate(self.weights) if own)
        self.weights = [weight if each == island else own for each, own in enumerate(self.weights)]
        self.models[island].load_state_dict(self.models[first].state_dict())
        self.optimizers[island].load_state_dict(copy.deepcopy(self.optimizers[first].state_dict()))
        local = dict(self._tensors(self.models[island]))
        for name, value in self._tensors(self.value):
            local[name].copy_(value)

    def follow(self, batches: Sequence[Any], changes: Sequence[IslandChange]) -> Outcome:
        """Train with the changes of membership of a run."""
        weights, losses = list(self.weights), []
        for number, batch in enumerate(batches, 1):
            losses.append(self.inner(batch)[0])
            now = [change for change in changes if change.step == number]
            gone = {change.island for change in now if change.kind == "left"}
            for change in now:  # with samples that are lost it left before the outer step, else after its part in it
                if change.kind == "left" and change.samples:
                    self.leave(change.island)
            if any(change.kind == "redone" for change in now) and self.outer.overlap:
                self.redo([change.fragment for change in now if change.kind == "redone"])
            self.outer_steps()
            for change in now:
                if change.kind == "left" and not change.samples:
                    self.leave(change.island)
                elif change.kind == "joined":
                    self.join(change.island, weights[change.island])
            assert len(gone) < len(weights)
        first = next(each for each, own in enumerate(self.weights) if own)
        tensors = state_of(self.models[first]) | {n: value.detach().clone() for n, value in self._tensors(self.value)}
        return Outcome(losses=losses, norms=[], tensors=tensors)


LAYOUTS: dict[str, tuple[str, int, list[list[int]], Callable[[], Any], list[float]]] = {
    "devices": ("mlp", 3, [[0], [1], [2]], lambda: SMALL, [1, 1, 1]),
    "replicas": ("cnn", 4, [[0, 1], [2, 3]], lambda: SMALL, [1, 1]),
    "pipelines": ("mlp", 4, [[0, 1], [2, 3]], lambda: [staged("mlp", [0, 1]), staged("mlp", [3, 2])], [1, 1]),
    "mixed": ("cnn", 4, [[3], [0, 1, 2]], lambda: [SMALL, staged("cnn", [[0, 1], 2])], [1, 3]),
}


def training(pool: Pool, layout: str, outer: onebox.Outer, optimizer: str = "adamw") -> onebox.Trainer:
    """Return a trainer that goes on without islands that are lost."""
    name, _, groups, plan, _ = LAYOUTS[layout]
    case, model = CASES[name], CASES[name].model()
    arguments: dict[str, Any] = {"pool": pool, "seed": SEED, "islands": groups, "plan": plan(), "outer": outer}
    return onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), recovery=onebox.Recovery(), **arguments)


def kill(pool: Pool, worker: int) -> None:
    """End a worker, and wait until that is known."""
    os.kill(pool.process_ids[worker], signal.SIGKILL)
    end_s = time.monotonic() + NOTICED_S
    while not pool.lost:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def checked(
    trainer: onebox.Trainer, layout: str, outer: onebox.Outer, optimizer: str = "adamw", *, kills: dict[int, int]
) -> None:
    """Train, killing workers before steps, and compare with the reference."""
    name, _, _, _, weights = LAYOUTS[layout]
    batches, losses = CASES[name].batches(SIZES), []
    for number, batch in enumerate(batches):
        if number in kills:
            trainer.wait()
            kill(trainer.pool, kills[number])
        losses.append(trainer.step(*batch))
    compare(trainer, losses, Changing(name, optimizer, weights, outer), batches)


def compare(
    trainer: onebox.Trainer, losses: Sequence[onebox.StepLoss], reference: Changing, batches: Sequence[Any]
) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}
    values = [float(loss) for loss in losses]
    expected = reference.follow(batches, trainer.island_changes)
    torn = {change.step - 1 for change in trainer.island_changes if change.kind == "left"}  # without the lost parts
    assert all(math.isfinite(value) for value in values)
    whole = [number for number in range(len(values)) if number not in torn]
    found = Outcome(losses=[values[number] for number in whole], norms=[], tensors=tensors)
    assert_same(found, Outcome(losses=[expected.losses[n] for n in whole], norms=[], tensors=expected.tensors))


# ---- without a loss


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 0), (2, 3)])
def test_recovery_changes_no_bit_of_a_run_without_losses(fragments: int, overlap: int, pools: Shelf) -> None:
    outer = onebox.Outer(every=4, fragments=fragments, overlap=overlap, shares=[2, 1])
    plain = islands(pools(3), "cnn", [[0, 1], [2]], outer=outer)
    found = islands(pools(3), "cnn", [[0, 1], [2]], outer=outer, recovery=onebox.Recovery())
    assert_same(found, plain, tolerance=0)
    assert untouched(pools(3))


# ---- an island leaves, and joins again


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("victim", [0, 2])
def test_an_island_that_loses_a_worker_joins_again_at_the_next_outer_step(layout: str, victim: int) -> None:
    outer = onebox.Outer(every=4, shares=LAYOUTS[layout][-1])
    with onebox.open(f"cpu*{LAYOUTS[layout][1]}", threads=1) as pool:
        with training(pool, layout, outer) as trainer:
            checked(trainer, layout, outer, kills={5: victim})
            assert [(change.kind, change.step) for change in trainer.island_changes] == [("left", 6), ("joined", 8)]
        assert untouched(pool)
