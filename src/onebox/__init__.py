"""onebox: every GPU that you can reach, as one box for training PyTorch models.

>>> import onebox
>>> pool = onebox.open("cpu*2")
>>> len(pool)
2
>>> pool.close()

Importing this package starts nothing and imports PyTorch only when something is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebox.lazy_names import lazy_names
from onebox.torch_first import import_torch_first
from onebox.version import __version__ as __version__

if TYPE_CHECKING:
    from onebox.engine import Evaluation, StepLoss, Trainer, Weighted
    from onebox.engine.planning.make_plan import make_plan
    from onebox.engine.planning.memory_fit import estimate_memory
    from onebox.engine.state.weight_files import meta_parameters
    from onebox.errors import OneboxError
    from onebox.feed import Feed
    from onebox.frozen_weights import quantize_frozen
    from onebox.padding import Buckets
    from onebox.plan import Plan
    from onebox.pool import Link, Pool
    from onebox.stop_signals import StopSignals
    from onebox.trainer_options import DataParallel, Engine, Outer, Recovery, Staging, StaleGradients, Weights
    from onebox.vgpu import open_devices as open

import_torch_first()

__all__ = [
    "Buckets",
    "DataParallel",
    "Engine",
    "Evaluation",
    "Feed",
    "Link",
    "Numerics",
    "OneboxError",
    "Outer",
    "Plan",
    "Pool",
    "Recovery",
    "Staging",
    "StaleGradients",
    "StepLoss",
    "StopSignals",
    "Trainer",
    "Weighted",
    "Weights",
    "estimate_memory",
    "make_plan",
    "meta_parameters",
    "open",
    "quantize_frozen",
]

__getattr__ = lazy_names(
    "onebox",
    {
        "onebox.engine": ("Evaluation", "StepLoss", "Trainer", "Weighted"),
        "onebox.engine.planning.make_plan": ("make_plan",),
        "onebox.engine.planning.memory_fit": ("estimate_memory",),
        "onebox.engine.state.weight_files": ("meta_parameters",),
        "onebox.errors": ("OneboxError",),
        "onebox.feed": ("Feed",),
        "onebox.frozen_weights": ("quantize_frozen",),
        "onebox.padding": ("Buckets",),
        "onebox.plan": ("Plan",),
        "onebox.pool": ("Link", "Pool"),
        "onebox.stop_signals": ("StopSignals",),
        "onebox.trainer_options": (
            "DataParallel",
            "Engine",
            "Numerics",
            "Outer",
            "Recovery",
            "Staging",
            "StaleGradients",
            "Weights",
        ),
        "onebox.vgpu": ("open_devices as open",),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
