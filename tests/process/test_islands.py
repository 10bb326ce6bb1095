"""Islands: steps by themselves and outer steps between them, compared with a plain loop over copies of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import onebox
from onebox.errors import UsageError
from onebox.plan import Plan, Stage, apportion
from tests.models import CASES, OPTIMIZERS
from tests.process.shelf import Shelf
from tests.process.stages import SEED, staged
from tests.reference import AGREE, Outcome, assert_same, backward, clipped, drawing, sizes_of, state_of

SIZES = [12, 12, 9, 12, 12, 12, 9, 12, 12, 12, 12, 12]
MICRO_BATCH = 3


def cut(size: int) -> list[int]:
    whole, rest = divmod(size, MICRO_BATCH)
    return [MICRO_BATCH] * whole + [rest] * (rest > 0)


class Reference:
    """DiLoCo (arXiv:2311.08105) in one process: a copy of the model and of its optimizer for each island.

    Args:
        name: The case.
        optimizer: Name of the inner optimizer.
        weights: Share of a batch of each island.
        outer: The outer optimizer.
        cuts: For each island, from samples to those of its micro-batches.
        max_norm: For clipping.
        average: Names of the buffers that are averaged.
    """

    def __init__(
        self,
        name: str,
        optimizer: str,
        weights: Sequence[float],
        outer: onebox.Outer,
        cuts: Sequence[Callable[[int], Sequence[int]]] = (),
        max_norm: float | None = None,
    ) -> None:
        self.case, self.weights, self.outer, self.max_norm = CASES[name], weights, outer, max_norm
        self.value = self.case.model()
        self.models = [self.case.model() for _ in weights]
        self.optimizers = [OPTIMIZERS[optimizer](model) for model in self.models]
        self.cuts = cuts or [cut] * len(weights)
        momentum = outer.momentum
        self.sgd = torch.optim.SGD(self.value.parameters(), lr=outer.lr, momentum=momentum, nesterov=momentum > 0)
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in self._tensors(self.value)))
        self.fragment = {
            name: modules.index(name.rpartition(".")[0]) % outer.fragments for name, _ in self._tensors(self.value)
        }
        self.samples = [[0] * len(weights) for _ in range(outer.fragments)]
        self.steps = 0

    @staticmethod
    def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
        buffers = [(name, each) for name, each in model.named_buffers() if "running" in name]
        return [*model.named_parameters(), *buffers]

    def step(self, batch: Any) -> tuple[float, float]:
        """Make a step of each island, and the outer steps that are due."""
        loss = norm = 0.0
        size, start = sizes_of(batch), 0
        for island, own in enumerate(apportion(size, list(self.weights))):
            if not own:
                continue
            part = tree_map(lambda t, a=start, b=start + own: t[a:b], batch)
            model, optimizer = self.models[island], self.optimizers[island]
            around = drawing(SEED + island) if self.case.draws else None
            optimizer.zero_grad()
            found = backward(
                model,
                self.case.loss,
                part,
                self.cuts[island],
                lambda index, a=around: a(self.steps, index) if a else None,
            )
            loss += found * own / size
            norm += clipped(model, self.max_norm) * own / size
            optimizer.step()
            start += own
            for samples in self.samples:
                samples[island] += own
        self.steps += 1
        every = self.outer.every
        for fragment in range(self.outer.fragments):
            if (self.steps - fragment * every // self.outer.fragments) % every == 0:
                self.synchronize(fragment)
        return loss, norm

    @torch.no_grad()
    def synchronize(self, fragment: int) -> None:
        """Make an outer step."""
        samples, total = self.samples[fragment], sum(self.samples[fragment])
        if not total:
            return
        self.samples[fragment] = [0] * len(samples)
        own = [dict(self._tensors(model)) for model in self.models]
        self.sgd.zero_grad()
        for name, value in self._tensors(self.value):
            if self.fragment[name] != fragment:
                continue
            if isinstance(value, nn.Parameter):
                value.grad = sum((value - each[name]) * (n / total) for each, n in zip(own, samples, strict=True))
            else:
                value.copy_(sum(each[name] * (n / total) for each, n in zip(own, samples, strict=True)))
        self.sgd.step()
        for name, value in self._tensors(self.value):
            if self.fragment[name] == fragment:
                for each in own:
                    each[name].copy_(value)

    def run(self, sizes: Sequence[int]) -> Outcome:
        """Train."""
        found = [self.step(batch) for batch in self.case.batches(list(sizes))]
        tensors = state_of(self.models[0]) | {name: value.detach().clone() for name, value in self._tensors(self.value)}
        return Outcome(losses=[loss for loss, _ in found], norms=[norm for _, norm in found], tensors=tensors)


def islands(
    pool: onebox.Pool,
    name: str,
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int] = SIZES,
    *,
    optimizer: str = "adamw",
    plan: Any = onebox.DataParallel(micro_batch=MICRO_BATCH),
    **options: Any,
) -> Outcome:
    """Train a case on islands of a pool."""
    case = CASES[name]
    model = case.model()
    arguments = {"pool": pool, "seed": SEED, "islands": groups, "plan": plan, **options}
    with onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), **arguments) as trainer:
        return steps(trainer, case.batches(list(sizes)))


def steps(trainer: onebox.Trainer, batches: Sequence[Any]) -> Outcome:
    losses = [trainer.step(*batch) for batch in batches]
    norms = [loss.gradient_norm or 0.0 for loss in losses]
    tensors = {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}
    return Outcome(losses=[float(loss) for loss in losses], norms=norms, tensors=tensors)


# ---- numerics


@pytest.mark.short
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_islands_of_one_device(optimizer: str, momentum: float, pools: Shelf) -> None:
    outer = onebox.Outer(every=3, lr=0.6, momentum=momentum)
    found = islands(pools(2), "mlp", [[0], [1]], optimizer=optimizer, outer=outer)
    assert_same(found, Reference("mlp", optimizer, [1, 1], outer).run(SIZES))
