"""Everything that the recording takes from inside the package, beside what :mod:`onebox` itself exports.

When a module moves, its import changes here and nowhere else in this folder.
"""

from __future__ import annotations

import json
from typing import Any

import onebox
from onebox.feed import Position
from onebox.plan import (
    ComputeTime,
    DeviceSpec,
    Links,
    Problem,
    Segment,
    SegmentValue,
    Tie,
    named_schedule,
    predict,
    search,
)
from onebox.pool import Fault, open_pool
from onebox.vgpu import alias_cuda, set_synchronous, spawn
from tests.kit.trainer_arguments import grouped
from tests.recorded.hashing import hash_of

__all__ = [
    "POLICY",
    "ComputeTime",
    "DeviceSpec",
    "Fault",
    "Links",
    "Position",
    "Problem",
    "Segment",
    "SegmentValue",
    "Tie",
    "alias_cuda",
    "canonical",
    "named_schedule",
    "open_pool",
    "predict",
    "resume_trainer",
    "search",
    "set_synchronous",
    "spawn",
    "trainer_of",
]

POLICY = "policy"
"""The key of a stage's activation policy in a plan file."""


LATER = {"gradients": "none", "activations": "none"}
"""Fields of a stage that plans of the recording lack, with their defaults."""


def canonical(plan: onebox.Plan) -> str:
    """Return the hash of a plan, which does not depend on the names of fields: ``policy`` is hashed as ``fate``.

    Fields that came later are left out where they have their defaults.
    """
    data = json.loads(plan.to_json())
    data["stages"] = [
        {"fate" if key == POLICY else key: value for key, value in one.items() if LATER.get(key, ...) != value}
        for one in data["stages"]
    ]
    return hash_of(data)


def trainer_of(model: Any, loss: Any, optimizer: Any, **options: Any) -> onebox.Trainer:
    """Return a trainer with the options that runs name; where the trainer's own get other names, they change here."""
    return onebox.Trainer(model, loss, optimizer, **grouped(**options))


def resume_trainer(folder: Any, model: Any, loss: Any, optimizer: Any, **options: Any) -> onebox.Trainer:
    """Return a trainer that goes on from a checkpoint, likewise."""
    return onebox.Trainer.resume(folder, model, loss, optimizer, **grouped(**options))
