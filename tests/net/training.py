"""A model that is trained over the hosts of a test's network, and what is known of how it goes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import onebox
from onebox.engine.recovery.policy import RecoveryRecord
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Stage
from tests.kit import reference
from tests.kit.reference import Outcome
from tests.kit.stages import outcome
from tests.kit.trainer_arguments import grouped

WIDTH = 256
GRADIENT_BYTES = 8 * WIDTH * WIDTH
"""Of the middle layer of a wide model alone: far more than all else that travels in a step."""

NARROW = 16
"""Of a model of some hundred parameters."""

BEFORE, STEPS = 3, 10
"""Steps of a run before something befalls it, and in all."""

EVERY = 3
"""Steps between snapshots."""


def parts(width: int = WIDTH) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """Return a model, its loss and its optimizer, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)]
        model = nn.Sequential(*layers).double()
    return model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Laborious(nn.Sequential):
    """A model of images uint8 [B, 1, 8, 8] with few parameters and many operations."""

    def __init__(self, features: int = 32, layers: int = 6) -> None:
        sizes = [1, *[features] * layers]
        convolutions = [nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(sizes)]
        body = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
        super().__init__(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits [B, 10]."""
        outputs: Tensor = super().forward(inputs.float() / 255)
        return outputs


class Wide(nn.Sequential):
    """A model of images uint8 [B, 1, 8, 8] with many parameters and few operations."""

    def __init__(self, width: int = 1000) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits [B, 10]."""
        outputs: Tensor = super().forward(inputs.float() / 255)
        return outputs


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return inputs [B, 8] and targets [B] of a step, the same each time."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 8, generator=generator, dtype=torch.float64), torch.randint(
        0, 4, (size,), generator=generator
    )


def plans() -> dict[str, Plan]:
    """Return plans for three devices: a replica on each, and a stage on each."""
    model, loss, _ = parts(NARROW)
    names = TracedModel(capture(model, loss, batch(0)), backward=True).segments
    cut = [names[:1], names[1:3], names[3:]] if len(names) > 3 else [names[:1], names[1:2], names[2:]]
    stages = tuple(Stage(segments=own, replicas=((device,),), shares=(1.0,)) for device, own in enumerate(cut))
    whole = Stage(segments=names, replicas=((0,), (1,), (2,)), shares=(1 / 3,) * 3)
    return {
        "data-parallel": Plan(stages=(whole,), micro_batch=4),
        "pipelined": Plan(stages=stages, micro_batch=4, schedule="1f1b"),
    }


def alone(plan: Plan, steps: int, width: int = WIDTH) -> Outcome:
    """Return the result of one process."""
    model, loss, optimizer = parts(width)

    return reference.train(model, loss, optimizer, [batch(step) for step in range(steps)], plan)


# ---- runs that recover


@dataclass(frozen=True, kw_only=True)
class Story:
    """How a run went that was to recover.

    Args:
        outcome: Losses and weights.
        recoveries: What was lost.
    """

    outcome: Outcome
    recoveries: tuple[RecoveryRecord, ...]


def survivor(pool: onebox.Pool, plan: Plan) -> onebox.Trainer:
    """Return a trainer of the narrow model that goes on after a loss."""
    options: dict[str, Any] = {"check_every": 4, "recover": True, "snapshot_every": EVERY}
    return onebox.Trainer(*parts(NARROW), **grouped(pool=pool, plan=plan, **options))


def run(
    pool: onebox.Pool,
    plan: Plan,
    disturbance: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    after: int = STEPS,
) -> Story:
    """Train the narrow model, and tell how it went.

    Args:
        pool: Of three devices.
        plan: For them.
        disturbance: Entered when :data:`BEFORE` steps have been done, and left when all have.
        after: Steps in all.
    """
    with survivor(pool, plan) as trainer:
        losses = [trainer.step(*batch(step)) for step in range(BEFORE)]
        trainer.wait()
        with disturbance():
            losses += [trainer.step(*batch(step)) for step in range(BEFORE, after)]
            trainer.wait()
        return Story(outcome=outcome(trainer, losses), recoveries=trainer.recoveries)


def assert_bits(found: Outcome, expected: Outcome) -> None:
    """Require that two runs had the same losses and ended with the same parameters, to the last bit."""
    assert found.losses == expected.losses
    assert digest(found) == digest(expected)


def digest(found: Outcome) -> str:
    """Return a digest of parameters and buffers."""
    made = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(found.tensors.items()):
        made.update(name.encode() + b"\0" + tensor.contiguous().numpy().tobytes())
    return made.hexdigest()
