"""Plans of stages for the models that all tests train, and runs of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import onebox
from onebox.graph import TracedModel
from onebox.plan import Plan, Prediction, Schedule, Stage, named_schedule
from tests.kit.captures import capture
from tests.kit.models import COVERED, OPTIMIZERS
from tests.kit.reference import Outcome, drawing, train
from tests.kit.trainer_arguments import grouped

SEED = 5


@functools.cache
def segments(name: str) -> tuple[str, ...]:
    """Return the names of a case's segments."""
    case = COVERED[name]
    return TracedModel(capture(case.model(), case.loss, case.batches([3])[0]), backward=True).segments


def staged(
    name: str,
    devices: Sequence[int | Sequence[int]],
    *,
    micro_batch: int = 3,
    schedule: str = "1f1b",
    shares: Sequence[Sequence[float]] | None = None,
    **more: Any,
) -> Plan:
    """Return a plan of a case, cut into stages of about equal numbers of segments.

    Args:
        name: The case.
        devices: For each stage its device, or its replicas'.
        micro_batch: Samples.
        schedule: Of the plan.
        shares: For each stage, of its replicas; equal if not given.
        more: Other fields of the plan.
    """
    names, count = segments(name), len(devices)
    bounds = [len(names) * place // count for place in range(count + 1)]
    stages = []
    for place, own in enumerate(devices):
        replicas = tuple((device,) for device in ([own] if isinstance(own, int) else own))
        parts = tuple(shares[place]) if shares else (1.0,) * len(replicas)
        stages.append(Stage(segments=names[bounds[place] : bounds[place + 1]], replicas=replicas, shares=parts))
    return Plan(stages=tuple(stages), micro_batch=micro_batch, schedule=schedule, **more)


def expected(plan: Plan, batch: int) -> Prediction:
    """Return a made-up expectation, for ``auto``: later stages take longer, weights less than inputs."""
    times = tuple((0.01 * (2 + place), 0.015 * (2 + place), 0.008) for place in range(len(plan.stages)))
    return Prediction(batch=batch, step_s=1.0, bubble=0.1, peak_bytes=(1,) * len(plan.devices), stages_s=times)


def tabled(plan: Plan, batch: int) -> tuple[str, ...]:
    """Return a table for a batch that no name stands for: ``zb-h1``'s, with all that can wait put last."""
    made = named_schedule("zb-h1", plan.routes(batch))
    rows = {}
    for device, row in made.rows.items():
        late = tuple(action for action in row if action.kind == "W")
        rows[device] = (*(action for action in row if action.kind != "W"), *reversed(late))
    return Schedule(rows=rows).lines()


def tensors_of(trainer: onebox.Trainer) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in the model."""
    return {name.removeprefix("model."): tensor for name, tensor in trainer.tensors().items()}


def outcome(trainer: onebox.Trainer, losses: Sequence[Any]) -> Outcome:
    """Return how a run has gone, with the norms of its gradients where there are any."""
    tensors = tensors_of(trainer)
    norms = [getattr(loss, "gradient_norm", None) or 0.0 for loss in losses]
    return Outcome(losses=[float(loss) for loss in losses], norms=norms, tensors=tensors)


def run(pool: onebox.Pool, name: str, plan: Plan | None, sizes: Sequence[int], **options: Any) -> Outcome:
    """Train a case on a pool, as a plan says."""
    case = COVERED[name]
    model = case.model()
    optimizer = OPTIMIZERS[options.pop("optimizer", "adamw")](model)
    arguments = {"seed": SEED, "check_every": 1, "plan": plan, **options}
    with onebox.Trainer(model, case.loss, optimizer, **grouped(pool=pool, **arguments)) as trainer:
        return outcome(trainer, [trainer.step(*batch) for batch in case.batches(list(sizes))])


def reference(name: str, plan: Plan, sizes: Sequence[int], **options: Any) -> Outcome:
    """Train a case in this process, on the micro-batches of a plan."""
    case = COVERED[name]
    model = case.model()
    optimizer = OPTIMIZERS[options.pop("optimizer", "adamw")](model)
    around = drawing(SEED) if case.draws else None

    return train(model, case.loss, optimizer, case.batches(list(sizes)), plan, around=around, **options)
