"""The runs of the recording, by their names: each a training of a small model on a pool of its own.

A run is a function of a folder for its files; it returns what it computed, as plain data: losses and other numbers in
hexadecimal, hashes of tensors and plans. What is the same on every machine stands under :data:`EVERYWHERE`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onebox
from tests.recorded import loops, planning, scripts
from tests.recorded.hashing import hash_of, text
from tests.recorded.inner import POLICY, canonical, resume_trainer, trainer_of
from tests.recorded.models import CASES, Batch, Case, Wide
from tests.recorded.traffic import recorded

EVERYWHERE = ("candidates", "instructions", "memory", "messages", "plan", "simulated", "step_s")
"""Parts of a record that do not depend on the machine."""

WITH_RESULTS = (
    "replicas, sums at the client",
    "changes by hand",
    "resumed with the same plan",
    "resumed from replicas in stages",
)
"""Runs whose messages hold what was computed before, so that their hash depends on the machine, unlike their bytes."""

SEED = 5

Record = dict[str, Any]


# ---- plans


def plan(**fields: Any) -> onebox.Plan:
    """Return a plan of the fields of a plan file."""
    return onebox.Plan.from_json(json.dumps(fields))


def replicas(*shares: float, micro_batch: int | None = 3, **more: Any) -> onebox.Plan:
    """Return the plan of one stage on devices 0, 1, ..., with their shares."""
    stage = {"replicas": [[device] for device in range(len(shares))], "shares": shares}
    return plan(stages=[stage], micro_batch=micro_batch, **more)


def staged(
    case: str,
    devices: Sequence[int | Sequence[int | Sequence[int]]],
    *,
    policies: Sequence[str] = (),
    shares: Sequence[Sequence[float]] = (),
    micro_batch: int = 3,
    each: Mapping[int, Mapping[str, Any]] | None = None,
    **more: Any,
) -> onebox.Plan:
    """Return a plan of a model that is cut into stages of about equal numbers of segments.

    Args:
        case: The model.
        devices: For each stage its device, its replicas' devices, or the devices that split each replica.
        policies: Of each stage.
        shares: For each stage, of its replicas; equal if not given.
        micro_batch: Samples.
        each: Further fields of some stages.
        more: Further fields of the plan.
    """
    names, count = CASES[case].segments, len(devices)
    bounds = [len(names) * place // count for place in range(count + 1)]
    stages = []
    for place, own in enumerate(devices):
        parts = [list(part) if isinstance(part, Sequence) else [part] for part in _several(own)]
        stage: dict[str, Any] = {
            "segments": names[bounds[place] : bounds[place + 1]],
            "replicas": parts,
            "shares": shares[place] if shares else [1.0] * len(parts),
            **({POLICY: policies[place]} if policies else {}),
            **((each or {}).get(place, {})),
        }
        stages.append(stage)
    return plan(stages=stages, micro_batch=micro_batch, **more)


def _several(own: int | Sequence[int | Sequence[int]]) -> Sequence[int | Sequence[int]]:
    return own if isinstance(own, Sequence) else [own]


def written(made: onebox.Plan | None) -> str | None:
    """Return the hash of a plan's file."""
    return None if made is None else canonical(made)


# ---- optimizers


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and decay."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """No state."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """State without momentum."""
    return torch.optim.Adagrad(model.parameters(), lr=0.02)


def adam_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with options of their own."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "lr": 2e-3, "weight_decay": 1e-3},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 5e-3, "betas": (0.8, 0.99)},
    ]
    return torch.optim.Adam(groups, amsgrad=True)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One that looks at whole matrices, and one for the rest."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == first] for first in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0)]


def every_optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Each class that workers run, over a layer of its own."""
    assert isinstance(model, Wide)
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda own: torch.optim.SGD(own, lr=0.02, momentum=0.8, nesterov=True),
        lambda own: torch.optim.Adam(own, lr=0.01, weight_decay=0.1),
        lambda own: torch.optim.AdamW(own, lr=0.01, amsgrad=True, maximize=True),
        lambda own: torch.optim.Adamax(own, lr=0.01),
        lambda own: torch.optim.NAdam(own, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
        lambda own: torch.optim.RAdam(own, lr=0.01),
        lambda own: torch.optim.RMSprop(own, lr=0.01, momentum=0.5, centered=True),
        lambda own: torch.optim.Rprop(own, lr=0.01),
        lambda own: torch.optim.Adagrad(own, lr=0.05, lr_decay=0.1),
        lambda own: torch.optim.Adadelta(own, lr=0.5),
        lambda own: torch.optim.ASGD(own, lr=0.05, t0=2),
        lambda own: torch.optim.Adafactor(own, lr=0.05),
        lambda own: torch.optim.Muon([p for p in own if p.dim() == 2], lr=0.05),
    ]
    layers = [list(layer.parameters()) for layer in model.layers]
    rest = [layers[-1][1], *model.head.parameters()]
    made = [kind(own) for kind, own in zip(kinds, layers, strict=True)]
    return [*made, torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


# ---- training


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run of :class:`onebox.Trainer`.

    Args:
        case: The model.
        workers: Devices of the pool.
        plan: Of the trainer.
        optimizer: Makes the optimizer, or several.
        sizes: Samples of each step.
        dtype: Of the model.
        options: Further arguments of the trainer.
        scheduler: Whether learning rates change with each step.
        evaluated: Whether two batches are evaluated after the last step.
        resumed: The plan with which the second half of the steps goes on from a checkpoint.
    """

    case: str = "deep"
    workers: int = 2
    plan: onebox.Plan | None = None
    optimizer: Callable[[nn.Module], Any] = adamw
    sizes: tuple[int, ...] = (8, 8, 5, 8)
    dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: bool = False
    evaluated: bool = False
    resumed: onebox.Plan | None = None

    def __call__(self, folder: Path) -> Record:
        with recorded() as traffic, onebox.open(f"cpu*{self.workers}", threads=1) as pool:
            record = self._train(pool, folder)
        return {**record, "messages": traffic.record()}

    def _train(self, pool: onebox.Pool, folder: Path) -> Record:
        case = CASES[self.case]
        batches = case.batches(self.sizes, self.dtype)
        half = len(batches) // 2 if self.resumed is not None else len(batches)
        model = case.model(self.dtype)
        optimizer = self.optimizer(model)
        arguments = {"seed": SEED, "check_every": 2, "plan": self.plan, **self.options}
        losses: list[onebox.StepLoss] = []
        with trainer_of(model, case.loss, optimizer, pool=pool, **arguments) as trainer:
            self._step(trainer, batches[:half], losses)
            record = self._described(trainer, case, batches[0])
            if self.resumed is None:
                return self._finished(trainer, model, optimizer, losses, record)
            trainer.save(folder)
        model = case.model(self.dtype)
        optimizer = self.optimizer(model)
        with resume_trainer(folder, model, case.loss, optimizer, pool=pool, plan=self.resumed) as trainer:
            self._step(trainer, batches[half:], losses)
            return self._finished(trainer, model, optimizer, losses, record)

    def _step(self, trainer: onebox.Trainer, batches: Sequence[Batch], losses: list[onebox.StepLoss]) -> None:
        given = trainer.optimizer if isinstance(trainer.optimizer, Sequence) else [trainer.optimizer]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.75) for each in given if self.scheduler]
        for batch in batches:
            losses.append(trainer.step(*batch))
            for scheduler in schedulers:
                scheduler.step()

    def _described(self, trainer: onebox.Trainer, case: Case, batch: Batch) -> Record:
        memory = trainer.predicted_memory(*batch)
        return {"plan": written(trainer.plan), "memory": {str(device): size for device, size in sorted(memory.items())}}

    def _finished(
        self,
        trainer: onebox.Trainer,
        model: nn.Module,
        optimizer: Any,
        losses: Sequence[onebox.StepLoss],
        record: Record,
    ) -> Record:
        found = {**record, "losses": [text(float(loss)) for loss in losses]}
        if self.options.get("clip_grad_norm") is not None:
            found["norms"] = [text(loss.gradient_norm or 0.0) for loss in losses]
        if self.evaluated:
            case = CASES[self.case]
            result = trainer.evaluate(case.batches((6, 3), self.dtype))
            found["evaluation"] = [text(result.loss), *(text(result.metrics[name]) for name in sorted(result.metrics))]
        trainer.pull()
        found["parameters"] = hash_of(model.state_dict())
        given = optimizer if isinstance(optimizer, list) else [optimizer]
        found["optimizer"] = hash_of([each.state_dict() for each in given])
        return found


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Part of the samples whose class is right."""
    return (outputs.argmax(1) == targets).double().mean()


def noisy(x_BCHW: Tensor) -> Tensor:
    """Images with noise, drawn on the device."""
    return x_BCHW + 0.1 * torch.randn_like(x_BCHW)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy as a sum over samples."""
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


LATE = {"staleness": 1, "warm_up": 1}
FATED = ("offload", "recompute", "swap", "recompute")
TABLE = (
    "0: 0F0 0F1 0I0 0F2 0I1 0W1 0I2 0W0 0W2",
    "1: 1F0 1B0 1F1 1B1 1F2 1B2",
)

TRAININGS: dict[str, Training] = {
    # ---- one device and replicas
    "one device, sgd": Training(workers=1, plan=replicas(1.0), optimizer=sgd, scheduler=True),
    "one device, float32": Training(workers=1, optimizer=adam_in_groups, dtype=torch.float32),
    "replicas with uneven shares, batch norm, clipped": Training(
        case="cnn", workers=3, plan=replicas(3.0, 2.0, 1.0), options={"clip_grad_norm": 0.5}
    ),
    "replicas, sums at the client": Training(plan=replicas(1.0, 1.0, sync="client", micro_batch=None)),
    "replicas, dropout": Training(case="dropping", plan=replicas(1.0, 1.0), dtype=torch.float32),
    "replicas, overlapping steps": Training(plan=replicas(1.0, 1.0), options={"overlap": True}),
    "replicas, every optimizer": Training(
        case="wide", plan=replicas(1.0, 1.0), optimizer=every_optimizer, sizes=(6, 6, 6)
    ),
    "replicas, on the device and evaluated": Training(
        case="cnn",
        plan=replicas(1.0, 1.0),
        optimizer=sgd,
        dtype=torch.float32,
        options={"on_device": noisy, "metrics": {"accuracy": accuracy}},
        evaluated=True,
    ),
    # ---- the optimizer's state
    "sharded optimizer, uneven and clipped": Training(
        workers=3,
        plan=replicas(3.0, 2.0, 1.0, optimizer="sharded"),
        optimizer=adam_in_groups,
        options={"clip_grad_norm": 0.3},
    ),
    "sharded optimizer, muon and adamw": Training(
        plan=replicas(1.0, 1.0, optimizer="sharded"), optimizer=muon_and_adamw, scheduler=True
    ),
    "optimizer on the host": Training(case="cnn", plan=staged("cnn", [0, 1], update="host"), dtype=torch.float32),
    # ---- schedules
    "gpipe on four devices": Training(workers=4, plan=staged("deep", [0, 1, 2, 3], schedule="gpipe")),
    "1f1b, stages with replicas": Training(
        workers=4,
        plan=staged("deep", [(0, 1), (2, 3)], shares=[(2.0, 1.0), (1.0, 1.0)], schedule="1f1b"),
        optimizer=sgd,
        options={"clip_grad_norm": 0.3},
    ),
    "interleaved": Training(plan=staged("deep", [0, 1, 0, 1], schedule="interleaved", micro_batch=2)),
    "zb-h1, batch norm": Training(case="cnn", workers=3, plan=staged("cnn", [2, 0, 1], schedule="zb-h1")),
    "zbv": Training(plan=staged("deep", [0, 1, 1, 0], schedule="zbv", micro_batch=2), dtype=torch.float32),
    "auto schedule": Training(
        plan=staged(
            "deep",
            [0, 1],
            schedule="auto",
            micro_batch=2,
            predicted={
                "batch": 8,
                "step_s": 1.0,
                "bubble": 0.1,
                "peak_bytes": [1, 1],
                "stages_s": [[0.02, 0.03, 0.008], [0.03, 0.045, 0.008]],
            },
        )
    ),
    "table of actions": Training(plan=staged("deep", [0, 1], schedule="table", table=TABLE), sizes=(8, 8, 8)),
    "tied weights in three stages": Training(case="tied", workers=3, plan=staged("tied", [0, 1, 2]), optimizer=sgd),
    "lstm in stages": Training(case="recurrent", plan=staged("recurrent", [0, 1], schedule="zb-h1")),
    # ---- late gradients
    "async-1f1b, none": Training(
        case="cnn",
        workers=3,
        plan=staged("cnn", [0, 1, 2], schedule="async-1f1b", micro_batch=2),
        sizes=(6, 6, 5, 6, 6),
        options={**LATE, "delay": "none", "clip_grad_norm": 0.5},
    ),
    "async-1f1b, both": Training(
        case="dropping",
        workers=4,
        plan=staged("dropping", [0, (1, 2), 3], schedule="async-1f1b", micro_batch=2),
        sizes=(6, 6, 6, 6, 6),
        options={**LATE, "delay": "both"},
    ),
    "async-1f1b, predict, weights in flight": Training(
        plan=staged("deep", [0, 1, 0, 1], schedule="async-1f1b", micro_batch=2, in_flight=[3, 2, 2, 1]),
        optimizer=sgd,
        sizes=(6, 6, 6, 6, 6),
        options={**LATE, "delay": "predict"},
    ),
    "late replicas, extrapolate": Training(
        plan=replicas(1.0, 1.0), optimizer=sgd, sizes=(6,) * 5, options={**LATE, "delay": "extrapolate"}
    ),
    "late replicas, lookahead, sharded": Training(
        plan=replicas(1.0, 1.0, optimizer="sharded"), sizes=(6,) * 5, options={**LATE, "delay": "lookahead"}
    ),
    "late replicas, feedback": Training(
        plan=replicas(1.0, 1.0), optimizer=adagrad, sizes=(6,) * 5, options={"staleness": 1, "warm_up": 0}
    ),
    # ---- activations
    "activations: offload, recompute, swap": Training(
        case="cnn", workers=1, plan=staged("cnn", [0, 0, 0, 0], policies=FATED)
    ),
    "activations in a pipeline": Training(
        case="cnn", plan=staged("cnn", [0, 0, 1, 1], policies=FATED[::-1], schedule="zb-h1"), dtype=torch.float32
    ),
    "activations on replicas, dropout": Training(
        case="dropping", plan=staged("dropping", [(0, 1)] * 3, policies=("recompute", "keep", "recompute"))
    ),
    # ---- precision
    "bf16": Training(
        case="cnn", plan=replicas(1.0, 1.0), optimizer=sgd, dtype=torch.float32, options={"precision": "bf16"}
    ),
    "stages of bf16 and channels last": Training(
        case="cnn",
        plan=staged("cnn", [0, 1, 0], each={0: {"precision": "bf16"}, 1: {"channels_last": True}}),
        dtype=torch.float32,
    ),
    # ---- split layers
    "layers split over three": Training(
        workers=3,
        plan=plan(stages=[{"replicas": [[0, 1, 2]], "shares": [1.0]}], micro_batch=2),
        options={"clip_grad_norm": 0.5},
    ),
    "split stages, recomputed": Training(
        case="cnn",
        workers=4,
        plan=staged("cnn", [[(0, 1)], [(2, 3)]], policies=("recompute", "offload"), micro_batch=2),
    ),
    "layers split twice, sharded optimizer": Training(
        case="dropping",
        workers=4,
        plan=plan(stages=[{"replicas": [[0, 1], [2, 3]], "shares": [1, 1]}], micro_batch=2, optimizer="sharded"),
    ),
    # ---- checkpoints and more
    "resumed with the same plan": Training(
        case="dropping", plan=staged("dropping", [0, 1]), resumed=staged("dropping", [0, 1])
    ),
    "resumed from replicas in stages": Training(
        plan=replicas(1.0, 1.0, optimizer="sharded"), optimizer=adam_in_groups, resumed=staged("deep", [1, 0])
    ),
    "fused": Training(
        case="gelu", workers=1, plan=replicas(1.0, micro_batch=4), sizes=(8, 8, 8), options={"fuse": True}
    ),
}
"""Trainings by their names."""


def runs() -> dict[str, Callable[[Path], Record]]:
    """Return all runs by their names."""
    return {**TRAININGS, **loops.RUNS, **scripts.RUNS, **planning.RUNS}
